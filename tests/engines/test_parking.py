"""States that lost their slot: what is kept of them, and that the real llama.cpp goes on from them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.contract import collect, tokens_of
from engines.small_model import ITALY, small_model
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, GenerationJob, Outlook
from singletree.llamacpp import admission, prefix_cache, slots
from singletree.llamacpp.engine import LlamaCppEngine
from singletree.llamacpp.prefix_cache import keep_seconds
from singletree.llamacpp.prefix_files import pack_ids
from singletree.llamacpp.slots import HeldState, ParkedStates, SavedState, SlotActions

pytestmark = pytest.mark.embedded

PREAMBLE = [5 + at * 7919 % 1009 for at in range(60)]
OTHER = [6 + at * 6007 % 1013 for at in range(60)]
ANSWER = Sampling(temperature=0.0, max_tokens=3, ignore_eos=True)


class Actions(SlotActions):
    """Writes files of ten bytes a token; ``log`` has what was done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log: list[str] = []
        self.missing = 0
        self.fails = False

    async def save(self, slot: int, name: str) -> SavedState:
        if self.fails:
            raise OSError("no room")
        self.log.append(f"save {slot}")
        tokens = 1000 - self.missing
        (self.folder / name).write_bytes(b"x" * tokens * 10)
        return SavedState(tokens, tokens * 10)

    async def restore(self, slot: int, name: str) -> None:
        if self.fails:
            raise OSError("no room")
        self.log.append(f"restore {slot} {(self.folder / name).stat().st_size}")

    async def erase(self, slot: int) -> None:
        raise AssertionError


def held(slot: int, first: int = 0, tokens: int = 1000, outlook: Outlook | None = None) -> HeldState:
    return HeldState(slot, pack_ids(range(first, first + tokens)), tokens - 100, outlook=outlook)


def over(first: int = 0) -> HeldState:
    """A state that nobody continues."""
    outlook = Outlook()
    outlook.is_running, outlook.is_over = False, True
    return held(0, first, outlook=outlook)


def firsts(parked: ParkedStates, *firsts: int) -> list[int]:
    """Those of ``firsts`` with which a parked state begins."""
    return [first for first in firsts if parked.known(pack_ids(range(first, first + 1000)))]


@pytest.fixture
def actions(tmp_path: Path) -> Actions:
    return Actions(tmp_path)


async def test_a_state_is_parked_and_restored(actions: Actions) -> None:
    parked = ParkedStates(actions, 10**6, 10)
    await parked.park(held(1))
    assert (len(parked), parked.size, parked.known(pack_ids(range(700)))) == (1, 10_000, 700)
    longer = pack_ids(range(1500))
    assert await parked.restore(0, longer, 900, 5000) == 900, "too little is gained"
    assert await parked.restore(0, longer, 0, 999) == 0, "there is no room"
    assert await parked.restore(0, longer, 0, 1000) == 1000
    await parked.park(held(0))
    assert actions.log == ["save 1", "restore 0 10000"], "what is parked already is not parked again"


async def test_little_that_would_be_lost_is_not_parked(actions: Actions) -> None:
    parked = ParkedStates(actions, 10**6, 10)
    await parked.park(held(0, tokens=200))
    await parked.park(held(0), pack_ids(range(900)))
    await ParkedStates(actions, 9_999, 10).park(held(0))
    assert actions.log == []


async def test_the_least_recently_used_state_goes(actions: Actions) -> None:
    parked = ParkedStates(actions, 25_000, 10)
    await parked.park(held(0, 0))
    await parked.park(held(0, 10_000))
    await parked.restore(0, pack_ids(range(2000)), 0, 5000)
    await parked.park(held(0, 20_000))
    known = [parked.known(pack_ids(range(first, first + 1000))) for first in (0, 10_000, 20_000)]
    assert known == [1000, 0, 1000]
    assert len(list(actions.folder.iterdir())) == 2


async def test_what_is_over_goes_before_what_was_used_earlier(actions: Actions) -> None:
    parked = ParkedStates(actions, 25_000, 10)
    await parked.park(held(0, 0))
    await parked.park(over(10_000))
    await parked.park(held(0, 20_000))
    assert firsts(parked, 0, 10_000, 20_000) == [0, 20_000]


async def test_what_is_over_takes_the_place_of_nothing(actions: Actions) -> None:
    parked = ParkedStates(actions, 25_000, 10)
    await parked.park(held(0, 0))
    await parked.park(held(0, 10_000))
    await parked.park(over(20_000))
    assert firsts(parked, 0, 10_000, 20_000) == [0, 10_000]
    assert actions.log == ["save 0"] * 2, "it is not even copied"


