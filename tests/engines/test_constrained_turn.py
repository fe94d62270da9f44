"""A turn under a grammar goes on on another engine, and what comes out still matches the grammar."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from singletree.constraints.grammar_matchers import GrammarMatchers, MatcherVocabulary, _ranges
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, ConstraintKind, EngineInfo, GenerationJob, StopKind
from singletree.engines.workers import Worker
from singletree.errors import EngineFailed
from singletree.routing.pool import EnginePool

PROMPT = [1, 2, 3]
END, CALL = 256, 257
VOCABULARY = MatcherVocabulary(
    [bytes([byte]) for byte in range(256)] + [b"<end>", b"<call>"],
    [END, CALL],
    [END],
    lambda text: list(text.encode()),
)
MATCHERS = GrammarMatchers(lambda: VOCABULARY)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TEXT = '{"city": "Zürich", "days": 12}'
LARK = 'start: <[257]> %json {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]} <[257]>'

KINDS: list[tuple[str, Constraint, list[int]]] = [
    ("json_schema", Constraint("json_schema", SCHEMA), [*TEXT.encode(), END]),
    ("regex", Constraint("regex", r"[a-z]+=[0-9]{3}"), [*b"abc=123", END]),
    ("lark", Constraint("lark", LARK), [CALL, *b'{"n": 7}', CALL, END]),
    ("structural_tag", Constraint("structural_tag", {"type": "x"}, LARK), [CALL, *b'{"n":7}', CALL, END]),
    ("gbnf", Constraint("gbnf", 'root ::= "a"* "b"', "start: /a*b/"), [*b"aaaab", END]),
]
each_kind = pytest.mark.parametrize(
    ("constraint", "tokens"), [k[1:] for k in KINDS], ids=[k[0] for k in KINDS]
)


class Model:
    """Writes ``tokens``, and dies after some of them.

    Where no constraint holds it, it strays at each of ``strays``: it writes another token in place of the one at that
    position. Where only some tokens are allowed, it takes its own if that is one of them.

    Args:
        fates: for each generation, after how many tokens it dies; None: it ends well.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        *fates: int | None,
        strays: dict[int, int] | None = None,
        limits: str = "ids",
    ) -> None:
        self.jobs: list[GenerationJob] = []
        self._tokens = list(tokens)
        self._fates = list(fates)
        self._strays = strays or {}
        kinds: tuple[ConstraintKind, ...] = ("lark",) if limits == "lark" else ("json_schema",)
        optional = frozenset({"allowed_token_ids"}) if limits == "ids" else frozenset[str]()
        self._info = EngineInfo("m", 4096, constraints=kinds, resumable=True, optional_sampling=optional)

    async def start(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    def info(self) -> EngineInfo:
        """As given."""
        return self._info

    async def abort(self, request_id: str) -> None:
        """Never called."""

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """See ``Engine``."""
        self.jobs.append(job)
        fate = self._fates.pop(0) if self._fates else None
        done = list(job.prompt_token_ids[len(PROMPT) :])
        assert done == self._tokens[: len(done)]
        limit = job.sampling.max_tokens or len(self._tokens)
        for at in range(len(done), len(self._tokens)):
            if at - len(done) == fate:
                raise EngineFailed("it died")
            token = self._tokens[at]
            held = job.constraint is not None or job.sampling.allowed_token_ids
            if at in self._strays and not held:
                token = self._strays[at]
            if job.sampling.allowed_token_ids and token not in job.sampling.allowed_token_ids:
                token = job.sampling.allowed_token_ids[0]
            last = at - len(done) + 1 == limit
            finish: StopKind | None = "stop" if token in job.stop_token_ids else "length" if last else None
            wanted = job.sampling.logprobs
            others = [(self._tokens[at], -0.5), (7, -2.0)]
            row = [(token, -0.1), *(pair for pair in others if pair[0] != token)]
            yield Chunk([token], finish, logprobs=None if wanted is None else [row[: wanted + 1]])
            if finish is not None:
                return


async def generated(
    constraint: Constraint, *models: Model, max_tokens: int | None = 200, **sampling: Any
) -> tuple[list[int], list[Chunk]]:
    pool = EnginePool(
        [Worker(str(i), model) for i, model in enumerate(models)],
        matchers=MATCHERS,
    )
    await pool.begin()
    job = GenerationJob(PROMPT, Sampling(max_tokens, **sampling), "r", (END,), constraint)
    try:
        async with aclosing(pool.generate(job)) as chunks:
            found = [chunk async for chunk in chunks]
    finally:
        await pool.close()
    return [token for chunk in found for token in chunk.token_ids], found


@each_kind
async def test_the_turn_is_whole_wherever_its_engine_dies(constraint: Constraint, tokens: list[int]) -> None:
    for death in range(1, len(tokens)):
        first, second = Model(tokens, death), Model(tokens)
        found, chunks = await generated(constraint, first, second)
        assert found == tokens
        assert [chunk.finish for chunk in chunks if chunk.finish] == ["stop"]
        assert first.jobs[0].constraint == constraint
        assert [job.constraint for job in second.jobs] == [None], "its grammar would begin anew"


@each_kind
@pytest.mark.parametrize("limits", ["ids", "lark", "logprobs"])
async def test_what_the_grammar_forbids_is_replaced(
    constraint: Constraint, tokens: list[int], limits: str
) -> None:
    for at in {1, 2, len(tokens) // 2, len(tokens) - 2, len(tokens) - 1}:
        for stray in (END, ord("\x01")):
            if stray == tokens[at]:
                continue
            models = (Model(tokens, 1, limits=limits), Model(tokens, strays={at: stray}, limits=limits))
            found, chunks = await generated(constraint, *models)
            assert found == tokens, (at, stray)
            assert [chunk.finish for chunk in chunks if chunk.finish] == ["stop"]


@each_kind
async def test_engines_may_die_again_and_again(constraint: Constraint, tokens: list[int]) -> None:
    models = (
        Model(tokens, 1),
        Model(tokens, 1, strays={3: 1}),
        Model(tokens, 1),
        Model(tokens, strays={5: 1}),
    )
    found, _ = await generated(constraint, *models)
    assert found == tokens


@each_kind
async def test_before_the_first_token_the_constraint_stays(constraint: Constraint, tokens: list[int]) -> None:
    first, second = Model(tokens, 0), Model(tokens)
    found, _ = await generated(constraint, first, second)
    assert found == tokens
    assert [job.constraint for job in second.jobs] == [constraint]


@each_kind
@pytest.mark.parametrize("limit", [2, 3, 5])
async def test_the_limit_is_that_of_the_whole_turn(
    constraint: Constraint, tokens: list[int], limit: int
) -> None:
    for at in range(1, limit):
        models = (Model(tokens, 1), Model(tokens, strays={at: 1}))
        found, chunks = await generated(constraint, *models, max_tokens=limit)
        assert found == tokens[:limit]
        assert [chunk.finish for chunk in chunks if chunk.finish] == ["length"]


async def test_log_probabilities_stay_with_their_tokens() -> None:
    _, constraint, tokens = KINDS[0]
    for limits in ("ids", "lark", "logprobs"):
        models = (Model(tokens, 1, limits=limits), Model(tokens, strays={4: 1}, limits=limits))
        found, chunks = await generated(constraint, *models, logprobs=1)
        assert found == tokens
        rows = [row for chunk in chunks for row in chunk.logprobs or ()]
        assert [row[0][0] for row in rows] == tokens
        assert max(map(len, rows)) <= 2


async def test_a_grammar_that_does_not_accept_what_was_generated() -> None:
    """The engine and llguidance disagree: rather an error than a turn that breaks its grammar."""
    tokens = [*b"abc", END]
    with pytest.raises(EngineFailed, match="died"):
        await generated(Constraint("regex", "[0-9]+"), Model(tokens, 2), Model(tokens))


@pytest.mark.parametrize(
    "constraint",
    [Constraint("structural_tag", {}), Constraint("lark", "start: nothing_known"), Constraint("regex", "(")],
)
async def test_a_grammar_that_cannot_be_followed(constraint: Constraint) -> None:
    tokens = [*b"abc", END]
    with pytest.raises(EngineFailed, match="died"):
        await generated(constraint, Model(tokens, 2), Model(tokens))


async def test_where_no_engine_can_be_limited_and_none_of_the_likeliest_fits() -> None:
    tokens = [*b"abc=123", END]
    models = [
        Model(tokens, 1, limits="none"),
        *(Model(tokens, strays={2: 1}, limits="none") for _ in range(3)),
    ]
    for model in models:
        model._tokens = list(b"ab!=123")
    with pytest.raises(EngineFailed):
        await generated(Constraint("regex", r"[a-z]+=[0-9]{3}"), *models)


async def test_matchers() -> None:
    matcher = await MATCHERS.follow(Constraint("regex", "ab?"), [])
    assert matcher is not None
    assert (matcher.allowed(), matcher.may_end()) == ([ord("a")], False)
    assert matcher.accept([ord("a"), ord("x")]) == 1
    assert (set(matcher.allowed()), matcher.may_end()) == ({ord("b"), END}, True)
    assert matcher.accept([ord("b"), ord("b")]) == 1
    assert matcher.allowed() == [END]
    assert matcher.accept([END, END]) == 1
    assert (list(matcher.allowed()), matcher.may_end()) == ([], True)


def test_ranges() -> None:
    assert _ranges([1, 2, 3, 7, 9, 10]) == "1-3,7,9-10"
