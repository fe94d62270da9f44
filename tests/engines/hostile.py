"""What an engine must survive: one list of hostile answers, played by every wire.

Each check gets a dialect and asks for eight tokens. The tokens that came before the failure stand, the outcome is an
error of ours or a finish reason, and the connection is never left to a server that goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from engines.vllm_memory import MemoryAnswer
from engines.wire_servers import Asked, Dialect, DialectTransport, Step, started
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, GenerationJob
from singletree.errors import (
    EngineFailed,
    EngineUnfit,
    InvalidRequest,
    Overloaded,
    SingletreeError,
)
from singletree.remote.transport import ConnectionLost

PROMPT = (1, 2, 3)
ASKED = Asked(PROMPT, 8)
TOKENS = [101, 102, 103, 104, 105]
SILENT = "it sent nothing for too long"
PATIENCE = 20.0

Check = Callable[[Dialect], Awaitable[None]]
HOSTILE: list[Check] = []


def _check(check: Check) -> Check:
    HOSTILE.append(check)
    return check


def events(dialect: Dialect, tokens: Sequence[int] = TOKENS, finish: str | None = "stop") -> list[bytes]:
    """An answer of those tokens, one an event; the last has ``finish``."""
    last = len(tokens) - 1
    return [
        dialect.event(Step(ASKED, [token], tokens[:i], finish if i == last else None))
        for i, token in enumerate(tokens)
    ]


async def outcome(
    dialect: Dialect, answer: MemoryAnswer | Exception
) -> tuple[list[int], str | None, SingletreeError | None]:
    """The tokens, the finish reason and the error of one generation that is answered with ``answer``."""
    engine = await started(DialectTransport(dialect, answer))
    chunks: list[Chunk] = []
    failure: SingletreeError | None = None
    try:
        async with asyncio.timeout(PATIENCE):
            async for chunk in engine.generate(GenerationJob(PROMPT, Sampling(max_tokens=8), "r")):
                chunks.append(chunk)
    except SingletreeError as error:
        failure = error
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert (failure is None) == bool(chunks and chunks[-1].finish), "it ends in one of the two ways"
    assert all(0 <= token < 2**31 for token in tokens)
    assert isinstance(answer, Exception) or answer.closed or answer.finished
    return tokens, chunks[-1].finish if chunks else None, failure


@_check
async def a_whole_answer_is_one(dialect: Dialect) -> None:
    answer = MemoryAnswer(body=[*events(dialect), dialect.ending(0), b""])
    assert await outcome(dialect, answer) == (TOKENS, "stop", None)


@_check
async def it_may_be_cut_anywhere(dialect: Dialect) -> None:
    whole = b"".join([*events(dialect, TOKENS[:3]), dialect.ending(0)])
    single = [whole[i : i + 1] for i in range(len(whole))]
    for pieces in (single, *([whole[:cut], whole[cut:]] for cut in range(1, len(whole), 7))):
        found = await outcome(dialect, MemoryAnswer(body=[*pieces, b""]))
        assert found == (TOKENS[:3], "stop", None), pieces


@_check
async def it_may_break_off_anywhere(dialect: Dialect) -> None:
    whole = b"".join([*events(dialect, TOKENS[:3]), dialect.ending(0)])
    for cut in range(0, len(whole), 5):
        for end in (b"", ConnectionLost("the connection broke")):
            body = [whole[:cut], end] if cut else [end]
            tokens, finish, failure = await outcome(dialect, MemoryAnswer(body=body))
            assert tokens == TOKENS[: len(tokens)]
            assert isinstance(failure, EngineFailed) if finish is None else tokens == TOKENS[:3]


@_check
async def it_falls_silent(dialect: Dialect) -> None:
    answer = MemoryAnswer(body=[*events(dialect)[:2], ConnectionLost(SILENT)])
    tokens, _, failure = await outcome(dialect, answer)
    assert tokens == TOKENS[:2]
    assert isinstance(failure, EngineFailed)
    assert SILENT in failure.message


@_check
async def it_never_answers(dialect: Dialect) -> None:
    _, _, failure = await outcome(dialect, ConnectionLost(SILENT))
    assert isinstance(failure, EngineFailed)


@_check
async def it_sends_more_tokens_than_were_asked_for(dialect: Dialect) -> None:
    many = list(range(200, 220))
    answer = MemoryAnswer(body=events(dialect, many, None))
    tokens, finish, _ = await outcome(dialect, answer)
    assert (tokens, finish) == (many[:8], "length")
    assert answer.closed, "the server would go on"


@_check
async def it_sends_events_after_the_end(dialect: Dialect) -> None:
    late = dialect.event(Step(ASKED, [999], TOKENS, "length"))
    answer = MemoryAnswer(body=[b"".join(events(dialect)) + late + dialect.ending(0) + late, b""])
    assert await outcome(dialect, answer) == (TOKENS, "stop", None)


@_check
async def it_sends_text_that_is_not_utf8(dialect: Dialect) -> None:
    good, bad = events(dialect)[:2]
    for field in (b'"index"', b'"text"', b'"content"', b'"finish_reason": null', b'"stop": false'):
        if field not in bad:
            continue
        broken = bad.replace(field, b'"finish_reason": "\xff\xfe"' if b"finish" in field else b'"\xff"', 1)
        tokens, _, failure = await outcome(dialect, MemoryAnswer(body=[good, broken, b""]))
        assert tokens[:1] == TOKENS[:1]
        assert isinstance(failure, EngineFailed)


@_check
async def it_sends_ids_that_are_none(dialect: Dialect) -> None:
    for id in (-1, 2**31, 2**70):
        body = [events(dialect)[0], dialect.event(Step(ASKED, [id], TOKENS[:1])), b""]
        tokens, _, failure = await outcome(dialect, MemoryAnswer(body=body))
        assert tokens == TOKENS[:1]
        assert isinstance(failure, EngineFailed)


@_check
async def it_sends_what_is_no_event(dialect: Dialect) -> None:
    deep = b"data: " + b"[" * 100_000 + b"\n\n"
    wrong = [
        b"data: nonsense\n\n",
        b"data: []\n\n",
        b'data: {"choices": 3, "tokens": 3, "output_ids": 3}\n\n',
        deep,
    ]
    for event in wrong:
        tokens, _, failure = await outcome(dialect, MemoryAnswer(body=[events(dialect)[0], event, b""]))
        assert tokens == TOKENS[:1]
        assert isinstance(failure, EngineFailed)


@_check
async def it_sends_no_stream(dialect: Dialect) -> None:
    for page in (b"", b"<html>\n<body>\n\n</html>\n", b'{"object": "nothing"}', b"\n\n\n"):
        tokens, _, failure = await outcome(dialect, MemoryAnswer(body=[page, b""] if page else [b""]))
        assert tokens == []
        assert isinstance(failure, EngineFailed)


@_check
async def it_refuses(dialect: Dialect) -> None:
    kinds = {
        400: InvalidRequest,
        401: EngineUnfit,
        404: EngineUnfit,
        429: Overloaded,
        500: EngineFailed,
        503: Overloaded,
    }
    for status, kind in kinds.items():
        answer = MemoryAnswer(status, [dialect.error(status, "the reason"), b""])
        _, _, failure = await outcome(dialect, answer)
        assert type(failure) is kind, (status, failure)
        assert status == 401 or "the reason" in str(failure)


@_check
async def it_refuses_without_words(dialect: Dialect) -> None:
    for body in (
        b"",
        b"\xff\xff",
        b"[" * 100_000,
        b'{"error": 3}',
        b'{"error": {"message": 3}}',
        b"x" * 10**6,
    ):
        for status in (400, 500, 599):
            _, _, failure = await outcome(dialect, MemoryAnswer(status, [body, b""] if body else [b""]))
            assert isinstance(failure, SingletreeError)
            assert len(failure.message) < 1000


@_check
async def it_fails_in_the_middle_of_a_stream(dialect: Dialect) -> None:
    error = b"data: " + dialect.error(500, "the engine died") + b"\n\n"
    for before in (0, 2):
        tokens, _, failure = await outcome(
            dialect, MemoryAnswer(body=[*events(dialect)[:before], error, b""])
        )
        assert tokens == TOKENS[:before]
        assert isinstance(failure, EngineFailed)
