"""The official SDK on stored responses and conversations; every body is of its types, strictly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.conversations import Conversation, ConversationDeletedResource
from openai.types.responses import Response, ResponseItem

from protocols.judge_responses import wrong_as
from server.serving import MODEL
from server.test_stored import CALL, TOOLS, storing

from .sdk import openai_sdk


@asynccontextmanager
async def asking(*turns: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with storing(*turns) as served, openai_sdk(served.client) as sdk:
        yield sdk


def right(kind: Any, value: Any) -> Any:
    """``value``, which is of the SDK's type ``kind``."""
    wrong = wrong_as(kind, value.to_dict())
    assert not wrong, "\n".join(wrong)
    return value


async def test_a_response_from_its_making_to_its_end() -> None:  # C33
    tools: Any = TOOLS
    async with asking(CALL) as sdk:
        made = await sdk.responses.create(model=MODEL, input="List. [[script:s0]]", tools=tools)
        again = right(Response, await sdk.responses.retrieve(made.id))
        assert again.to_dict() == made.to_dict()
        listed = [item async for item in sdk.responses.input_items.list(made.id)]
        assert [right(ResponseItem, item).type for item in listed] == ["message"]
        counted = await sdk.responses.input_tokens.count(
            model=MODEL, input="List. [[script:s0]]", tools=tools
        )
        assert made.usage is not None
        assert counted.to_dict() == {
            "object": "response.input_tokens",
            "input_tokens": made.usage.input_tokens,
        }
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            await sdk.responses.cancel(made.id)
        await sdk.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(made.id)


async def test_a_response_in_the_background() -> None:
    async with asking("Hello.") as sdk:
        begun = right(
            Response, await sdk.responses.create(model=MODEL, input="[[script:s0]]", background=True)
        )
        assert begun.status in ("queued", "in_progress")
        ended = right(Response, await sdk.responses.cancel(begun.id))
        assert ended.status in ("cancelled", "completed")


async def test_a_conversation_from_its_making_to_its_end() -> None:  # C33
    async with asking(CALL, "Done.") as sdk:
        made = right(
            Conversation,
            await sdk.conversations.create(
                items=[{"role": "user", "content": "Hello.", "type": "message"}], metadata={"a": "b"}
            ),
        )
        first = await sdk.responses.create(
            model=MODEL,
            input="List. [[script:s0]]",
            conversation=made.id,
            tools=TOOLS,  # type: ignore[arg-type]
        )
        assert right(Response, first).conversation.to_dict() == {"id": made.id}
        items = [item async for item in sdk.conversations.items.list(made.id, order="asc")]
        assert [right(ResponseItem, item).type for item in items] == [
            "message",
            "message",
            "reasoning",
            "function_call",
        ]
        changed = right(Conversation, await sdk.conversations.update(made.id, metadata={"c": "d"}))
        assert changed.metadata == {"c": "d"}
        one = await sdk.conversations.items.retrieve(items[0].id or "", conversation_id=made.id)
        assert one.to_dict() == items[0].to_dict()
        await sdk.conversations.items.delete(items[0].id or "", conversation_id=made.id)
        left = [item.id async for item in sdk.conversations.items.list(made.id, order="asc")]
        assert left == [item.id for item in items[1:]]
        gone = right(ConversationDeletedResource, await sdk.conversations.delete(made.id))
        assert gone.deleted
        with pytest.raises(openai.NotFoundError):
            await sdk.conversations.retrieve(made.id)


async def test_too_much_beside_a_conversation_is_refused() -> None:
    async with asking() as sdk:
        with pytest.raises(openai.BadRequestError, match="at most 512"):
            await sdk.conversations.create(metadata={"k": "v" * 513})
        made = await sdk.conversations.create()
        with pytest.raises(openai.BadRequestError, match="at most 16"):
            await sdk.conversations.update(made.id, metadata={f"k{n}": "v" for n in range(17)})
