"""Who may run, in which slot, and who waits for whom: scripted events on a clock that only the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from singletree.engines.engine import Outlook
from singletree.errors import Overloaded
from singletree.llamacpp.admission import KEEP_SECONDS, LONGEST_TENURE, LONGEST_WAIT, Admission, Ticket
from singletree.llamacpp.prefix_files import pack_ids
from singletree.llamacpp.slots import Claim


class Timer:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when, self.callback, self.cancelled = when, callback, False

    def cancel(self) -> None:
        self.cancelled = True


class Hours:
    """A clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None], /) -> Timer:
        self.timers.append(Timer(when, callback))
        return self.timers[-1]

    def go_on(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [timer for timer in self.timers if not timer.cancelled and timer.when <= end]:
            first = min(due, key=lambda timer: timer.when)
            self.timers.remove(first)
            self.now = max(self.now, first.when)
            first.callback()
        self.now = end


@pytest.fixture
def clock() -> Hours:
    return Hours()


def talk(name: str, turns: int) -> list[int]:
    """The prompt of a conversation after so many turns: 1000 tokens each."""
    return [ord(name) * 100_000 + at for at in range(1000 * turns)]


class Slots:
    """An admission, and the conversations on it."""

    def __init__(
        self, clock: Hours, slots: int, tokens: int = 10**6, limit: int = 99, **settings: Any
    ) -> None:
        self.admission = Admission(slots, tokens, limit, clock=clock, **settings)

    def ask(self, session: str, prompt: Sequence[int] = (), room: int = 1, **claim: Any) -> Ticket:
        return self.admission.ticket(Claim(pack_ids(prompt), room, session=session, **claim))

    def end(self, ticket: Ticket, *, is_kept: bool = True) -> None:
        """Its turn is over: the slot holds its prompt and an answer of ten tokens."""
        self.admission.settle(ticket)
        prompt = ticket.claim.packed_ids
        ticket.release(prompt + pack_ids([7] * 10), len(prompt) // 4, is_kept=is_kept)


def granted(*tickets: Ticket) -> list[bool]:
    return [ticket.is_granted for ticket in tickets]


async def test_slots_are_granted_in_order_of_arrival(clock: Hours) -> None:
    slots = Slots(clock, 1)
    first, second, third = (slots.ask("") for _ in range(3))
    assert granted(first, second, third) == [True, False, False]
    first.release()
    assert granted(second, third) == [True, False]
    await second.granted()


async def test_lower_priority_goes_first(clock: Hours) -> None:
    slots = Slots(clock, 1)
    running, late, early = slots.ask(""), slots.ask("", priority=5), slots.ask("", priority=-5)
    running.release()
    assert granted(late, early) == [False, True]


async def test_room_counts_and_nobody_overtakes(clock: Hours) -> None:
    slots = Slots(clock, 9, 100)
    running, large, small = slots.ask("", room=60), slots.ask("", room=50), slots.ask("", room=10)
    assert granted(large, small) == [False, False]
    running.release()
    assert granted(large, small) == [True, True]


async def test_who_leaves_the_line_makes_way(clock: Hours) -> None:
    slots = Slots(clock, 9, 100)
    slots.ask("", room=60)
    large, small = slots.ask("", room=50), slots.ask("", room=10)
    large.release()
    assert small.is_granted


async def test_releasing_twice_gives_back_once(clock: Hours) -> None:
    slots = Slots(clock, 1, 10)
    first = slots.ask("", room=10)
    first.release()
    first.release()
    second, third = slots.ask("", room=10), slots.ask("", room=10)
    assert granted(second, third) == [True, False]


@pytest.mark.parametrize(("speed", "seconds"), [(None, 2.0), (50.0, 20.0), (5000.0, 2.0), (1.0, 600.0)])
async def test_a_full_line_refuses_until_its_prompts_are_read(
    clock: Hours, speed: float | None, seconds: float
) -> None:
    slots = Slots(clock, 1, limit=1, speed=lambda: speed)
    slots.ask("a", talk("a", 2))
    waiting = slots.ask("b", talk("b", 1))
    with pytest.raises(Overloaded, match="1 requests are waiting") as refusal:
        slots.ask("c")
    assert refusal.value.retry_after == seconds
    waiting.release()
    slots.ask("c")


async def test_what_is_parked_need_not_be_read_before_the_next(clock: Hours) -> None:
    slots = Slots(clock, 1, limit=1, speed=lambda: 50.0, known=lambda packed: len(packed) // 4 - 250)
    slots.ask("a", talk("a", 2))
    slots.ask("b", talk("b", 1))
    with pytest.raises(Overloaded) as refusal:
        slots.ask("c")
    assert refusal.value.retry_after == 5.0


async def test_a_wait_that_is_cancelled_takes_nothing(clock: Hours) -> None:
    slots = Slots(clock, 1)
    first, second = slots.ask(""), slots.ask("")
    waiting = asyncio.create_task(second.granted())
    await asyncio.sleep(0)
    waiting.cancel()
    second.release()
    first.release()
    assert slots.ask("").is_granted


async def test_a_session_keeps_its_slot_between_its_turns(clock: Hours) -> None:
    slots = Slots(clock, 1)
    first = slots.ask("a", talk("a", 1))
    other = slots.ask("b", talk("b", 1))
    slots.end(first)
    clock.go_on(KEEP_SECONDS / 2)
    assert not other.is_granted
    second = slots.ask("a", talk("a", 2))
    assert (second.is_granted, second.found) == (True, 1000)
    slots.end(second)
    clock.go_on(KEEP_SECONDS)
    assert (other.is_granted, other.found) == (True, 0)
    [displaced] = other.displaced
    assert (displaced.slot, displaced.tokens, displaced.prompt_tokens) == (0, 2010, 2000)


async def test_a_state_that_costs_much_is_kept_for_longer(clock: Hours) -> None:
    slots = Slots(clock, 1, keep_seconds=lambda tokens: tokens / 101)
    first, other = slots.ask("a", talk("a", 1)), slots.ask("b", talk("b", 1))
    slots.end(first)
    clock.go_on(9.9)
    assert not other.is_granted
    clock.go_on(0.2)
    assert other.is_granted


async def test_no_session_keeps_its_slot_for_ever(clock: Hours) -> None:
    slots = Slots(clock, 1)
    turn, other = slots.ask("a", talk("a", 1)), slots.ask("b", talk("b", 1))
    turns, ended, began = 1, 0.0, clock.now
    while not other.is_granted:
        slots.end(turn)
        ended = clock.now
        clock.go_on(1.0)
        turns += 1
        turn = slots.ask("a", talk("a", turns))
        clock.go_on(9.0)
    assert ended - began == LONGEST_TENURE
    assert not turn.is_granted


async def test_a_slot_that_nobody_wants_stays_with_its_session(clock: Hours) -> None:
    slots = Slots(clock, 2)
    slots.end(slots.ask("a", talk("a", 1)))
    clock.go_on(10 * LONGEST_TENURE)
    other = slots.ask("b", talk("b", 1))
    again = slots.ask("a", talk("a", 2))
    assert [(each.slot, each.found) for each in (other, again)] == [(1, 0), (0, 1000)]
    assert other.displaced == ()


async def test_a_live_session_loses_no_state_while_a_finished_one_has_a_slot(clock: Hours) -> None:
    slots = Slots(clock, 2)
    finished, live = slots.ask("a", talk("a", 1)), slots.ask("b", talk("b", 1))
    slots.end(finished, is_kept=False)
    slots.end(live)
    other = slots.ask("c", talk("c", 1))
    assert (other.is_granted, other.slot) == (True, finished.slot)
    assert not slots.ask("d", talk("d", 1)).is_granted
    again = slots.ask("b", talk("b", 2))
    assert (again.is_granted, again.found) == (True, 1000)


async def test_the_main_agent_goes_first(clock: Hours) -> None:
    slots = Slots(clock, 1)
    running = slots.ask("s1", talk("p", 1), is_subagent=True)
    waiting = [slots.ask(f"s{at}", talk(chr(200 + at), 1), is_subagent=True) for at in (2, 3)]
    main = slots.ask("main", talk("m", 1))
    slots.end(running)
    assert granted(main, *waiting) == [True, False, False], "it takes a slot that is kept for a sub-agent"
    slots.end(main)
    clock.go_on(KEEP_SECONDS / 2)
    assert granted(*waiting) == [False, False], "a sub-agent takes none that is kept for it"
    clock.go_on(KEEP_SECONDS)
    assert granted(*waiting) == [True, False]


async def test_a_sub_agent_does_not_wait_for_ever(clock: Hours) -> None:
    slots = Slots(clock, 1)
    running = slots.ask("m1", talk("a", 1))
    patient = slots.ask("s", talk("s", 1), is_subagent=True)
    clock.go_on(LONGEST_WAIT)
    mains = [slots.ask(f"m{at}", talk(chr(200 + at), 1)) for at in range(3)]
    slots.end(running)
    assert granted(patient, *mains) == [True, False, False, False]


async def test_a_higher_priority_takes_a_slot_that_is_kept(clock: Hours) -> None:
    slots = Slots(clock, 1)
    slots.end(slots.ask("a", talk("a", 1)))
    low, high = slots.ask("b", priority=1), slots.ask("c", priority=-1)
    assert granted(low, high) == [False, True]


async def test_a_common_preamble_is_copied_rather_than_taken(clock: Hours) -> None:
    slots = Slots(clock, 2)
    slots.end(slots.ask("main", talk("m", 3)))
    preamble = [*talk("m", 2), *talk("s", 1)]
    sub = slots.ask("sub", preamble, is_subagent=True)
    assert (sub.slot, sub.found, sub.displaced) == (1, 0, ())
    assert sub.source is not None
    assert (sub.source.slot, sub.source.tokens) == (0, 3010)
    again = slots.ask("main", talk("m", 4))
    assert not again.is_granted, "its state is being copied"
    slots.admission.settle(sub)
    assert (again.is_granted, again.found) == (True, 3000)


async def test_without_copies_the_longest_prefix_is_used_in_place(clock: Hours) -> None:
    slots = Slots(clock, 2, copies=False)
    slots.end(slots.ask("", talk("m", 3)), is_kept=False)
    other = slots.ask("", [*talk("m", 2), 1])
    assert (other.slot, other.found, other.source) == (0, 2000, None)


async def test_without_copies_a_changed_prompt_takes_the_slot_of_its_session(clock: Hours) -> None:
    slots = Slots(clock, 2, copies=False)
    slots.end(slots.ask("a", talk("a", 2)))
    changed = slots.ask("a", [*talk("a", 1), *talk("x", 1)])
    assert (changed.slot, changed.found) == (0, 1000)


async def test_what_another_reads_is_not_read_twice(clock: Hours) -> None:
    slots = Slots(clock, 2, speed=lambda: 100.0)
    first = slots.ask("s1", [*talk("p", 2), 1], is_subagent=True)
    second = slots.ask("s2", [*talk("p", 2), 2], is_subagent=True)
    third = slots.ask("s3", talk("q", 1), is_subagent=True)
    assert granted(first, second, third) == [True, False, True]
    slots.end(third, is_kept=False)
    assert not second.is_granted, "a slot is free, but the other reads 2000 of its tokens"
    slots.end(first)
    assert (second.is_granted, second.slot) == (True, third.slot)
    assert second.source is not None
    assert second.source.slot == first.slot


async def test_to_wait_for_another_takes_no_longer_than_to_read(clock: Hours) -> None:
    slots = Slots(clock, 2, speed=lambda: 100.0)
    slots.ask("s1", [*talk("p", 2), 1])
    second = slots.ask("s2", [*talk("p", 2), 2])
    clock.go_on(39.9)
    assert not second.is_granted
    clock.go_on(0.2)
    assert second.is_granted


async def test_room_that_idle_slots_take_is_made_free(clock: Hours) -> None:
    slots = Slots(clock, 3, 5000)
    for name in "ab":
        slots.end(slots.ask(name, talk(name, 1), 1500))
        clock.go_on(10)
    third = slots.ask("c", talk("c", 1), 3500)
    assert [(state.slot, state.tokens) for state in third.displaced] == [(0, 1010)]
    assert slots.admission.room_for(third) == 5000 - 2 * 1010, "both are still there"
    back = slots.ask("a", talk("a", 2), 1)
    assert (back.is_granted, back.slot, back.found) == (True, 1, 0), "its state is on its way out"
    slots.admission.settle(third)
    assert slots.admission.room_for(third) >= 3500


async def test_who_continues_waits_until_its_slot_is_noticed_to_be_free(clock: Hours) -> None:
    slots = Slots(clock, 2)
    left = slots.ask("a", talk("a", 1))
    slots.admission.leave_early(left, left.claim.packed_ids, 1000)
    again, other = slots.ask("a", talk("a", 2)), slots.ask("b", talk("b", 1))
    assert granted(again, other) == [False, True]
    left.release(left.claim.packed_ids, 1000)
    assert (again.is_granted, again.found) == (True, 1000)


async def test_sessions_of_one_key_are_distinguished_by_their_prompts(clock: Hours) -> None:
    slots = Slots(clock, 2)
    slots.end(slots.ask("a", talk("a", 2)))
    title = slots.ask("a", talk("t", 1))
    assert title.slot == 1, "a title request of the same session does not take its slot"
    changed = slots.ask("a", [*talk("a", 2)[:1900], *talk("x", 1)])
    assert (changed.slot, changed.found) == (0, 1900), "the last message was written anew"


async def test_equal_prompts_of_two_sessions_do_not_mix(clock: Hours) -> None:
    slots = Slots(clock, 2)
    slots.end(slots.ask("a", talk("a", 1)))
    other = slots.ask("b", talk("a", 1))
    assert other.slot == 1
    assert other.source is not None


async def test_a_new_process_holds_nothing(clock: Hours) -> None:
    slots = Slots(clock, 2)
    slots.end(slots.ask("a", talk("a", 2)))
    slots.admission.borrow(0)
    slots.admission.forget_states()
    again = slots.ask("a", talk("a", 3))
    assert (again.is_granted, again.found, again.displaced) == (True, 0, ())


async def test_a_turn_waits_for_the_copy_of_its_slot(clock: Hours) -> None:
    slots = Slots(clock, 2)
    slots.end(slots.ask("a", talk("a", 1)))
    assert slots.admission.borrow(0) is not None
    again = slots.ask("a", talk("a", 2))
    assert not again.is_granted, "the other slot would have to read everything"
    slots.admission.give_back(0)
    assert (again.slot, again.found > 900) == (0, True)


async def test_a_slot_that_is_lent_is_nobodys(clock: Hours) -> None:
    slots = Slots(clock, 1)
    running = slots.ask("a", talk("a", 1))
    assert slots.admission.borrow(0) is None, "it is at work"
    slots.end(running)
    held = slots.admission.borrow(0)
    assert held is not None
    assert held.tokens == 1010
    again = slots.ask("a", talk("a", 2))
    assert not again.is_granted
    slots.admission.give_back(0)
    assert again.is_granted


def ended(clock: Hours, pause: float | None = None, **known: bool) -> Outlook:
    """The outlook of a conversation whose turn has ended; with ``pause``, a call is out."""
    outlook = Outlook(goes_on=True)
    outlook.is_running = False
    outlook.returns_at = None if pause is None else clock.now + pause
    for name, value in known.items():
        setattr(outlook, name, value)
    return outlook


@pytest.mark.parametrize(
    ("pause", "over", "waits"),
    [
        (None, False, True),
        (KEEP_SECONDS / 2, False, True),
        (KEEP_SECONDS * 2, False, False),
        (None, True, False),
    ],
)
async def test_a_slot_is_kept_only_for_a_session_that_comes_back_in_time(
    clock: Hours, pause: float | None, over: bool, waits: bool
) -> None:
    slots = Slots(clock, 1)
    first = slots.ask("a", talk("a", 1), outlook=ended(clock, pause, is_over=over))
    slots.end(first)
    assert granted(slots.ask("b", talk("b", 1))) == [not waits]


async def test_a_slot_is_given_up_as_soon_as_its_session_is_known_to_be_over(clock: Hours) -> None:
    slots, outlook = Slots(clock, 1), Outlook()
    slots.end(slots.ask("a", talk("a", 1), outlook=outlook))
    second = slots.ask("b", talk("b", 1))
    assert not second.is_granted
    outlook.is_running, outlook.is_over = False, True
    outlook.changed()
    assert second.is_granted


async def test_a_request_takes_the_slot_that_is_needed_least(clock: Hours) -> None:
    slots = Slots(clock, 3)
    known = {"main": ended(clock, 3.0), "sub": ended(clock, is_over=True), "idle": ended(clock)}
    first = {name: slots.ask(name, talk(name[0], 1), outlook=outlook) for name, outlook in known.items()}
    for ticket in first.values():
        clock.go_on(1)
        slots.end(ticket)
    clock.go_on(1)
    assert slots.ask("x", talk("x", 1)).slot == first["sub"].slot
    clock.go_on(KEEP_SECONDS)
    assert slots.ask("y", talk("y", 1)).slot == first["idle"].slot, (
        "its last turn ended later than that of main"
    )


async def test_what_is_over_makes_room_first(clock: Hours) -> None:
    slots = Slots(clock, 3, 5000)
    slots.end(slots.ask("main", talk("m", 2), outlook=ended(clock, 60.0)))
    clock.go_on(1)
    sub = slots.ask("sub", talk("s", 1), outlook=ended(clock, is_over=True))
    slots.end(sub)
    third = slots.ask("x", talk("x", 2), room=2900)
    assert [each.slot for each in third.displaced] == [sub.slot]
