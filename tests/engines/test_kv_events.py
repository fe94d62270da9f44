"""KV events, as real engines published them (``kv_recording.py``), and streams of them with gaps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engines.routing_jobs import all_frames, job, recorded
from singletree.routing.block_chain import ChainMemory
from singletree.routing.event_cache import (
    BlockRemoved,
    BlockStored,
    EventCache,
    KvEventStream,
    decode_batch,
    read_frames,
)
from singletree.routing.predicted_cache import PrefixIndex, blocks_by_holder

END = [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]


class Followed:
    """An engine whose events are followed."""

    def __init__(self, *, can_replay: bool = False) -> None:
        self.index = PrefixIndex()
        self.cache = EventCache(self.index, 0, "m")
        self.stream = KvEventStream(self.cache, "engine", can_replay=can_replay)
        self.chains = ChainMemory("m")

    def expects(self, tokens: list[int], salt: str = "") -> int:
        unit = self.cache.unit
        if unit is None:
            return 0
        chain = self.chains.chain_of(job(tokens, cache_salt=salt), unit)
        return blocks_by_holder(self.index.matches(chain.hashes)).get(0, 0) * unit


def positional(frames: list[bytes]) -> list[bytes]:
    """The same message in the form of older versions: events are arrays."""
    events: list[list[Any]] = []
    for event in decode_batch(frames[-1]):
        if isinstance(event, BlockStored):
            tail = [event.lora_id, event.medium, event.lora_name, event.extra_keys]
            events.append(
                [
                    "BlockStored",
                    event.block_hashes,
                    event.parent_block_hash,
                    event.token_ids,
                    event.block_size,
                    *tail,
                ]
            )
        elif isinstance(event, BlockRemoved):
            events.append(["BlockRemoved", event.block_hashes, event.medium])
        else:
            events.append(["AllBlocksCleared"])
    return [*frames[:-1], msgspec.msgpack.encode([0.5, events, 0])]


@pytest.mark.parametrize("form", [lambda frames: frames, positional], ids=["maps", "arrays"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_events_report_what_the_engine_has(engine: str, form: Any) -> None:
    followed, steps = Followed(), recorded(engine)["steps"]
    hits = 0
    for step in steps:
        if not step["salt"] or engine == "vllm":
            assert followed.expects(step["prompt"], step["salt"]) == step["cached"]
            hits += step["cached"] > 0
        for frames in step["frames"]:
            followed.stream.feed(form(frames))
    assert hits >= 2, "the recording has prompts that the engine knew"
    assert steps[-1]["cached"] == 0, "and blocks that it evicted"
    assert followed.cache.orphans == followed.stream.losses == 0
    assert followed.cache.salted == (engine == "vllm")


def test_a_tenants_blocks_are_not_anothers() -> None:
    followed, recording = Followed(), recorded("vllm")
    for frames in [frames for step in recording["steps"][:4] for frames in step["frames"]]:
        followed.stream.feed(frames)
    one = recording["steps"][0]["prompt"]
    assert [followed.expects(one, salt) for salt in ("", "tenant", "other")] == [128, 128, 0]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_gap_is_repaired_from_the_engines_own_repetition(engine: str) -> None:
    recording, whole, gap = recorded(engine), Followed(), Followed(can_replay=True)
    frames, replay = list(all_frames(recording)), recording["replay"]
    assert gap.stream.replay_from == 0
    gap.stream.feed(frames[5])
    for each in replay[:4]:
        assert not gap.stream.replayed(each)
    assert gap.stream.replayed(END)
    lost = gap.stream.replay_from
    assert lost is None, "a message that was not repeated is lost, and not asked for again"
    for each in frames[6:8]:
        gap.stream.feed(each)
    gap.stream.restart()
    for each in replay:
        gap.stream.replayed(each)
    assert gap.stream.synced
    for each in replay[:-1]:
        whole.stream.feed(each)
    assert gap.cache.blocks == whole.cache.blocks > 0
    assert len(gap.index) == len(whole.index)


def numbered(number: int, *tokens: int) -> list[bytes]:
    event = {"type": "BlockStored", "block_hashes": [number], "parent_block_hash": None, "block_size": 16}
    payload = msgspec.msgpack.encode(
        [0.0, [event | {"token_ids": [*tokens, *[number] * (16 - len(tokens))]}]]
    )
    return [b"", number.to_bytes(8, "big"), payload]


def test_a_gap_in_the_middle_is_asked_for_and_what_came_meanwhile_waits() -> None:
    followed = Followed(can_replay=True)
    followed.stream.replayed(END)
    for number in (0, 1, 4):
        followed.stream.feed(numbered(number))
    assert (followed.stream.replay_from, followed.cache.blocks) == (2, 2)
    followed.stream.feed(numbered(5))
    for number in (2, 3, 4):
        followed.stream.replayed(numbered(number))
    followed.stream.replayed(END)
    assert (followed.stream.replay_from, followed.cache.blocks) == (None, 6)
    assert followed.stream.synced
    assert followed.stream.losses == 0


def test_what_cannot_be_repeated_empties_the_cache() -> None:
    followed = Followed()
    for number in (0, 1, 4):
        followed.stream.feed(numbered(number))
    assert (followed.cache.blocks, followed.stream.losses, followed.stream.synced) == (1, 1, False)
    cleared = msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}]])
    followed.stream.feed([b"", (5).to_bytes(8, "big"), cleared])
    assert (followed.cache.blocks, followed.stream.synced) == (0, True), "now it is known again"


def test_an_engine_that_does_not_repeat_is_followed_without() -> None:
    followed = Followed(can_replay=True)
    followed.stream.feed(numbered(7))
    followed.stream.replay_failed()
    assert (followed.cache.blocks, followed.stream.synced, followed.stream.replay_from) == (1, False, None)


def test_numbers_that_begin_again_are_another_engine() -> None:
    followed = Followed()
    for number in (0, 1, 2, 0):
        followed.stream.feed(numbered(number))
    assert (followed.cache.blocks, followed.stream.synced) == (1, True)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", msgspec.msgpack.encode([0.0]), msgspec.msgpack.encode([0.0, [{"type": "Unknown"}], 0])],
)
def test_a_message_that_cannot_be_read_makes_the_cache_unknown(payload: bytes) -> None:
    followed = Followed()
    followed.stream.feed(numbered(0))
    followed.stream.feed([b"only", b"two"])
    assert followed.cache.blocks == 1
    followed.stream.feed([b"", (1).to_bytes(8, "big"), payload])
    followed.stream.feed(numbered(2))
    assert (followed.cache.blocks, followed.stream.synced) == (1, False)
    with pytest.raises(ValueError, match="frames of"):
        read_frames([b"only"])


def stored(hashes: list[int], parent: int | None, size: int = 16, **more: Any) -> BlockStored:
    tokens = [hash_ % 1000 for hash_ in hashes for _ in range(size)]
    return BlockStored(list(hashes), parent, tokens, size, **more)


def test_pages_of_one_token_are_followed_by_sixteen() -> None:
    followed = Followed()
    tokens = list(range(100, 140))
    followed.cache.apply(BlockStored(list(range(1, 21)), None, tokens[:20], 1))
    followed.cache.apply(BlockStored(list(range(21, 41)), 20, tokens[20:], 1))
    assert followed.expects(tokens) == 32
    followed.cache.apply(BlockRemoved(list(range(31, 41))))
    assert followed.expects(tokens) == 16
    followed.cache.apply(BlockRemoved([16]))
    assert (followed.expects(tokens), len(followed.index)) == (0, 0)


def test_of_a_hybrid_model_the_full_attention_counts() -> None:
    followed = Followed()
    apply = followed.cache.apply
    apply(stored([1], None, group_idx=0, kv_cache_spec_kind="mamba"))
    apply(stored([1, 2], None, group_idx=1, kv_cache_spec_kind="full_attention"))
    apply(stored([1], None, group_idx=2, kv_cache_spec_kind="sliding_window"))
    assert followed.cache.blocks == 2
    apply(BlockRemoved([1, 2], group_idx=0))
    assert followed.cache.blocks == 2, "a window moved on"
    apply(BlockRemoved([2], group_idx=1))
    assert followed.cache.blocks == 1


def test_a_block_that_moves_to_the_host_is_still_there() -> None:
    followed = Followed()
    followed.cache.apply(stored([1], None, medium="GPU"))
    followed.cache.apply(stored([1], None, medium="CPU"))
    followed.cache.apply(BlockRemoved([1], medium="GPU"))
    assert len(followed.index) == 1
    followed.cache.apply(BlockRemoved([1], medium="CPU"))
    assert len(followed.index) == 0


def test_events_that_fit_nothing_change_nothing() -> None:
    followed = Followed()
    followed.cache.apply(stored([2], parent=1))
    assert followed.cache.orphans == 1
    followed.cache.apply(BlockStored([1], None, [5] * 15, 16))
    followed.cache.apply(BlockStored([1], None, [], 0))
    followed.cache.apply(BlockStored([1], None, [-1] * 16, 16))
    followed.cache.apply(BlockRemoved([77], "TAPE"))
    assert (followed.cache.blocks, len(followed.index)) == (0, 0)


def test_hashes_of_bytes_and_pictures() -> None:
    followed = Followed()
    keys: list[list[Any] | None] = [["salty"], [["sha256:red", 3]]]
    followed.cache.apply(BlockStored([b"\x01" * 32, b"\x02" * 32], None, [5] * 32, 16, extra_keys=keys))
    assert followed.cache.salted
    assert followed.expects([5] * 32, "salty") == 16, "the second block is a picture's"
    followed.cache.apply(BlockRemoved([b"\x01" * 32]))
    assert followed.expects([5] * 32, "salty") == 0


@pytest.mark.parametrize("number", [-1, -2, -(2**63)])
def test_a_live_message_with_a_negative_number_is_left_out(number: int) -> None:
    followed = Followed()
    followed.stream.feed(numbered(0))
    followed.stream.feed([b"", number.to_bytes(8, "big", signed=True), numbered(1)[-1]])
    followed.stream.feed(numbered(1))
    assert (followed.cache.blocks, followed.stream.synced) == (2, True)


def test_a_message_of_deep_nesting_makes_the_cache_unknown() -> None:
    followed = Followed()
    followed.stream.feed(numbered(0))
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "block_size": 16}
    whole = msgspec.msgpack.encode([0.0, [event | {"token_ids": [1] * 16, "extra_keys": [["DEEP"]]}]])
    deep = whole.replace(b"\xa4DEEP", b"\x91" * 100_000 + b"\x90")
    followed.stream.feed([b"", (1).to_bytes(8, "big"), deep])
    followed.stream.feed(numbered(2))
    assert (followed.cache.blocks, followed.stream.synced) == (1, False)


def test_a_name_that_comes_again_leaves_its_old_place() -> None:
    engine = Followed()
    stored = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "block_size": 16}
    for token in (1, 2):
        batch = msgspec.msgpack.encode([0.0, [{**stored, "token_ids": [token] * 16}]])
        engine.stream.feed([b"", (token - 1).to_bytes(8, "big"), batch])
    assert len(engine.index) == 1
    engine.cache.clear()
    assert len(engine.index) == 0


def test_a_name_that_comes_twice_in_one_event_has_its_last_place() -> None:
    engine = Followed()
    stored = {"type": "BlockStored", "block_hashes": [1, 1], "parent_block_hash": None, "block_size": 16}
    engine.stream.feed(
        [b"", (0).to_bytes(8, "big"), msgspec.msgpack.encode([0.0, [{**stored, "token_ids": [5] * 32}]])]
    )
    assert len(engine.index) == 1
    engine.cache.clear()
    assert len(engine.index) == 0
