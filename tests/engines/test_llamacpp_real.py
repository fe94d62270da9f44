"""llama.cpp with a real model: what no recording can tell."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engines.contract import collect, tokens_of
from engines.small_model import END_TOKENS, FRANCE, ITALY, small_model
from singletree.constraints.grammar_matchers import GrammarMatchers, matcher_vocabulary
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, GenerationJob
from singletree.engines.workers import Worker
from singletree.errors import BadConfiguration, EngineFailed, InvalidRequest, Overloaded, WeightsUnavailable
from singletree.llamacpp import prefix_cache, slots
from singletree.llamacpp.admission import Ticket
from singletree.llamacpp.engine import LlamaCppEngine
from singletree.llamacpp.slots import Claim
from singletree.prompts.tokenizer.tokenizer import load_tokenizer
from singletree.remote.transport import ask
from singletree.routing.pool import EnginePool

pytestmark = [pytest.mark.embedded, pytest.mark.asyncio(loop_scope="module")]

GREEDY = Sampling(temperature=0.0, max_tokens=100)
ENDLESS = Sampling(temperature=0.0, max_tokens=400, ignore_eos=True)
PARIS = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # The capital of France is Paris.<|im_end|>
# Its characters after the first take 3, 2, 2, 3 and 3 tokens; the numbers are llama.cpp's own spelling.
CHARACTERS = "a😀你好😀\U0001f9ffz"
SPELLED = [81, 10813, 242, 218, 18645, 250, 48392, 138, 10813, 242, 218, 10813, 117, 140, 106]
FILLER = [7042, 30, 504, 3575] * 64


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[LlamaCppEngine]:
    # A window of 8,192 tokens takes half a second of system time to clear.
    made = LlamaCppEngine(small_model(), threads=1, **{"context_window": 2048, **settings})
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[LlamaCppEngine]:
    async with running(slots=4) as made:
        yield made


async def run(
    engine: LlamaCppEngine, prompt: Sequence[int], sampling: Sampling = GREEDY, **more: Any
) -> list[Chunk]:
    return await collect(engine.generate(GenerationJob(prompt, sampling, "test", **more)))


async def busy(engine: LlamaCppEngine) -> int:
    return len(await engine._busy_slots())


async def test_answers(engine: LlamaCppEngine) -> None:
    assert tokens_of(await run(engine, FRANCE)) == PARIS


async def test_the_end_token_is_reported_and_ends_the_turn(engine: LlamaCppEngine) -> None:
    chunks = await run(engine, FRANCE)
    assert (tokens_of(chunks)[-1] in END_TOKENS, chunks[-1].finish) == (True, "stop")


async def test_the_first_chunk_reports_what_was_cached(engine: LlamaCppEngine) -> None:
    prompt = [*FRANCE, *PARIS, 198, *FILLER]
    await run(engine, prompt, Sampling(max_tokens=1))
    longer = [*prompt, *ITALY]
    first, *rest = await run(engine, longer, Sampling(max_tokens=1))
    assert (first.cached_tokens, list(first.token_ids)) == (len(prompt), [])
    assert all(chunk.cached_tokens is None for chunk in rest)


async def test_the_next_turn_finds_the_tokens_that_were_generated(engine: LlamaCppEngine) -> None:
    answer = tokens_of(await run(engine, FRANCE))
    first, *_ = await run(engine, [*FRANCE, *answer, 198, *ITALY])
    # The last token of an answer is drawn and not yet read into the cache.
    assert first.cached_tokens == len(FRANCE) + len(answer) - 1


async def cached(engine: LlamaCppEngine, prompt: Sequence[int], salt: str) -> int | None:
    """How many tokens of the prompt a request with this salt finds."""
    first, *_ = await run(engine, prompt, Sampling(max_tokens=1), cache_salt=salt)
    return first.cached_tokens


async def test_salts_do_not_share_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "KEEP_SECONDS", 0.0)
    prompt, whole = [*FRANCE, *ITALY], len(FRANCE) + len(ITALY) - 1
    async with running(slots=1, cache_ram_mib=0) as engine:
        found = [await cached(engine, prompt, salt) for salt in ("", "a", "b", "", "", "a", "a")]
        assert found == [0, 0, 0, 0, whole, 0, whole]


async def test_each_salt_finds_its_own_parked_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "KEEP_SECONDS", 0.0)
    monkeypatch.setattr(slots, "LEAST_TOKENS", 16)
    prompt, whole = [*FRANCE, *ITALY], len(FRANCE) + len(ITALY) - 1
    async with running(slots=2) as engine:
        found = [await cached(engine, prompt, salt) for salt in ("a", "b", "", "a", "b", "")]
        assert found == [0, 0, 0, whole, whole, whole]


async def test_characters_of_several_tokens_lose_none(engine: LlamaCppEngine) -> None:
    exact = Constraint("gbnf", f'root ::= "{CHARACTERS}"')
    tokens = tokens_of(await run(engine, FRANCE, constraint=exact))
    assert tokens[:-1] == SPELLED
    assert tokens[-1] in END_TOKENS


async def test_log_probabilities_stay_beside_their_tokens(engine: LlamaCppEngine) -> None:
    exact = Constraint("gbnf", f'root ::= "{CHARACTERS}"')
    chunks = await run(
        engine, FRANCE, Sampling(temperature=0.0, max_tokens=100, logprobs=1), constraint=exact
    )
    for chunk in chunks:
        assert chunk.logprobs is not None
        assert len(chunk.logprobs) == len(chunk.token_ids)
        for token, known in zip(chunk.token_ids, chunk.logprobs, strict=True):
            assert not known or known[0][0] == token
        assert not chunk.token_ids or chunk.logprobs[-1] != []


async def test_a_character_that_is_cut_is_not_reported(engine: LlamaCppEngine) -> None:
    exact = Constraint("gbnf", f'root ::= "{CHARACTERS}"')
    chunks = await run(engine, FRANCE, Sampling(temperature=0.0, max_tokens=3), constraint=exact)
    assert (tokens_of(chunks), chunks[-1].finish) == ([81], "length")


async def test_a_schema_holds(engine: LlamaCppEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome"]}, "people": {"type": "integer", "maximum": 9}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    chunks = await run(engine, FRANCE, constraint=Constraint("json_schema", schema))
    token_ids = json.loads(await text_of(engine, tokens_of(chunks)))
    assert token_ids.keys() == {"city", "people"}
    assert token_ids["city"] == "Rome"
    assert type(token_ids["people"]) is int
    assert token_ids["people"] <= 9
    assert chunks[-1].finish == "stop"


async def test_lark_and_regex_hold(engine: LlamaCppEngine) -> None:
    lark = Constraint("lark", 'start: <|im_start|> "yes"')
    assert tokens_of(await run(engine, FRANCE, constraint=lark))[0] == FRANCE[0]
    regex = Constraint("regex", "[0-9]{3}/x")
    assert (await text_of(engine, tokens_of(await run(engine, FRANCE, constraint=regex))))[3:] == "/x"


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint("gbnf", "root ::= ("), "grammar"),
        (Constraint("json_schema", {"type": "objekt"}), "objekt"),
        (Constraint("json_schema", {"$ref": "#/nowhere"}), "nowhere"),
        (Constraint("lark", "start: /[0-9"), "lexer"),
        (Constraint("regex", "(?=x)y"), "look-around"),
        (Constraint("structural_tag", {}), "structural_tag"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_constraint_that_cannot_hold_is_refused(
    engine: LlamaCppEngine, constraint: Constraint, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        await run(engine, FRANCE, constraint=constraint)


async def test_sampling_reaches_the_model(engine: LlamaCppEngine) -> None:
    banned = Sampling(temperature=0.0, max_tokens=1, logit_bias={PARIS[0]: -100.0})
    assert tokens_of(await run(engine, FRANCE, banned)) != PARIS[:1]
    wild = Sampling(temperature=5.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=12, seed=7, ignore_eos=True)
    sampled = [tokens_of(await run(engine, FRANCE, wild)) for _ in range(2)]
    assert sampled[0] == sampled[1]
    assert sampled[0] != tokens_of(
        await run(engine, FRANCE, Sampling(temperature=5.0, max_tokens=12, seed=8))
    )


@pytest.mark.parametrize(
    "penalty",
    [Sampling(presence_penalty=2.0), Sampling(frequency_penalty=2.0), Sampling(repetition_penalty=2.0)],
    ids=["presence", "frequency", "repetition"],
)
async def test_penalties_reach_the_model(engine: LlamaCppEngine, penalty: Sampling) -> None:
    plain = Sampling(temperature=0.0, max_tokens=100, ignore_eos=True)
    neutral = replace(plain, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
    penalized = replace(penalty, temperature=0.0, max_tokens=100, ignore_eos=True)
    unchanged, again, changed = [
        tokens_of(await run(engine, FRANCE, sampling)) for sampling in (plain, neutral, penalized)
    ]
    assert again == unchanged != changed


async def test_a_temperature_of_its_own_holds_where_a_request_sets_none() -> None:
    async with running(slots=1, temperature=0.0) as cold:
        answers = [
            tokens_of(await run(cold, FRANCE, Sampling(max_tokens=24, seed=seed))) for seed in (1, 2, 3)
        ]
        assert answers == [PARIS[:24]] * 3


async def test_a_token_that_is_none_is_refused(engine: LlamaCppEngine) -> None:
    with pytest.raises(InvalidRequest, match="invalid tokens"):
        await run(engine, [10**6])


# C40
async def test_leaving_frees_the_slot(engine: LlamaCppEngine) -> None:
    async with aclosing(engine.generate(GenerationJob(FRANCE, ENDLESS, "left"))) as chunks:
        async for chunk in chunks:
            if chunk.token_ids:
                break
        assert await busy(engine) == 1
    async with asyncio.timeout(5):
        pause = 0.02
        while pause:
            await asyncio.sleep(pause)
            pause = 0.02 if await busy(engine) else 0


async def test_what_goes_on_from_an_early_end_waits_for_its_slot(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another slot would know nothing of the conversation; what does not go on from it need not wait."""
    noticed = asyncio.Event()

    async def notice(ticket: Ticket, held: bytes) -> None:
        await noticed.wait()
        ticket.release(held, len(held) // 4)

    monkeypatch.setattr(engine, "_release_when_free", notice)
    async with aclosing(engine.generate(GenerationJob(FRANCE, ENDLESS, "left"))) as chunks:
        async for chunk in chunks:
            if chunk.token_ids:
                break
    goes_on = asyncio.create_task(run(engine, [*FRANCE, 7], Sampling(max_tokens=2)))
    await run(engine, ITALY, Sampling(max_tokens=2))
    assert not goes_on.done()
    noticed.set()
    assert (await goes_on)[-1].finish == "length"


# C39
async def test_a_death_is_reported_and_the_next_request_finds_llama_cpp_running_again() -> None:
    async with running(slots=1) as engine:
        runs = asyncio.create_task(collect(engine.generate(GenerationJob(FRANCE, ENDLESS, "runs"))))
        await asyncio.sleep(0.3)
        waits = asyncio.create_task(run(engine, FRANCE))
        await asyncio.sleep(0)
        assert engine._process is not None
        dead, folder = engine._process.pid, Path(engine._process.socket).parent
        os.kill(dead, signal.SIGKILL)
        with pytest.raises(EngineFailed, match="SIGKILL"):
            await runs
        assert tokens_of(await waits) == PARIS, "who had only stood in line is none the worse"
        again = await asyncio.gather(*(run(engine, FRANCE) for _ in range(3)))
        assert [tokens_of(chunks) for chunks in again] == [PARIS] * 3
        assert engine._process.pid != dead
        assert not folder.exists()
    assert engine._process is None


# C39
async def test_a_turn_goes_on_when_llama_cpp_runs_again() -> None:
    async with running(slots=1) as engine:
        sampling = Sampling(temperature=0.0, max_tokens=60, ignore_eos=True)
        reported: list[int] = []
        assert engine._process is not None
        pid = dead = engine._process.pid
        pool = EnginePool([Worker("0", engine)])
        await pool.begin()
        async for chunk in pool.generate(GenerationJob(FRANCE, sampling, "goes on")):
            reported += chunk.token_ids
            if len(reported) >= 3 and pid:
                os.kill(pid, signal.SIGKILL)
                pid = 0
        assert engine._process.pid != dead
    assert reported[: len(PARIS) - 1] == PARIS[:-1]
    assert (len(reported), chunk.finish) == (60, "length")


# C39
async def test_a_turn_goes_on_under_its_grammar_when_llama_cpp_runs_again() -> None:
    tokenizer = load_tokenizer(small_model())
    schema = {
        "type": "object",
        "properties": {
            "country": {"type": "string", "maxLength": 20},
            "capital": {"enum": ["Paris", "Rome"]},
        },
        "required": ["country", "capital"],
        "additionalProperties": False,
    }
    job = GenerationJob(
        FRANCE, GREEDY, "goes on", tuple(tokenizer.stop_token_ids), Constraint("json_schema", schema)
    )
    async with running(slots=1) as engine:
        matchers = GrammarMatchers(partial(matcher_vocabulary, tokenizer))
        pool = EnginePool([Worker("0", engine)], matchers=matchers)
        await pool.begin()
        reported: list[int] = []
        assert engine._process is not None
        pid = engine._process.pid
        async for chunk in pool.generate(job):
            reported += chunk.token_ids
            if len(reported) >= 4 and pid:
                os.kill(pid, signal.SIGKILL)
                pid = 0
    assert (pid, chunk.finish) == (0, "stop")
    written = tokenizer.decode([token for token in reported if token not in tokenizer.stop_token_ids])
    assert json.loads(written)["capital"] in ("Paris", "Rome")


async def test_generations_wait_for_room_rather_than_overflow_the_cache() -> None:
    prompts = [[100 + i, *FILLER[:100]] for i in range(3)]
    async with running(slots=3, kv_tokens=256, context_window=256) as engine:
        sampling = Sampling(max_tokens=40, ignore_eos=True)
        for done in await asyncio.gather(*(run(engine, prompt, sampling) for prompt in prompts)):
            assert (len(tokens_of(done)), done[-1].finish) == (40, "length")


async def test_room_is_given_back_only_when_llama_cpp_has_freed_it() -> None:
    async with running(slots=2, kv_tokens=256, context_window=256) as engine:
        left = engine.generate(GenerationJob(FRANCE, ENDLESS, "left"))
        await anext(left)
        await left.aclose()
        next_one = engine._admission.ticket(Claim(b"", 200))
        assert not next_one.is_granted
        async with asyncio.timeout(30):
            await next_one.granted()
        assert await busy(engine) == 0


async def test_a_full_line_refuses_more() -> None:
    async with running(slots=1, queue_limit=1) as engine:
        runs = [asyncio.create_task(run(engine, FRANCE, Sampling(max_tokens=20))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await run(engine, FRANCE)
        await asyncio.gather(*runs)


async def test_nothing_is_left_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    async with running(slots=1) as engine:
        assert engine._process is not None
        pid, folder = engine._process.pid, Path(engine._process.socket).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(InvalidRequest):
            await run(engine, FRANCE, constraint=Constraint("gbnf", "root ::= ("))
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert capfd.readouterr() == ("", "")


async def test_a_window_beyond_the_training_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="8192"):
        await LlamaCppEngine(small_model(), context_window=10_000).start()


async def test_a_file_that_is_cut_says_so(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with small_model().open("rb") as whole:
        cut.write_bytes(whole.read(5_000_000))
    with pytest.raises(EngineFailed, match="not within the file bounds"):
        await LlamaCppEngine(cut).start()


async def test_a_file_that_is_missing_says_so(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnavailable, match="No such file"):
        await LlamaCppEngine(tmp_path / "none.gguf").start()


async def text_of(engine: LlamaCppEngine, tokens: Sequence[int]) -> str:
    """As llama.cpp reads them, end tokens left out."""
    assert engine._transport is not None
    body = {"tokens": [token for token in tokens if token not in END_TOKENS]}
    _, answer = await ask(engine._transport, "/detokenize", json.dumps(body).encode())
    return str(json.loads(answer)["content"])