async def test_what_is_over_is_not_parked_where_its_beginning_is(actions: Actions) -> None:
    parked = ParkedStates(actions, 10**6, 10)
    await parked.park(over(0), pack_ids(range(300)))
    assert len(parked) == 0


async def test_the_copy_of_a_state_that_is_in_a_slot_again_goes_first(actions: Actions) -> None:
    parked, outlook = ParkedStates(actions, 25_000, 10), Outlook(goes_on=True)
    await parked.park(held(0, 0, outlook=outlook))
    await parked.park(held(0, 10_000, outlook=Outlook(goes_on=True)))
    await parked.restore(0, pack_ids(range(2000)), 0, 5000)
    await parked.park(held(0, 20_000, outlook=Outlook(goes_on=True)))
    assert firsts(parked, 0, 10_000, 20_000) == [10_000, 20_000]


async def test_a_state_that_has_hardly_changed_is_as_needed_as_before(actions: Actions) -> None:
    parked, outlook = ParkedStates(actions, 25_000, 10), Outlook(goes_on=True)
    await parked.park(held(0, 0, outlook=outlook))
    await parked.restore(0, pack_ids(range(2000)), 0, 5000)
    await parked.park(held(0, 0, outlook=outlook))
    await parked.park(over(10_000))
    await parked.park(held(0, 20_000))
    assert firsts(parked, 0, 10_000, 20_000) == [0, 20_000]


async def test_a_longer_state_replaces_those_that_it_continues(actions: Actions) -> None:
    parked = ParkedStates(actions, 10**6, 10)
    await parked.park(held(0, tokens=500))
    await parked.park(held(0, tokens=1000))
    assert (len(parked), len(list(actions.folder.iterdir()))) == (1, 1)


async def test_where_an_answer_is_not_known_exactly_the_prompt_is(actions: Actions) -> None:
    parked = ParkedStates(actions, 10**6, 10)
    actions.missing = 5
    await parked.park(held(0))
    assert parked.known(held(0).packed_ids) == 900


async def test_a_failure_costs_the_state_alone(actions: Actions) -> None:
    parked = ParkedStates(actions, 10**6, 10)
    await parked.park(held(0))
    actions.fails = True
    await parked.park(held(0, 10_000))
    assert await parked.restore(1, held(0).packed_ids, 200, 5000) == 0, "the slot is empty then"
    assert (len(parked), list(actions.folder.iterdir())) == (0, [])


@pytest.mark.parametrize(
    ("parked_bytes", "speed", "seconds"),
    [
        (6_000_000, 50.0, 2.0),
        (600_000_000, 50.0, 10.0),
        (None, 50.0, 20.0),
        (None, 1.0, 30.0),
        (None, None, 2.0),
    ],
)
def test_a_slot_is_kept_for_as_long_as_a_change_costs(
    parked_bytes: int | None, speed: float | None, seconds: float
) -> None:
    assert keep_seconds(1000, parked_bytes, speed) == seconds


@asynccontextmanager
async def running(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[LlamaCppEngine]:
    monkeypatch.setattr(slots, "LEAST_TOKENS", 32)
    monkeypatch.setattr(admission, "LEAST_COMMON", 32)
    monkeypatch.setattr(prefix_cache, "KEEP_SECONDS", 0.0)
    made = LlamaCppEngine(small_model(), context_window=256, threads=1, **settings)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def ask(engine: LlamaCppEngine, session: str, prompt: Sequence[int]) -> list[Chunk]:
    return await collect(engine.generate(GenerationJob(prompt, ANSWER, "test", session=session)))


def cached(chunks: Sequence[Chunk]) -> int | None:
    return next(chunk.cached_tokens for chunk in chunks if chunk.cached_tokens is not None)


async def test_two_conversations_on_one_slot_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, slots=1) as made:
        talks = {"a": [*PREAMBLE], "b": [*OTHER]}
        found = []
        for _ in range(2):
            for session, prompt in talks.items():
                chunks = await ask(made, session, prompt)
                found.append(cached(chunks))
                prompt += [*tokens_of(chunks), *ITALY[:5]]
        assert found == [0, 0, 62, 62], "60 of the prompt and 2 of the answer, whose last token was not read"
        assert made._process is not None
        folder = made._process.states
        assert (folder.stat().st_mode & 0o777, len(list(folder.iterdir()))) == (0o700, 2)
    assert not folder.exists()


async def test_a_sub_agent_begins_with_a_copy_of_the_common_preamble(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, slots=2) as made:
        main = [*PREAMBLE, *ITALY]
        main += tokens_of(await ask(made, "main", main))
        assert cached(await ask(made, "sub", [*PREAMBLE, 7, 8, 9])) == len(PREAMBLE)
        assert cached(await ask(made, "main", [*main, 7])) == len(main) - 1, "it lost nothing"
