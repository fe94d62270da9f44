"""Judges of our Chat Completions that are not ours: the vendor's own schema, and the checker that brings it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import llm_comply
import pytest
from llm_comply.schema import SpecLoader
from llm_comply.tests.openai_chat import OPENAI_CHAT_TESTS

from protocols.shapes import SHAPES, Shape, names
from protocols.test_chat_encode import body, stream
from server.memory import events
from server.serving import serving

from . import comply

pytestmark = pytest.mark.filterwarnings("ignore:jsonschema.RefResolver:DeprecationWarning")

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>'
OUTPUTS = {
    "chat-tool-calling": CALL,
    "chat-reasoning-summary": "<think>\nLet me see.\n</think>\n\nIt is 555.",
}
OPEN = (
    "choices.0.finish_reason: None is not one of "
    "['stop', 'length', 'tool_calls', 'content_filter', 'function_call']"
)
"""The schema says ``nullable``, which the checker does not read beside ``enum``."""


@cache
def spec() -> SpecLoader:
    """The vendor's description of the API."""
    return SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / "openai_chat.json"))


@pytest.mark.parametrize("case", comply.cases(OPENAI_CHAT_TESTS))
async def test_the_checkers_own_cases(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving({"s": OUTPUTS.get(case.id, "One two three.")}) as served:
        await comply.check(case, spec(), served, monkeypatch, "messages")


@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_every_body_and_chunk_is_the_schemas(shape: Shape) -> None:
    assert list(spec().validate(body(shape), "CreateChatCompletionResponse")) == []
    chunks = [data for _, data in events(stream(shape.events, shape.finished)) if data != "[DONE]"]
    errors = [
        error for chunk in chunks for error in spec().validate(chunk, "CreateChatCompletionStreamResponse")
    ]
    assert [error for error in errors if error != OPEN] == []
