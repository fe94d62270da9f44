"""Cancel a request when its client has sent the same request again.

A client that gives up a request sends it again, and behind a proxy the server does not see that it disconnected. Then
both requests run, each more slowly, until the client gives up the second one as well (alltuner/tale#3396: Bun's fetch
after 300 s).

Two equal requests do not prove this: a program that samples several answers to one prompt also sends them with one
session name, and waits for all of them. So the first request is cancelled only where the second is known to be a
repetition: both have the same idempotency key, or the client is one that repeats (``SessionHeader.repeats``), has no
other equal request in flight, and sent the first one long enough ago to have given it up.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from singletree.server.sessions.request_headers import client_repeats, header_session

Cancel = Callable[[], object]

SOONEST_REPETITION = 1.0
"""Shortest time in seconds between a request and its repetition. Parallel agents with one task send equal requests
within a shorter time; a client that gives up a request has waited longer.
"""

_IDEMPOTENCY_KEY = "idempotency-key"


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Identifies requests that may be repetitions of each other; an equal one certainly is where it is ``certain``."""

    digest: bytes
    certain: bool = False


@dataclass(eq=False, slots=True)
class _Running:
    cancel: Cancel
    since: float


class InFlight:
    """The requests in flight that may be sent again.

    Attributes:
        repeat_elsewhere: called with each request that repeats none here and has no equal one here, so that those of
            other processes are looked at; None where there are none.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._held: dict[bytes, list[_Running]] = {}
        self._now = now
        self.repeat_elsewhere: Callable[[RequestKey], None] | None = None

    @contextmanager
    def guard(self, identity: RequestKey | None, cancel: Cancel) -> Iterator[None]:
        """Register a request while the context lasts, and cancel an earlier request that it repeats.

        A request without ``identity`` is never treated as a repetition.
        """
        if identity is None:
            yield
            return
        this = _Running(cancel, self._now())
        running = self._held.setdefault(identity.digest, [])
        ages = [this.since - each.since for each in running]
        repeated = running[0] if is_repetition(identity, ages) else None
        if not running and self.repeat_elsewhere is not None:
            self.repeat_elsewhere(identity)
        running.append(this)
        if repeated is not None:
            running.remove(repeated)
            repeated.cancel()
        try:
            yield
        finally:
            if this in running:
                running.remove(this)
            if not running and self._held.get(identity.digest) is running:
                del self._held[identity.digest]

    def starts(self, digest: bytes) -> list[float]:
        """Return when each request with ``digest`` came, by the clock that all processes of a machine have."""
        return [each.since for each in self._held.get(digest, ())]

    def cancel(self, digest: bytes) -> None:
        """Cancel the request with ``digest``, if there is exactly one: it is repeated in another process."""
        running = self._held.get(digest, [])
        if len(running) == 1:
            running.pop().cancel()


def is_repetition(identity: RequestKey, ages: Sequence[float]) -> bool:
    """Return whether a request that arrives now repeats an equal one.

    Args:
        ages: for how many seconds each equal request has run; negative for one that came later.
    """
    return len(ages) == 1 and ages[0] >= (0 if identity.certain else SOONEST_REPETITION)


def request_key(headers: Mapping[str, str], path: str, body: bytes) -> RequestKey | None:
    """Return the identity of a request; None where an equal request is not a repetition.

    A session's name in the body (``prompt_cache_key``, ``metadata.user_id``) is ignored: programs that sample several
    answers send it in all of their requests.

    Args:
        headers: with lower-case names.
        body: after decompression.
    """
    key = headers.get(_IDEMPOTENCY_KEY, "").strip()
    if not key and not client_repeats(headers):
        return None
    session = header_session(headers)
    # Most processors have instructions for this digest, which takes a quarter of the time of BLAKE2 with them.
    digest = hashlib.sha256(body)
    digest.update("\0".join(("", path, session, key)).encode("utf-8", "surrogatepass"))
    return RequestKey(digest.digest(), certain=bool(key))
