"""Cache diagnostics on the three APIs, read by the official SDKs: what an answer reports of an earlier one's prompt."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.settings.config import Config
from singletree.testing.scripts import Script

from .serving import MODEL, TEMPLATE, TOKENIZER, Served, model, serving

LAYOUT = TEMPLATE.layout(TOKENIZER)
TOOL = {"name": "ls", "description": "lists", "input_schema": {"type": "object"}}
QUESTION = "[[script:a]] one"

Turns = list[dict[str, Any]]


def server() -> AbstractAsyncContextManager[Served]:
    """A server with the turn memory that exact replay needs."""
    return serving({"a": Script("yes")}, memory=TurnMemory(2**20), layout=LAYOUT, capsules=None)


def _http(served: Served) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=served.client.app))


def claude(served: Served) -> anthropic.AsyncAnthropic:
    """Anthropic's SDK, on the server in memory."""
    return anthropic.AsyncAnthropic(
        api_key="k", base_url="http://127.0.0.1", max_retries=0, http_client=_http(served)
    )


def gpt(served: Served) -> openai.AsyncOpenAI:
    """OpenAI's SDK, on the server in memory."""
    return openai.AsyncOpenAI(
        api_key="k", base_url="http://127.0.0.1/v1", max_retries=0, http_client=_http(served)
    )


def asked(text: str) -> Turns:
    return [{"role": "user", "content": text}]


async def message(
    served: Served, turns: Turns, previous: str | None, *, stream: bool = False, **more: Any
) -> anthropic.types.Message:
    """The message for ``turns``, compared with the message ``previous``."""
    fields: Any = {"model": MODEL, "max_tokens": 64, "messages": turns, "system": "Be brief.", **more}
    fields["diagnostics"] = {"previous_message_id": previous}
    if not stream:
        answer: anthropic.types.Message = await claude(served).messages.create(**fields)
        return answer
    async with claude(served).messages.stream(**fields) as events:
        first = await anext(aiter(events))
        assert first.type == "message_start"
        started = first.message.diagnostics
        found = await events.get_final_message()
        assert found.diagnostics == started, "message_start has the same diagnosis"
        return found


def followed(turns: Turns, answer: anthropic.types.Message) -> Turns:
    """The turns with the answer and another question."""
    content = [block.model_dump(exclude_none=True) for block in answer.content]
    return [*turns, {"role": "assistant", "content": content}, *asked("[[script:a]] more")]


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_report_what_changed(stream: bool) -> None:
    async with server() as served:
        turns = asked(QUESTION)
        first = await message(served, turns, None, stream=stream)
        assert first.diagnostics is None
        turns = followed(turns, first)
        second = await message(served, turns, first.id, stream=stream)
        assert second.diagnostics is None, "the prompt goes on from the one before"

        changes: dict[str, dict[str, Any]] = {
            "system_changed": {"system": "Be long."},
            "tools_changed": {"tools": [TOOL]},
        }
        for expected, change in changes.items():
            found = await message(served, turns, first.id, stream=stream, **change)
            assert found.diagnostics is not None
            reason = found.diagnostics.cache_miss_reason
            assert reason is not None
            assert reason.type == expected
            assert reason.cache_missed_input_tokens > 0  # type: ignore[union-attr]


async def test_a_changed_message_is_counted_to_the_token() -> None:
    async with server() as served:
        turns = asked(QUESTION)
        first = await message(served, turns, None)
        edited = followed(asked("[[script:a]] two"), first)
        found = await message(served, edited, first.id)
        assert found.diagnostics is not None
        reason: Any = found.diagnostics.cache_miss_reason
        assert reason.type == "messages_changed"
        # Each byte is a token: all that follows "[[script:a]] " in the first prompt, and its answer.
        end = "one<|im_end|>\n<|im_start|>assistant\n"
        assert reason.cache_missed_input_tokens == len(TOKENIZER.encode(end)) + len("yes")
        assert reason.singletree["message"] == 1
        assert reason.singletree["cure"]


async def test_an_unknown_message_is_not_found() -> None:
    async with server() as served:
        found = await message(served, asked(QUESTION), "msg_unknown")
        assert found.diagnostics is not None
        assert found.diagnostics.cache_miss_reason is not None
        assert found.diagnostics.cache_miss_reason.type == "previous_message_not_found"


async def test_a_message_without_the_field_has_none() -> None:
    async with server() as served:
        answer = await served.client.post(
            "/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": asked(QUESTION)}
        )
        assert "diagnostics" not in answer.json


