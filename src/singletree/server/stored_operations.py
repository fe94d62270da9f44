"""What the routes of stored responses and conversations do.

https://platform.openai.com/docs/api-reference/responses and https://platform.openai.com/docs/api-reference/conversations.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from singletree.errors import InvalidRequest, NotStored
from singletree.protocols import limits, wire
from singletree.server.identity import new_id
from singletree.server.operations import JSON, Call, Operation
from singletree.server.store import Item, Store, StoredConversation
from singletree.server.stored import as_item

T = TypeVar("T")

_PAGE = 20
_LONGEST_PAGE = 100
_MOST_NEW_ITEMS = 20


class _NewConversation(Struct):
    metadata: dict[str, Any] | None = None
    items: list[dict[str, Any]] | None = None


class _Metadata(Struct):
    metadata: dict[str, Any]


class _NewItems(Struct):
    items: list[dict[str, Any]]


class _Background(Struct):
    background: bool | None = None


class _Named(Struct):
    id: str = ""


def _store(call: Call) -> Store:
    if call.service.store is None:
        raise InvalidRequest("this server stores nothing; start it with --store")
    return call.service.store


def _answer(value: Any) -> ASGIApp:
    return Response(value if isinstance(value, bytes) else msgspec.json.encode(value), media_type=JSON)


async def get_response(call: Call) -> ASGIApp:
    """A stored response, or one in the making; its events again if asked to ``stream``."""
    id, query = call.http.path_params["id"], call.http.query_params
    job = call.service.jobs.get(id)
    if query.get("stream") in ("true", "1"):
        if job is None or not job.is_streamed:
            raise InvalidRequest(
                "only a response of the last ones made with background and stream can be streamed again;"
                " leave stream out",
                param="stream",
            )
        return StreamingResponse(job.log.read(_after(query) + 1), media_type="text/event-stream")
    if job is not None:
        return _answer(job.body())
    return _answer(_found("Response", id, await _store(call).body(id)))


async def delete_response(call: Call) -> ASGIApp:
    """Forget a response."""
    id = call.http.path_params["id"]
    if (job := call.service.jobs.get(id)) is not None:
        await job.cancel()
        call.service.jobs.drop(id)
    if not await _store(call).delete(id):
        raise NotStored("Response", id)
    return _answer({"id": id, "object": "response", "deleted": True})


async def cancel_response(call: Call) -> ASGIApp:
    """End a response that is made in the background."""
    id = call.http.path_params["id"]
    job = call.service.jobs.get(id)
    if job is not None:
        return _answer(await job.cancel())
    body = _found("Response", id, await _store(call).body(id))
    if not msgspec.json.decode(body, type=_Background).background:
        raise InvalidRequest("Cannot cancel a synchronous response.")
    return _answer(body)


def _after(query: Mapping[str, str]) -> int:
    """The last event that the client has."""
    after = query.get("starting_after", "-1")
    if not after.removeprefix("-").isdecimal():
        raise InvalidRequest(
            f"starting_after is {after!r}; send the sequence_number of an event", param="starting_after"
        )
    return max(-1, int(after))


async def list_input_items(call: Call) -> ASGIApp:
    """What a response answered, a page of it."""
    id = call.http.path_params["id"]
    items = _found("Response", id, await _store(call).input_items(id))
    return _answer(page(items, call.http.query_params))


async def create_conversation(call: Call) -> ASGIApp:
    """A new conversation, with items if there are any."""
    said = wire.read(await call.body() or b"{}", _NewConversation)
    limits.check_metadata(said.metadata)
    metadata = msgspec.json.encode(said.metadata or {})
    conversation = StoredConversation(new_id("conv_"), int(time.time()), metadata)
    await _store(call).add_conversation(conversation, _new_items(said.items or []))
    return _answer(_conversation(conversation))


async def get_conversation(call: Call) -> ASGIApp:
    """A conversation without its items."""
    return _answer(_conversation(await _conversation_of(call)))


async def update_conversation(call: Call) -> ASGIApp:
    """New metadata."""
    conversation = await _conversation_of(call)
    said = wire.read(await call.body(), _Metadata).metadata
    limits.check_metadata(said)
    metadata = msgspec.json.encode(said)
    await _store(call).set_metadata(conversation.id, metadata)
    return _answer(_conversation(replace(conversation, metadata=metadata)))


async def delete_conversation(call: Call) -> ASGIApp:
    """Forget a conversation."""
    conversation = await _conversation_of(call)
    await _store(call).delete_conversation(conversation.id)
    return _answer({"id": conversation.id, "object": "conversation.deleted", "deleted": True})


async def list_items(call: Call) -> ASGIApp:
    """The items of a conversation, a page of them."""
    conversation = await _conversation_of(call)
    return _answer(page(await _store(call).items_of(conversation.id), call.http.query_params))


async def create_items(call: Call) -> ASGIApp:
    """More items at its end."""
    conversation = await _conversation_of(call)
    items = _new_items(wire.read(await call.body(), _NewItems).items)
    await _store(call).add_items(conversation.id, items)
    return _answer(_list([item.json for item in items], has_more=False))


async def get_item(call: Call) -> ASGIApp:
    """One item of a conversation."""
    return _answer(await _item_of(call, await _conversation_of(call)))


async def delete_item(call: Call) -> ASGIApp:
    """Take an item out of a conversation."""
    conversation = await _conversation_of(call)
    await _item_of(call, conversation)
    await _store(call).delete_item(conversation.id, call.http.path_params["item"])
    return _answer(_conversation(conversation))


async def _conversation_of(call: Call) -> StoredConversation:
    id = call.http.path_params["id"]
    found = await _store(call).conversation(id)
    if found is None:
        raise NotStored("Conversation", id)
    return found


async def _item_of(call: Call, conversation: StoredConversation) -> bytes:
    wanted = call.http.path_params["item"]
    items = await _store(call).items_of(conversation.id)
    return _found("Item", wanted, next((item for item in items if _id(item) == wanted), None))


def _found(kind: str, id: str, value: T | None) -> T:
    if value is None:
        raise NotStored(kind, id)
    return value


def _new_items(items: Sequence[Mapping[str, Any]]) -> list[Item]:
    if len(items) > _MOST_NEW_ITEMS:
        raise InvalidRequest(
            f"items has {len(items)} items; send at most {_MOST_NEW_ITEMS} at once", param="items"
        )
    return [as_item(item, new_id) for item in items]


def _conversation(conversation: StoredConversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created,
        "metadata": Raw(conversation.metadata),
    }


def page(items: Sequence[bytes], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of ``items``: ``limit`` of them behind ``after``, the newest first unless ``order`` is ``asc``.

    Raises:
        InvalidRequest: the query cannot be read, or names an item that is not there.
    """
    order, limit, after = query.get("order", "desc"), query.get("limit", str(_PAGE)), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order!r}; send asc or desc", param="order")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit) <= _LONGEST_PAGE:
        raise InvalidRequest(f"limit is {limit!r}; send a number from 1 to {_LONGEST_PAGE}", param="limit")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        ids = [_id(item) for item in ordered]
        if after not in ids:
            raise InvalidRequest(f"after is {after!r}, which is none of the items", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    shown = ordered[: int(limit)]
    return _list(shown, has_more=len(shown) < len(ordered))


def _list(items: Sequence[bytes], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [Raw(item) for item in items],
        "first_id": _id(items[0]) if items else None,
        "last_id": _id(items[-1]) if items else None,
        "has_more": has_more,
    }


def _id(item: bytes) -> str:
    return msgspec.json.decode(item, type=_Named).id


STORED_OPERATIONS: dict[str, Operation] = {
    "get_response": get_response,
    "delete_response": delete_response,
    "cancel_response": cancel_response,
    "list_input_items": list_input_items,
    "create_conversation": create_conversation,
    "get_conversation": get_conversation,
    "update_conversation": update_conversation,
    "delete_conversation": delete_conversation,
    "list_items": list_items,
    "create_items": create_items,
    "get_item": get_item,
    "delete_item": delete_item,
}
