"""The index of prefixes, the chains of block hashes, and predicted caches, against plain models of them."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from engines.routing_jobs import job
from singletree.pictures import PromptPicture
from singletree.routing.block_chain import BlockChain, ChainMemory, PictureSpan, unit_of
from singletree.routing.predicted_cache import PredictedCache, PrefixIndex, blocks_by_holder

UNIT = 16
# Few different blocks, so that prompts often begin alike.
prompts = st.lists(st.sampled_from((1, 2)), max_size=12).map(
    lambda blocks: [b for b in blocks for _ in range(UNIT)]
)


def chain(tokens: list[int]) -> BlockChain:
    return BlockChain(5, UNIT).extended(array("I", tokens).tobytes(), ())


@given(st.lists(st.tuples(st.integers(0, 3), prompts), max_size=12), prompts)
def test_every_holder_is_found_with_what_it_has(held: list[tuple[int, list[int]]], asked: list[int]) -> None:
    index, model = PrefixIndex(), dict[int, set[int]]()
    for holder, tokens in held:
        index.add(holder, chain(tokens).hashes)
        model.setdefault(holder, set()).update(chain(tokens).hashes)
    hashes = chain(asked).hashes
    expected = {
        h: next((n for n, b in enumerate(hashes) if b not in own), len(hashes)) for h, own in model.items()
    }
    assert blocks_by_holder(index.matches(hashes)) == {h: n for h, n in expected.items() if n}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 200), st.sets(st.integers(1, 30))), max_size=30))
def test_what_is_discarded_is_gone(steps: list[tuple[bool, int, set[int]]]) -> None:
    index, model = PrefixIndex(), set[tuple[int, int]]()
    for adds, holder, blocks in steps:
        (index.add if adds else index.discard)(holder, blocks)
        pairs = {(holder, block) for block in blocks}
        model = model | pairs if adds else model - pairs
    assert len(index) == len({block for _, block in model})
    assert all(index.holds(h, b) == ((h, b) in model) for _, h, _ in steps for b in range(1, 31))


@given(st.lists(prompts, min_size=1, max_size=6))
def test_a_chain_that_grew_is_the_chain_of_its_prompt(turns: list[list[int]]) -> None:
    memory = ChainMemory()
    for tokens in turns:
        got = memory.chain_of(job(tokens, "session"), UNIT)
        assert (len(got), got.hashes) == (len(tokens), ChainMemory().chain_of(job(tokens), UNIT).hashes)


def test_only_what_is_held_is_hashed_to_find_it() -> None:
    index, memory = PrefixIndex(), ChainMemory()
    tokens = [n // UNIT for n in range(5000 * UNIT)]
    asked = memory.chain_of(job(tokens, "s"), UNIT)
    assert not len(asked.known)
    for held, hashed in ((0, 128), (200, 256), (5000, 5000)):
        index.add(3, chain_in(tokens[: held * UNIT]))
        fresh = ChainMemory().chain_of(job(tokens, "s"), UNIT)
        found = blocks_by_holder(index.matches(fresh.hashes_while(index.__contains__)))
        assert found == ({3: held} if held else {})
        assert len(fresh.known) == hashed
        assert fresh.hashes == asked.hashes, "the rest follows when it is asked for"
        index.discard(3, asked.hashes)


def test_a_session_that_grows_keeps_its_chain_and_a_fork_gets_its_own() -> None:
    memory = ChainMemory()
    first = memory.chain_of(job([1] * 40, "s"), UNIT)
    assert memory.chain_of(job([1] * 80, "s"), UNIT) is first
    fork = memory.chain_of(job([1] * 40 + [2] * 40, "s"), UNIT)
    assert fork is not first
    assert fork.hashes[:2] == first.hashes[:2]
    assert fork.hashes[2] != first.hashes[2]
    assert memory.chain_of(job([1] * 96, "s"), UNIT) is first, "both go on"
    assert len(memory.chain_of(job([1] * 40, "s"), UNIT, [9] * 8).hashes) == 3


def test_model_and_salt_keep_equal_tokens_apart() -> None:
    tokens = [1] * 32
    seen = {
        ChainMemory(model).chain_of(job(tokens, cache_salt=salt), UNIT).hashes[0]
        for model in ("a", "b")
        for salt in ("", "tenant", "other")
    }
    assert len(seen) == 6


def test_pictures_are_expanded_and_part_of_their_blocks() -> None:
    def with_picture(key: str) -> BlockChain:
        picture = PromptPicture(20, 7, key, "image/png", b"")
        memory = ChainMemory()
        asked = job([1] * 20 + [7] + [1] * 43, pictures=(picture,))
        memory.learn_pictures(asked, [30])
        return memory.chain_of(asked, UNIT)

    red, blue = with_picture("red"), with_picture("blue")
    assert len(red) == 93
    assert red.pictures == (PictureSpan(20, 50, "sha256:red"),)
    assert red.hashes[0] == blue.hashes[0]
    assert not set(red.hashes[1:]) & set(blue.hashes[1:])


def test_a_picture_that_changes_in_a_session_ends_the_common_prefix() -> None:
    memory = ChainMemory()
    chains = [
        memory.chain_of(job([1] * 64, "s", pictures=(PromptPicture(20, 1, key, "image/png", b""),)), UNIT)
        for key in ("red", "blue")
    ]
    assert chains[0].hashes[:1] == chains[1].hashes[:1]
    assert chains[0].hashes[1:] != chains[1].hashes[1:]


def test_units_have_at_least_sixteen_tokens() -> None:
    assert [unit_of(size) for size in (1, 3, 16, 32, 528)] == [16, 15, 16, 32, 528]


@given(st.lists(st.tuples(st.integers(0, 4), prompts), max_size=20), st.integers(1, 20))
def test_a_predicted_cache_is_bounded_and_holds_whole_prefixes(
    uses: list[tuple[int, list[int]]], capacity: int
) -> None:
    index, memory = PrefixIndex(), ChainMemory()
    cache = PredictedCache(index, 1, UNIT, capacity * UNIT, fixed=True)
    longest = 0
    for session, tokens in uses:
        used = memory.chain_of(job(tokens, f"s{session}"), UNIT)
        cache.use(used)
        longest = len(used.hashes)
        assert cache.blocks == len(index) <= max(capacity, longest)
        for _, other in uses:
            flags = [index.holds(1, block) for block in chain_in(other)]
            assert flags == sorted(flags, reverse=True), "no block without those before it"
        assert all(index.holds(1, block) for block in used.hashes)
    cache.clear()
    assert (len(index), cache.blocks) == (0, 0)


def chain_in(tokens: list[int]) -> array[int]:
    return ChainMemory().chain_of(job(tokens), UNIT).hashes


def test_the_oldest_prompt_loses_its_end_first() -> None:
    index, memory = PrefixIndex(), ChainMemory()
    cache = PredictedCache(index, 0, UNIT, 8 * UNIT, fixed=True)
    old, new = (memory.chain_of(job([n] * 80, f"{n}"), UNIT) for n in (1, 2))
    cache.use(old)
    cache.use(new)
    assert [index.holds(0, block) for block in old.hashes] == [True, True, True, False, False]
    assert all(index.holds(0, block) for block in new.hashes)


def test_a_missing_prompt_shows_that_the_cache_is_smaller() -> None:
    index, memory = PrefixIndex(), ChainMemory()
    cache = PredictedCache(index, 0, UNIT, 1000 * UNIT, fixed=False)
    chains = [memory.chain_of(job([n] * 80, f"{n}"), UNIT) for n in range(1, 5)]
    for each in chains:
        cache.use(each)
    before = cache.state(chains[1])
    assert before is not None
    cache.use(chains[1])
    cache.reported(before[1], predicted=64, cached=0)
    assert not index.holds(0, chains[0].hashes[0]), "what was used before it is gone as well"
    assert all(index.holds(0, each.hashes[0]) for each in chains[1:])
    assert cache.capacity == 15 * UNIT
    cache.reported(None, predicted=0, cached=200)
    assert cache.capacity > 15 * UNIT


def test_a_prompt_that_was_not_read_is_taken_back() -> None:
    index, memory = PrefixIndex(), ChainMemory()
    cache = PredictedCache(index, 0, UNIT, 1000 * UNIT, fixed=False)
    grown = memory.chain_of(job([1] * 32, "s"), UNIT)
    cache.use(grown)
    before = cache.state(grown)
    grown = memory.chain_of(job([1] * 96, "s"), UNIT)
    cache.use(grown)
    cache.restore(grown, before)
    assert cache.blocks == len(index) == 2
    cache.restore(grown, None)
    assert cache.blocks == len(index) == 0