async def response(served: Served, given: Any, compared: str | None, **more: Any) -> Any:
    """The response to ``given``, compared with the response ``compared``."""
    options: Any = {"prompt_cache_options": {"comparison_response_id": compared}} if compared else {}
    return await gpt(served).responses.create(model=MODEL, input=given, **options, **more)


async def test_responses_report_what_changed() -> None:
    async with server() as served:
        first = await response(served, asked(QUESTION), None)
        assert first.prompt_cache_diagnostics is None
        items = [*asked(QUESTION), *(item.model_dump(exclude_none=True) for item in first.output)]
        items += asked("[[script:a]] more")
        assert (await response(served, items, first.id)).prompt_cache_diagnostics.type == "cache_hit"
        tool = {"type": "function", "name": "ls", "parameters": {"type": "object"}, "strict": None}
        for reason, more in (
            ("tools_changed", {"tools": [tool]}),
            ("input_changed", {"instructions": "Be long."}),
        ):
            found = (await response(served, items, first.id, **more)).prompt_cache_diagnostics
            assert (found.type, found.reason) == ("cache_miss", reason)
            assert found.cache_missed_tokens > 0
            assert found.comparison_reusable_tokens >= 0
        unknown = (await response(served, items, "resp_unknown")).prompt_cache_diagnostics
        assert unknown.type == "comparison_response_not_found"


async def test_each_snapshot_of_a_streamed_response_has_the_diagnosis() -> None:
    async with server() as served:
        first = await response(served, asked(QUESTION), None)
        found = []
        async for event in await response(served, asked("[[script:a]] two"), first.id, stream=True):
            if event.type in ("response.created", "response.in_progress", "response.completed"):
                found.append(event.response.prompt_cache_diagnostics.reason)
        assert found == ["input_changed"] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_reports_it_as_an_extension(stream: bool) -> None:
    async with server() as served:

        async def answer(turns: Any, compared: str | None) -> tuple[str, Any]:
            options: Any = {"prompt_cache_options": {"comparison_response_id": compared}} if compared else {}
            given: Any = await gpt(served).chat.completions.create(
                model=MODEL, messages=turns, stream=stream, **options
            )
            if stream:
                given = await anext(aiter(given))
            return given.id, (given.model_extra or {}).get("prompt_cache_diagnostics")

        id, found = await answer(asked(QUESTION), None)
        assert found is None
        turns = [*asked(QUESTION), {"role": "assistant", "content": "yes"}, *asked("[[script:a]] more")]
        assert (await answer(turns, id))[1] == {"type": "cache_hit"}
        _, found = await answer(asked("[[script:a]] two"), id)
        assert (found["type"], found["reason"]) == ("cache_miss", "input_changed")


async def test_an_answer_that_later_turns_continue_can_be_named() -> None:
    async with server() as served:
        turns = asked(QUESTION)
        first = await message(served, turns, None)
        longer = followed(turns, first)
        second = await message(served, longer, first.id)
        found = await message(served, followed(longer, second), first.id)
        assert found.diagnostics is None


async def test_a_forgotten_session_makes_it_unavailable() -> None:
    async with serving({"a": Script("yes")}, config=Config(session_memory=40_000), layout=LAYOUT) as served:
        first = await message(served, asked(QUESTION), None)
        for number in range(30):
            await message(served, asked(f"{QUESTION} {'x' * 3000} {number}"), None, system=f"{number}")
        found = await message(served, asked(QUESTION), first.id)
        assert found.diagnostics is not None
        assert found.diagnostics.cache_miss_reason is not None
        assert found.diagnostics.cache_miss_reason.type == "unavailable"


async def test_another_model_is_the_change() -> None:
    async with server() as served:
        other = model(served.engine, names=("other",), layout=LAYOUT)
        served.service.catalog = type(served.service.catalog)([served.model, other])
        first = await message(served, asked(QUESTION), None)
        found = await message(served, asked(QUESTION), first.id, model="other")
        assert found.diagnostics is not None
        reason: Any = found.diagnostics.cache_miss_reason
        assert reason.type == "model_changed"
        assert reason.cache_missed_input_tokens > 0


async def test_a_comparison_that_is_no_id_is_refused() -> None:
    async with server() as served:
        for path, field in (("/v1/responses", "input"), ("/v1/chat/completions", "messages")):
            options = {"prompt_cache_options": {"comparison_response_id": 7}}
            answer = await served.client.post(path, {"model": MODEL, field: asked(QUESTION), **options})
            assert answer.status == 400
            assert "comparison_response_id" in answer.json["error"]["message"]
