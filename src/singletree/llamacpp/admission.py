"""Decides which request may run, and in which slot, for an engine with few slots and limited room in its KV cache.

A slot holds the state of one conversation. If a request of another session takes it, that state is lost, and the next
turn of the conversation is read again from its beginning: with more conversations than slots, every turn of each. So a
session keeps its slot between its turns, and its state is parked (``slots.py``) before another session takes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from singletree.errors import Overloaded
from singletree.llamacpp.prefix_files import common_tokens
from singletree.llamacpp.slots import Claim, HeldState, Slot

LONGEST_WAIT = 60.0
"""A request that has waited as long, in seconds, goes before all others of its priority and may have any idle slot."""

LONGEST_TENURE = 60.0
"""After this time, in seconds, a session no longer keeps its slot between its turns while others wait."""

KEEP_SECONDS = 2.0
"""How long an idle slot is kept for the next turn of its session, unless ``keep_seconds`` is given."""

LEAST_COMMON = 256
"""Fewer tokens are not worth the time to copy a state."""

WORTH_WAITING = 512
"""A request waits for a slot at work that reads as many tokens of its prompt, rather than read them again."""

_SHORTEST_RETRY = 2.0
_LONGEST_RETRY = 600.0
_UNKNOWN_SPEED = 100.0  # tokens per second


class TimerHandle(Protocol):
    """A callback that may be cancelled."""

    def cancel(self) -> None:
        """Do not call it."""


class Clock(Protocol):
    """What the admission needs of an event loop."""

    def time(self) -> float:
        """Return the time in seconds."""

    def call_at(self, when: float, callback: Callable[[], None], /) -> TimerHandle:
        """Call ``callback`` at that time."""


class Admission:
    """Grant slots and room in the KV cache.

    Order: the lowest priority number, then who has waited longer than ``LONGEST_WAIT``, then main agents before
    sub-agents, then first come, first served. Nobody overtakes a request that waits for room, except the session that
    a slot is kept for, and that one for ``LONGEST_TENURE`` at most; so no request starves within its priority.

    The slot: the one that the request continues, else an empty one, else the one that holds the longest prefix of the
    prompt. An idle slot is kept for its session for some seconds, unless that will come back later or not at all; a
    request of a main agent may take one that is kept for a sub-agent. Where several would do, the state that is needed
    least goes (``outlook.worth``).

    Args:
        slots: how many generations run at once.
        tokens: room in the KV cache, in tokens.
        queue_limit: how many requests may wait; more are refused.
        copies: whether states are parked, so that a prompt may begin with a copy of another slot's state.
        keep_seconds: returns how long an idle slot that holds so many tokens is kept for its session.
        known: returns how many tokens of a prompt, as of ``pack_ids``, are parked or on disk.
        speed: returns how many tokens are read in a second; None if unknown.
        clock: None for the running event loop.
    """

    def __init__(
        self,
        slots: int,
        tokens: int,
        queue_limit: int,
        *,
        copies: bool = True,
        keep_seconds: Callable[[int], float] = lambda tokens: KEEP_SECONDS,
        known: Callable[[bytes], int] = lambda packed_ids: 0,
        speed: Callable[[], float | None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self._slots = [Slot(number) for number in range(slots)]
        self._tokens = tokens
        self._queue_limit = queue_limit
        self._copies = copies
        self._keep_seconds = keep_seconds
        self._known = known
        self._speed = speed
        self._given_clock = clock
        self._waiting: list[Ticket] = []
        self._granted: set[Ticket] = set()
        self._arrivals = 0
        self._timer: TimerHandle | None = None

    @property
    def _clock(self) -> Clock:
        return self._given_clock or asyncio.get_running_loop()

    def ticket(self, claim: Claim) -> Ticket:
        """Queue for a slot and for room, which must not exceed the room of the whole cache.

        Raises Overloaded when the queue is full. The caller must ``release`` the ticket, granted or not.
        """
        if len(self._waiting) >= self._queue_limit:
            raise Overloaded(
                f"{len(self._waiting)} requests are waiting for the engine already; try again later",
                retry_after=self.reading_seconds(),
            )
        self._arrivals += 1
        if claim.outlook is not None:
            claim.outlook.changed = self._grant  # A slot may no longer be kept.
        ticket = Ticket(self, claim, self._arrivals, self._clock.time())
        self._waiting.append(ticket)
        self._grant()
        return ticket

    @property
    def running(self) -> int:
        return len(self._granted)

    @property
    def free_tokens(self) -> int:
        """Room in the KV cache that no granted request has reserved, in tokens."""
        return self._tokens - sum(ticket.claim.tokens for ticket in self._granted)

    def reading_seconds(self) -> float:
        """Return how long the prompts that wait take to be read, for a refusal's ``retry_after``."""
        speed = self._speed()
        if not speed:
            return _SHORTEST_RETRY
        unread = sum(ticket.claim.prompt_tokens - self._available(ticket.claim) for ticket in self._waiting)
        return min(max(unread / speed, _SHORTEST_RETRY), _LONGEST_RETRY)

    def room_for(self, ticket: Ticket) -> int:
        """Return how many tokens the slot of a granted ticket may hold now."""
        others = [slot for slot in self._slots if slot.running is None and slot.number != ticket.slot]
        return self.free_tokens + ticket.claim.tokens - sum(slot.tokens for slot in others)

    def borrow(self, number: int) -> HeldState | None:
        """Return the state of an idle slot and let no request have it until ``give_back``; None if it is not idle."""
        slot = self._slots[number]
        if not slot.is_idle or not slot.held:
            return None
        slot.is_copied = True
        return slot.state

    def give_back(self, number: int) -> None:
        self._slots[number].is_copied = False
        self._grant()

    def settle(self, ticket: Ticket) -> None:
        """Let requests have the other slots again that were lent to a ticket. Safe to call twice."""
        self._take_back_lent(ticket)
        self._grant()

    def _take_back_lent(self, ticket: Ticket) -> None:
        for state in ticket.displaced:
            if state.slot != ticket.slot:
                self._slots[state.slot].clear()
                self._slots[state.slot].is_lent = False
        if ticket.source is not None:
            self._slots[ticket.source.slot].is_lent = False
        ticket.displaced, ticket.source = (), None

    def forget_states(self) -> None:
        """Note that all slots are empty, since llama.cpp was started again."""
        for slot in self._slots:
            slot.clear()
            slot.is_lent = slot.is_copied = slot.is_ending = False
            slot.salt = None if slot.running is None else slot.running.salt
        for ticket in self._granted:
            ticket.displaced, ticket.source, ticket.found = (), None, 0
        self._grant()

    def leave_early(self, ticket: Ticket, held: bytes, prompt_tokens: int) -> None:
        """Note that nobody reads the answer any more, and what the slot holds; ``release`` follows."""
        if ticket in self._granted:
            slot = self._slots[ticket.slot]
            slot.is_ending, slot.held, slot.prompt_tokens, slot.owner = (
                True,
                held,
                prompt_tokens,
                ticket.claim,
            )

    def return_ticket(self, ticket: Ticket, held: bytes, prompt_tokens: int, *, is_kept: bool) -> None:
        """Take back what a ticket has, its slot or its place in the queue; called by ``Ticket``."""
        if ticket in self._granted:
            self._granted.remove(ticket)
            now, slot = self._clock.time(), self._slots[ticket.slot]
            slot.running, slot.is_ending = None, False
            slot.held, slot.prompt_tokens, slot.used = held, prompt_tokens, now
            slot.owner = ticket.claim if held else None
            slot.kept_until = now + self._keep_seconds(slot.tokens) if is_kept and held else 0.0
            self._take_back_lent(ticket)
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
        self._grant()

    def _grant(self) -> None:
        """Grant what can be granted now, and come back when that changes with time."""
        now, blocked = self._clock.time(), False
        for ticket in sorted(self._waiting, key=lambda ticket: self._order(ticket, now)):
            slot = self._choose(ticket, now)
            if slot is None or (blocked and not slot.is_continued_by(ticket.claim)):
                continue
            if ticket.claim.tokens > self.free_tokens:
                blocked = True
                continue
            self._give(ticket, slot, now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (soonest := self._next_change(now)) is not None:
            self._timer = self._clock.call_at(soonest, self._grant)

    def _order(self, ticket: Ticket, now: float) -> tuple[int, bool, bool, int]:
        claim = ticket.claim
        return claim.priority, not ticket.has_starved(now), claim.is_subagent, ticket.arrival

    def _next_change(self, now: float) -> float | None:
        if not self._waiting:
            return None
        times = [slot.kept_until for slot in self._slots if slot.is_idle]
        times += [slot.owned_since + LONGEST_TENURE for slot in self._slots if slot.is_idle]
        for ticket in self._waiting:
            times += [ticket.since + LONGEST_WAIT, ticket.shared_until]
        return min((time for time in times if time > now), default=None)

    def _choose(self, ticket: Ticket, now: float) -> Slot | None:
        """Return the slot that a request should have now; None if it should wait."""
        claim = ticket.claim
        if any((slot.is_ending or slot.is_copied) and slot.is_continued_by(claim) for slot in self._slots):
            return None  # Another slot would have to read the whole conversation.
        idle = [slot for slot in self._slots if slot.is_idle]
        continued = [slot for slot in idle if slot.is_continued_by(claim)]
        if continued:
            return max(continued, key=lambda slot: slot.common(claim))
        free = [slot for slot in idle if not self._is_kept_from(slot, ticket, now)]
        if not free or self._waits_for_reading(ticket, now):
            return None
        if self._copies:
            return min(free, key=lambda slot: self._displacement(slot, claim, now))
        return max(free, key=lambda slot: (slot.common(claim), not slot.held, -slot.used))

    def _displacement(self, slot: Slot, claim: Claim, now: float) -> tuple[bool, int, int, float]:
        """Return what it costs to give an idle slot to a request, for a comparison: an empty slot costs nothing."""
        kind, rest = slot.worth(now)
        common = slot.common(claim)
        return bool(slot.held), kind, -common if common >= LEAST_COMMON else 0, rest

    def _is_kept_from(self, slot: Slot, ticket: Ticket, now: float) -> bool:
        """Return whether an idle slot is kept for its session, although the request waits for one."""
        owner, claim = slot.owner, ticket.claim
        if owner is None or slot.kept_until <= now or ticket.has_starved(now):
            return False
        if owner.outlook is not None and not owner.outlook.may_return_by(slot.kept_until):
            return False
        if slot.owned_since + LONGEST_TENURE <= now:
            return False
        if not self._copies and owner.session and owner.session == claim.session:
            return False  # A changed prompt: no other slot could have what is left of it.
        if owner.priority != claim.priority:
            return owner.priority < claim.priority
        return claim.is_subagent or not owner.is_subagent

    def _waits_for_reading(self, ticket: Ticket, now: float) -> bool:
        """Return whether a slot at work reads so much of the prompt that it is better to copy its state afterwards.

        To wait must not take longer than to read, and two prompts that are read at once take twice as long.
        """
        claim = ticket.claim
        running = (slot.running for slot in self._slots if slot.running is not None)
        common = max((common_tokens(each.packed_ids, claim.packed_ids) for each in running), default=0)
        if not self._copies or common < WORTH_WAITING:
            ticket.shared_until = 0.0
            return False
        gain = common - self._available(claim)
        if gain < WORTH_WAITING:
            ticket.shared_until = 0.0
            return False
        ticket.shared_until = ticket.since + 2 * gain / (self._speed() or _UNKNOWN_SPEED)
        return now < ticket.shared_until

    def _available(self, claim: Claim) -> int:
        idle = [slot.common(claim) for slot in self._slots if slot.running is None]
        return max([self._known(claim.packed_ids), *idle])

    def _give(self, ticket: Ticket, slot: Slot, now: float) -> None:
        claim = ticket.claim
        self._waiting.remove(ticket)
        self._granted.add(ticket)
        ticket.slot, ticket.found = slot.number, slot.common(claim)
        displaced = [slot.state] if slot.held else []
        if slot.owner is None or not slot.is_continued_by(claim):
            slot.owned_since = now
        ticket.is_salted_anew = slot.salt not in (None, claim.salt)
        slot.salt = claim.salt
        source = self._source(slot, claim, ticket.found)
        slot.running, slot.kept_until = claim, 0.0
        if source is not None:
            source.is_lent = True
            ticket.source = source.state
        for other in self._crowded_out(slot):
            displaced.append(other.state)
            other.is_lent = True
        ticket.displaced = tuple(displaced)
        ticket.grant()

    def _source(self, slot: Slot, claim: Claim, found: int) -> Slot | None:
        """Return the idle slot whose state is worth copying into ``slot`` for a request; None if there is none."""
        if not self._copies:
            return None
        others = [other for other in self._slots if other.is_idle and other is not slot]
        best = max(others, key=lambda other: other.common(claim), default=None)
        if best is None or best.common(claim) - found < LEAST_COMMON:
            return None
        return best if best.common(claim) - self._known(claim.packed_ids) >= LEAST_COMMON else None

    def _crowded_out(self, slot: Slot) -> list[Slot]:
        """Return the idle slots whose states must go for the room that is reserved now, the least needed first."""
        others = [each for each in self._slots if each.running is None and each is not slot]
        excess = sum(each.tokens for each in others) - self.free_tokens
        idle = [each for each in others if each.is_idle and each.held]
        chosen = []
        now = self._clock.time()
        for each in sorted(idle, key=lambda each: each.worth(now)):
            if excess <= 0:
                break
            chosen.append(each)
            excess -= each.tokens
        return chosen


class Ticket:
    """A place in the queue, later a slot.

    Attributes:
        since: when it came, as a time of the clock.
        shared_until: how long it waits for another request that reads the same; 0 if it does not.
        slot: the slot that it has; valid when it is granted.
        found: how many tokens of the prompt the slot holds.
        is_salted_anew: whether llama.cpp has a state of another salt in the slot, which the request must not use.
        displaced: what the slot held, and the states of other slots that must go for the room; those slots are lent to
            this request until ``Admission.settle``.
        source: the state of a slot that is worth copying, which is lent to this request as well.
    """

    def __init__(self, admission: Admission, claim: Claim, arrival: int, since: float) -> None:
        self.claim = claim
        self.arrival = arrival
        self.since = since
        self.shared_until = 0.0
        self.slot = -1
        self.found = 0
        self.is_salted_anew = False
        self.displaced: tuple[HeldState, ...] = ()
        self.source: HeldState | None = None
        self.released = False
        self._admission = admission
        self._event = asyncio.Event()

    def has_starved(self, now: float) -> bool:
        return now - self.since >= LONGEST_WAIT

    def grant(self) -> None:
        """Mark the ticket as granted; called by ``Admission``."""
        self._event.set()

    @property
    def is_granted(self) -> bool:
        return self._event.is_set()

    async def granted(self) -> None:
        """Wait for the grant. A caller whose wait is cancelled must still release the ticket."""
        await self._event.wait()

    def release(self, held: bytes = b"", prompt_tokens: int = 0, *, is_kept: bool = False) -> None:
        """Return what was granted, or leave the queue. Safe to call twice.

        Args:
            held: the tokens that the slot holds now, as of ``pack_ids``.
            prompt_tokens: how many of them were the prompt.
            is_kept: whether the next turn of the session is expected soon.
        """
        if self.released:
            return
        self.released = True
        self._admission.return_ticket(self, held, prompt_tokens, is_kept=is_kept)
