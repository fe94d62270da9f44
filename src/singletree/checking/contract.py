"""The checks that an endpoint has to pass so that agents work on it, and how they are run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from singletree.checking import cache_checks, request_checks, stream_checks
from singletree.checking.endpoint import Endpoint, NoAnswer, Refused
from singletree.checking.returned_turns import TurnProtocol
from singletree.checking.verdicts import Check, Inconclusive, Verdict
from singletree.errors import BadConfiguration

_MODULES = (stream_checks, request_checks, cache_checks)
CHECKS: tuple[Check, ...] = (
    *(each for module in _MODULES for each in vars(module).values() if isinstance(each, Check)),
    *cache_checks.LOOPS,
)


def choose(only: Sequence[str], skip: Sequence[str]) -> list[Check]:
    """Return the checks to run, in the order of the table. Raises BadConfiguration for an unknown name."""
    known = [check.name for check in CHECKS]
    for name in (*only, *skip):
        if name not in known:
            raise BadConfiguration(f"unknown check {name!r}; there are {', '.join(known)}")
    return [check for check in CHECKS if (not only or check.name in only) and check.name not in skip]


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
