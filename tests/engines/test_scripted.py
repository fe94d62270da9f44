"""The scripted engine plays what it was told, as it was told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from engines.contract import assert_well_formed, collect, tokens_of
from engines.letters import END, decode, encode
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, GenerationJob
from singletree.errors import ContextOverflow, EngineFailed, InvalidRequest, Overloaded
from singletree.testing.scripted_engine import PrefixMemory, ScriptedEngine
from singletree.testing.scripts import Script

ABC = "abcdefghij"
UNSAID = Sampling()


async def engine(**settings: Any) -> ScriptedEngine:
    made = ScriptedEngine(encode, decode, **settings)
    await made.start()
    return made


async def play(prompt: str, sampling: Sampling = UNSAID, /, **settings: Any) -> list[Chunk]:
    made = await engine(**settings)
    return await collect(made.generate(GenerationJob(encode(prompt), sampling, "test")))


async def collect_into(received: list[Chunk], chunks: AsyncGenerator[Chunk, None]) -> None:
    async for chunk in chunks:
        received.append(chunk)


def sizes(chunks: list[Chunk]) -> list[int]:
    return [len(chunk.token_ids) for chunk in chunks]


def text_of(chunks: list[Chunk]) -> str:
    return decode(tokens_of(chunks))


async def test_plays_the_default_without_a_marker() -> None:
    assert text_of(await play("hello")) == "Hello there."
    assert text_of(await play("hello", default="Good day.")) == "Good day."


async def test_plays_text_or_token_ids() -> None:
    scripts = {"text": ABC, "ids": [65, 66], "script": Script(ABC, cut_after=2)}
    assert text_of(await play("[[script:text]]", scripts=scripts)) == ABC
    assert text_of(await play("[[script:ids]]", scripts=scripts)) == "AB"
    assert text_of(await play("[[script:script]]", scripts=scripts)) == "ab"


async def test_plays_files(tmp_path: Path) -> None:
    (tmp_path / "said.txt").write_bytes(b'#opts {"chunk": 2}\nline\r\n')
    (tmp_path / "ids.json").write_text("[65, 66]")
    chunks = await play("[[script:said]]", scripts=tmp_path)
    assert (text_of(chunks), sizes(chunks)) == ("line\r\n", [0, 2, 2, 2])
    assert text_of(await play("[[script:ids]]", scripts=tmp_path)) == "AB"


async def test_plays_filler_and_echo() -> None:
    chunks = await play("[[gen:1000:300]]")
    assert_well_formed(chunks)
    assert sizes(chunks) == [0, 300, 300, 300, 100]
    assert text_of(await play("[[echo:<think>\nwhat [1] is\nthis]]")) == "<think>\nwhat [1] is\nthis"


async def test_the_end_token_is_the_last_token() -> None:
    chunks = await play("[[script:x]]", scripts={"x": "ab"}, end_token_id=END)
    assert_well_formed(chunks)
    assert (tokens_of(chunks)[-1], chunks[-1].finish) == (END, "stop")
    spelled = await play("[[script:x]]", scripts={"x": "ab<|im_end|>"}, end_token_id=END)
    assert tokens_of(spelled) == tokens_of(chunks)
    without = await play("[[script:x]]", scripts={"x": '#opts {"end": false}\nab'}, end_token_id=END)
    assert (text_of(without), without[-1].finish) == ("ab", "stop")


async def test_an_empty_script_ends_at_once() -> None:
    chunks = await play("[[script:x]]", scripts={"x": ""})
    assert_well_formed(chunks)
    assert (sizes(chunks), chunks[-1].finish) == ([0, 0], "stop")


async def test_chunks_have_the_size_that_was_asked_for() -> None:
    assert sizes(await play("[[script:x]]", scripts={"x": ABC}, chunk=4)) == [0, 4, 4, 2]


async def test_max_tokens_cuts_and_says_so() -> None:
    whole = await play("[[script:x]]", Sampling(max_tokens=10), scripts={"x": ABC}, chunk=4)
    assert (sizes(whole), whole[-1].finish) == ([0, 4, 4, 2], "stop")
    cut = await play("[[script:x]]", Sampling(max_tokens=9), scripts={"x": ABC}, chunk=4)
    assert (sizes(cut), cut[-1].finish) == ([0, 4, 4, 1], "length")


async def test_the_window_cuts_and_refuses() -> None:
    prompt = "[[gen:50]]"
    chunks = await play(prompt, context_window=len(prompt) + 3)
    assert (len(tokens_of(chunks)), chunks[-1].finish) == (3, "length")
    with pytest.raises(ContextOverflow):
        await play(prompt, context_window=len(prompt))


async def test_a_script_can_end_by_length() -> None:
    chunks = await play("[[script:x]]", scripts={"x": f'#opts {{"cut_after": 3}}\n{ABC}'}, end_token_id=END)
    assert (text_of(chunks), chunks[-1].finish) == ("abc", "length")


async def test_a_script_can_fail_before_the_first_chunk_or_later() -> None:
    made = await engine(
        scripts={"first": Script(ABC, fail_after=0), "later": Script(ABC, fail_after=5)}, chunk=2
    )
    with pytest.raises(EngineFailed):
        await anext(made.generate(GenerationJob(encode("[[script:first]]"), Sampling(), "first")))
    received: list[Chunk] = []
    with pytest.raises(EngineFailed, match="after 5 tokens"):
        await collect_into(
            received, made.generate(GenerationJob(encode("[[script:later]]"), Sampling(), "later"))
        )
    assert (text_of(received), sizes(received)) == ("abcde", [0, 2, 2, 1])
    assert all(chunk.finish is None for chunk in received)
    assert made.log[-1].finish is None


async def test_max_tokens_comes_before_a_later_failure() -> None:
    chunks = await play("[[script:x]]", Sampling(max_tokens=3), scripts={"x": Script(ABC, fail_after=5)})
    assert (text_of(chunks), chunks[-1].finish) == ("abc", "length")


async def test_a_script_can_raise_overloaded() -> None:
    with pytest.raises(Overloaded):
        await play("[[script:x]]", scripts={"x": '#opts {"overloaded": true}\n'})


async def test_a_script_can_end_early() -> None:
    chunks = await play("[[script:x]]", scripts={"x": Script(ABC, stop_after=3)}, end_token_id=END)
    assert (text_of(chunks).encode()[:3], chunks[-1].finish) == (b"abc", "stop")
    assert tokens_of(chunks)[3:] == [END]


async def test_a_fault_can_pass() -> None:
    made = await engine(
        scripts={"x": Script(ABC, overloaded=True, fail_after=5, cut_after=3, stop_after=2, faults=2)}
    )
    for number in range(2):
        with pytest.raises(Overloaded):
            await anext(made.generate(GenerationJob(encode("[[script:x]]"), Sampling(), f"{number}")))
    for _ in range(2):
        assert (
            text_of(await collect(made.generate(GenerationJob(encode("[[script:x]]"), Sampling(), "whole"))))
            == ABC
        )


async def test_a_script_that_failed_plays_on_when_the_fault_has_passed() -> None:
    made = await engine(scripts={"x": Script(ABC, fail_after=len(ABC), faults=1)})
    received: list[Chunk] = []
    with pytest.raises(EngineFailed):
        await collect_into(
            received, made.generate(GenerationJob(encode("[[script:x]]"), Sampling(), "fails"))
        )
    assert text_of(received) == ABC
    assert (
        text_of(await collect(made.generate(GenerationJob(encode("[[script:x]]"), Sampling(), "whole"))))
        == ABC
    )


@pytest.mark.parametrize(
    ("script", "emitted_before"),
    [
        (Script(ABC, prefill=60.0), 0),
        (Script(ABC, stall_after=4, stall=60.0), 4),
        (Script(ABC, stall_after=4, stall=60.0, fail_after=4), 4),
        (Script(ABC, delay=60.0), 1),
    ],
    ids=["prefill", "stall", "stall before failure", "pace"],
)
async def test_a_pause_is_where_it_was_asked_for_and_ends_when_aborted(
    script: Script, emitted_before: int
) -> None:
    made = await engine(scripts={"x": script})
    received: list[Chunk] = []
    generation = made.generate(GenerationJob(encode("[[script:x]]"), Sampling(), "paused"))
    reading = asyncio.create_task(collect_into(received, generation))
    for _ in range(40):
        await asyncio.sleep(0)
    assert len(tokens_of(received)) == emitted_before
    await made.abort("paused")
    async with asyncio.timeout(5):
        await reading
    assert_well_formed(received)
    assert received[-1].finish == made.log[-1].finish == "cancelled"


async def test_a_late_reader_does_not_delay_the_rest() -> None:
    made = await engine(scripts={"x": Script(ABC, delay=0.02)})
    chunks = made.generate(GenerationJob(encode("[[script:x]]"), Sampling(), "late"))
    await anext(chunks)
    await anext(chunks)
    await asyncio.sleep(0.3)
    # All the others are due by now, so none of them waits for a timer.
    rest = asyncio.create_task(collect(chunks))
    for _ in range(20):
        await asyncio.sleep(0)
    assert rest.done()
    assert text_of(rest.result()) == ABC[1:]


async def test_others_get_their_turn() -> None:
    made = await engine()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await collect(made.generate(GenerationJob(encode("[[gen:1600]]"), Sampling(), "long")))
    counting.cancel()
    assert turns >= 100


async def test_cached_tokens_are_the_longest_common_prefix() -> None:
    made = await engine(end_token_id=END)

    async def cached(prompt: str) -> int | None:
        first, *rest = await collect(made.generate(GenerationJob(encode(prompt), Sampling(), "test")))
        assert all(chunk.cached_tokens is None for chunk in rest)
        return first.cached_tokens

    assert await cached("one [[echo:two]]") == 0
    assert await cached("one [[echo:two]]two<|im_end|> three") == len("one [[echo:two]]two") + 1
    assert await cached("one [[echo:tvo]]") == len("one [[echo:t")
    assert await cached("one [[echo:two]]") == len("one [[echo:two]]") - 1


async def test_what_was_left_counts_as_cached_as_far_as_it_was_reported() -> None:
    made = await engine()
    chunks = made.generate(GenerationJob(encode("[[echo:abcdef]]"), Sampling(), "left"))
    for _ in range(4):
        await anext(chunks)
    await chunks.aclose()
    first, *_ = await collect(
        made.generate(GenerationJob(encode("[[echo:abcdef]]abcdef"), Sampling(), "next"))
    )
    assert first.cached_tokens == len("[[echo:abcdef]]") + 3


def test_memory_forgets_the_least_recently_used() -> None:
    memory = PrefixMemory(2)
    memory.recall([1, 1, 1, 1])
    memory.recall([2, 2, 2, 2])
    assert memory.recall([1, 1, 1, 9]) == 3
    assert memory.recall([2, 2, 2, 2]) == 0
    assert memory.recall([1, 1, 1, 9]) == 3


def test_memory_counts_tokens_in_long_prompts_too() -> None:
    memory = PrefixMemory(8)
    long = list(range(5000))
    memory.recall(long)
    for at in (1, 1023, 1024, 1025, 4998):
        assert memory.recall([*long[:at], 9999, *long[at:]]) == at


async def test_the_log_has_the_prompt_as_token_ids() -> None:
    made = await engine(end_token_id=END)
    constraint = Constraint("gbnf", "root ::= x")
    prompt = encode("[[echo:ab]]<|im_start|>")
    await collect(
        made.generate(GenerationJob(prompt, Sampling(seed=3), "id", constraint=constraint, priority=2))
    )
    (played,) = made.log
    assert list(played.prompt_token_ids) == prompt
    assert (list(played.token_ids), played.finish) == ([97, 98, END], "stop")
    assert (played.script, played.request_id, played.priority) == ("echo", "id", 2)
    assert (played.constraint, played.sampling.seed) == (constraint, 3)


async def test_the_log_keeps_the_newest() -> None:
    made = await engine(log_tokens=25)
    for i in range(5):
        await collect(made.generate(GenerationJob(encode(f"prompt {i}  "), Sampling(), str(i))))
    assert [played.request_id for played in made.log] == ["3", "4"]
    await collect(made.generate(GenerationJob(encode("x" * 99), Sampling(), "long")))
    assert [played.request_id for played in made.log] == ["long"]


@pytest.mark.parametrize("text", [False, True])
async def test_the_log_file_has_a_line_for_each(tmp_path: Path, text: bool) -> None:
    path = tmp_path / "log.jsonl"
    made = await engine(log_path=path, log_text=text)
    await collect(made.generate(GenerationJob(encode("[[echo:ab]]"), Sampling(), "1")))
    left = made.generate(GenerationJob(encode("[[echo:ab]]"), Sampling(), "2"))
    await anext(left)
    await left.aclose()
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["prompt_token_ids"], first["token_ids"]) == (encode("[[echo:ab]]"), encode("ab"))
    assert (first["finish"], second["finish"], second["request_id"]) == ("stop", None, "2")
    assert first.get("prompt") == ("[[echo:ab]]" if text else None)
    assert first.get("text") == ("ab" if text else None)


async def test_unknown_scripts_name_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="'c'; known: a, b"):
        await play("[[script:c]]", scripts={"a": "", "b": ""})
    with pytest.raises(InvalidRequest, match="'c'; known: none"):
        await play("[[script:c]]", scripts=tmp_path)


async def test_logprobs_of_the_prompt() -> None:
    first, *others = await play("[[script:x]]", Sampling(prompt_logprobs=0), scripts={"x": "ab"})
    assert first.prompt_logprobs is not None
    assert [list(row) for row in first.prompt_logprobs] == [
        [],
        *([(id, 0.0)] for id in encode("[script:x]]")),
    ]
    assert all(chunk.prompt_logprobs is None for chunk in others)
    assert all(chunk.logprobs is None for chunk in (first, *others))


async def test_logprobs_of_what_is_certain() -> None:
    chunks = await play("[[script:x]]", Sampling(logprobs=2), scripts={"x": "ab"})
    assert [list(chunk.logprobs or ()) for chunk in chunks] == [[], [((97, 0.0),)], [((98, 0.0),)]]
