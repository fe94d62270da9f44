"""On a real model, the default one: forced calls are calls in every format, and free turns call rightly or talk."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from engines.contract import collect, tokens_of
from engines.small_model import small_model
from singletree import families
from singletree.constraints.constrain import allow_calls, require_call
from singletree.constraints.expression import Expression, lark
from singletree.conversation import Part, Reasoning, Sampling, Text, Tool, ToolCall, Turn
from singletree.engines.engine import Constraint, GenerationJob
from singletree.events import fold
from singletree.llamacpp.engine import LlamaCppEngine
from singletree.parsing.family import Family
from singletree.parsing.parser import Parser
from singletree.parsing.render_turn import render_turn
from singletree.prompts.tokenizer.tokenizer import Tokenizer, load_tokenizer
from singletree.server.turn.constraints import ReasoningState

pytestmark = [pytest.mark.embedded, pytest.mark.asyncio(loop_scope="module")]

WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "pattern": "^[A-Z][a-z]{1,12}$"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    strict=True,
)
PARIS = ToolCall("get_weather", '{"city": "Paris", "days": 3}', "abcdefghi")
NAMES = ("hermes", "qwen3_coder", "llama3_json", "mistral", "glm47", "kimi_k2", "deepseek_v3", "gemma4")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(small_model())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[LlamaCppEngine]:
    made = LlamaCppEngine(small_model(), slots=1, context_window=2048, threads=1)
    await made.start()
    yield made
    await made.close()


def written(family: Family, parts: Sequence[Part], begun: str) -> str:
    """A prompt with one earlier turn of ``parts``, and the next one ``begun``."""
    earlier = family.message_header + render_turn(family, parts)
    asked = "<|im_start|>user\nThe weather in {}?<|im_end|>\n<|im_start|>assistant\n"
    return (
        f"{asked.format('Paris')}{earlier}<|im_end|>\n{asked.format('London')}{family.message_header}{begun}"
    )


async def turn(
    engine: LlamaCppEngine,
    tokenizer: Tokenizer,
    family: Family,
    prompt: str,
    expression: Expression | None,
    **sampling: Any,
) -> tuple[Turn, str]:
    """What is read of the turn, and why it ended."""
    assert expression is not None
    grammar = lark(expression, {}, tokenizer.stop_token_ids)
    sampling_options = Sampling(**{"temperature": 0.0, "max_tokens": 120, **sampling})
    chunks = await collect(
        engine.generate(
            GenerationJob(
                tokenizer.encode(prompt), sampling_options, "test", constraint=Constraint("lark", grammar)
            )
        )
    )
    ids = [t for t in tokens_of(chunks) if t not in tokenizer.stop_token_ids]
    parser = Parser(family, [WEATHER], prompt[-500:], special_tokens=tokenizer.special_tokens)
    events = parser.feed(tokenizer.decode(ids)) + parser.close()
    return fold(events), str(chunks[-1].finish)


def is_right(call: ToolCall) -> bool:
    arguments = json.loads(call.arguments)
    return (
        call.name == "get_weather"
        and call.complete
        and list(arguments) == ["city", "days"]
        and type(arguments["days"]) is int
        and arguments["days"] in range(1, 10)
        and arguments["city"].isalpha()
    )


@pytest.mark.parametrize("name", NAMES)
async def test_a_forced_call_is_made_and_read(
    engine: LlamaCppEngine, tokenizer: Tokenizer, name: str
) -> None:
    """C38: the model has seen nothing of the format."""
    family = families.get(name)
    prompt = (
        f"<|im_start|>user\nThe weather in London?<|im_end|>\n<|im_start|>assistant\n{family.message_header}"
    )
    wanted = require_call(family, [WEATHER], thinking="over", parallel=False)
    read, finish = await turn(engine, tokenizer, family, prompt, wanted, temperature=1.0, seed=3)
    assert [type(part) for part in read.parts] == [ToolCall]
    assert is_right(read.tool_calls[0])
    assert finish == "stop"


@pytest.mark.parametrize(
    ("name", "thinking"),
    [
        pytest.param("qwen3_coder", "open", marks=pytest.mark.slow),
        pytest.param("glm47", "open", marks=pytest.mark.slow),
        ("glm47", "possible"),
        ("kimi_k2", "open"),
    ],
)
async def test_a_thought_comes_before_the_forced_call(
    engine: LlamaCppEngine, tokenizer: Tokenizer, name: str, thinking: ReasoningState
) -> None:  # C38
    family = families.get(name)
    assert family.reasoning is not None
    prompt = written(
        family, [Reasoning("I must look."), PARIS], family.reasoning[0] if thinking == "open" else ""
    )
    wanted = require_call(family, [WEATHER], thinking=thinking, parallel=False)
    read, _ = await turn(engine, tokenizer, family, prompt, wanted)
    assert [type(part) for part in read.parts] == [Reasoning, ToolCall]
    assert is_right(read.tool_calls[0])


@pytest.mark.parametrize(
    "name",
    [
        "hermes",
        pytest.param("qwen3_coder", marks=pytest.mark.slow),
        pytest.param("glm47", marks=pytest.mark.slow),
    ],
)
async def test_a_free_turn_talks_or_calls_rightly(
    engine: LlamaCppEngine, tokenizer: Tokenizer, name: str
) -> None:  # C42
    family = families.get(name)
    wanted = allow_calls(family, [WEATHER], thinking="over", parallel=False)
    plain = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    talk, _ = await turn(engine, tokenizer, family, plain, wanted)
    assert talk.parts == (Text("The capital of France is Paris."),)
    wrong = ToolCall("get_weather", '{"city": "paris 75000", "days": 300}', "abcdefghi")
    read, _ = await turn(engine, tokenizer, family, written(family, [wrong], ""), wanted)
    assert [type(part) for part in read.parts] == [ToolCall], (
        "it does as it did before, and is held to the schema"
    )
    assert is_right(read.tool_calls[0])
