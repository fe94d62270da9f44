"""What a check is, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from singletree.checking.endpoint import Endpoint, NoAnswer, Refused
from singletree.checking.returned_turns import TurnProtocol

Verdict = Literal["pass", "fail", "not applicable", "undecided"]
ALL = ("messages", "chat", "responses")


class Inconclusive(Exception):
    """Ends a check with ``verdict`` and a reason."""

    verdict: Verdict


class Failed(Inconclusive):
    """The endpoint has the fault."""

    verdict = "fail"


class NotApplicable(Inconclusive):
    """The endpoint lacks what is checked, and nobody asks for it."""

    verdict = "not applicable"


class Undecided(Inconclusive):
    """It cannot be told from outside."""

    verdict = "undecided"


Run = Callable[[Endpoint, TurnProtocol], str]
"""Returns what was seen if the check passes, and raises an Inconclusive otherwise."""


@dataclass(frozen=True, slots=True)
class Check:
    """One demand on an endpoint.

    Attributes:
        name: for ``--only`` and ``--skip``.
        title: what has to hold.
        users: what users see when it does not.
        reference: the page, the client or the issue that asks for it.
        protocols: where it is checked; with ``once`` on the first of them that the endpoint has.
    """

    name: str
    title: str
    users: str
    reference: str
    run: Run
    protocols: tuple[str, ...] = ALL
    once: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one check on one protocol."""

    check: str
    protocol: str
    verdict: Verdict
    reason: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_check(check: Check, endpoint: Endpoint, protocol: TurnProtocol) -> Result:
    """Run one check on one protocol of the endpoint."""
    began, verdict = time.perf_counter(), "pass"
    try:
        reason = check.run(endpoint, protocol)
    except Inconclusive as outcome:
        verdict, reason = outcome.verdict, str(outcome)
    except Refused as refused:
        verdict, reason = "fail", f"a valid request was {refused}"
    except NoAnswer as error:
        # A busy machine is no fault of the endpoint.
        verdict, reason = ("undecided" if error.is_late else "fail"), str(error)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        verdict, reason = "fail", f"an answer has another form than the protocol's: {error!r}"
    seconds = round(time.perf_counter() - began, 2)
    return Result(check.name, protocol.name, verdict, reason, seconds)  # type: ignore[arg-type]


def places(checks: Iterable[Check], endpoint: Endpoint) -> Iterator[tuple[Check, TurnProtocol]]:
    """Return each check with each protocol on which it runs, in order."""
    for check in checks:
        found = [each for each in endpoint.protocols if each.name in check.protocols]
        yield from ((check, protocol) for protocol in found[: 1 if check.once else None])


def run_all(checks: Iterable[Check], endpoint: Endpoint, seconds: float) -> Iterator[Result]:
    """Run the checks one after the other; those that have not begun after ``seconds`` are undecided."""
    end = time.monotonic() + seconds
    for check, protocol in places(checks, endpoint):
        if time.monotonic() > end:
            late = f"not begun within {seconds:.0f} s (--seconds)"
            yield Result(check.name, protocol.name, "undecided", late, 0.0)
        else:
            yield run_check(check, endpoint, protocol)
