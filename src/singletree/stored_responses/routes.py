"""The operations behind the routes of stored responses and conversations.

https://platform.openai.com/docs/api-reference/responses and https://platform.openai.com/docs/api-reference/conversations.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Raw, Struct
from starlette.responses import Response
from starlette.types import ASGIApp

from singletree.errors import InvalidRequest, NotStored
from singletree.protocols import limits, wire
from singletree.protocols.responses.state import client_item
from singletree.server.http.routes import JSON
from singletree.server.http.service import Call
from singletree.server.ids import new_id
from singletree.stored_responses.background_jobs import JobStream
from singletree.stored_responses.store import Store, as_item
from singletree.stored_responses.tables import StoredConversation, StoredItem

T = TypeVar("T")

_PAGE = 20
_LONGEST_PAGE = 100
_MOST_NEW_ITEMS = 20


class NewConversation(Struct):
    """The body of a request that creates a conversation."""

    metadata: dict[str, Any] | None = None
    items: list[dict[str, Any]] | None = None


class Metadata(Struct):
    """The body of a request that replaces the metadata of a conversation."""

    metadata: dict[str, Any]


class NewItems(Struct):
    """The body of a request that appends items to a conversation."""

    items: list[dict[str, Any]]


class _Background(Struct):
    background: bool | None = None


class _Named(Struct):
    id: str = ""


async def _store(call: Call) -> Store:
    store = None if call.service.store is None else await call.service.store.opened()
    if store is None:
        raise InvalidRequest("this server does not store responses; start it with --store")
    return cast("Store", store)


async def _decoded(call: Call, body: bytes, kind: type[T]) -> T:
    return await call.decode(body, lambda body, headers: wire.decode_body(body, kind))


def _answer(value: Any) -> ASGIApp:
    return Response(value if isinstance(value, bytes) else msgspec.json.encode(value), media_type=JSON)


async def get_response(call: Call) -> ASGIApp:
    """Answer with a stored or running response, or with its events when the query asks to ``stream``."""
    id, query = call.http.path_params["id"], call.http.query_params
    job, others = call.service.jobs.get(id), call.service.others
    is_streamed = query.get("stream") in ("true", "1")
    if is_streamed:
        start = _after(query) + 1
        events = job.events(start) if job is not None and job.is_streamed else None
        if job is None and others is not None:
            events = await others.job_events(id, start)
        if events is not None:
            return JobStream(events)
    body = job.body() if job is not None else None
    if body is None and others is not None:
        body = await others.job_body(id)
    body = body or _found("Response", id, await (await _store(call)).body(id))
    if is_streamed:
        message = "only a recent response that was created with background and stream can be streamed again"
        raise InvalidRequest(f"{message}; leave stream out", param="stream")
    return _answer(body)


async def delete_response(call: Call) -> ASGIApp:
    """Delete a response, and cancel it when it is running."""
    id = call.http.path_params["id"]
    if (job := call.service.jobs.get(id)) is not None:
        await job.cancel()
        call.service.jobs.drop(id)
    elif call.service.others is not None:
        await call.service.others.drop_job(id)
    if not await (await _store(call)).delete(id):
        raise NotStored("Response", id)
    return _answer({"id": id, "object": "response", "deleted": True})


async def cancel_response(call: Call) -> ASGIApp:
    """Cancel a response that runs in the background. Raises InvalidRequest for one that does not."""
    id = call.http.path_params["id"]
    job = call.service.jobs.get(id)
    if job is not None:
        return _answer(await job.cancel())
    others = call.service.others
    if others is not None and (cancelled := await others.cancel_job(id)) is not None:
        return _answer(cancelled)
    body = _found("Response", id, await (await _store(call)).body(id))
    if not msgspec.json.decode(body, type=_Background).background:
        raise InvalidRequest("Cannot cancel a synchronous response.")
    return _answer(body)


def _after(query: Mapping[str, str]) -> int:
    """Return the number of the last event that the client has; -1 for none."""
    after = query.get("starting_after", "-1")
    if not after.removeprefix("-").isdecimal():
        raise InvalidRequest(
            f"starting_after is {after!r}; send the sequence_number of an event", param="starting_after"
        )
    return max(-1, int(after))


async def list_input_items(call: Call) -> ASGIApp:
    """Answer with a page of a response's input items."""
    id = call.http.path_params["id"]
    items = _found("Response", id, await (await _store(call)).input_items(id))
    return _answer(page(items, call.http.query_params))


async def create_conversation(call: Call) -> ASGIApp:
    """Create a conversation, with the items of the body if there are any."""
    fields = await _decoded(call, await call.body() or b"{}", NewConversation)
    limits.check_metadata(fields.metadata)
    metadata = msgspec.json.encode(fields.metadata or {})
    conversation = StoredConversation(new_id("conv_"), int(time.time()), metadata)
    await (await _store(call)).add_conversation(conversation, _new_items(fields.items or []))
    return _answer(_conversation(conversation))


async def get_conversation(call: Call) -> ASGIApp:
    """Answer with a conversation without its items."""
    return _answer(_conversation(await _conversation_of(call)))


async def update_conversation(call: Call) -> ASGIApp:
    """Replace the metadata of a conversation."""
    conversation = await _conversation_of(call)
    values = (await _decoded(call, await call.body(), Metadata)).metadata
    limits.check_metadata(values)
    metadata = msgspec.json.encode(values)
    await (await _store(call)).set_metadata(conversation.id, metadata)
    return _answer(_conversation(replace(conversation, metadata=metadata)))


async def delete_conversation(call: Call) -> ASGIApp:
    """Delete a conversation."""
    conversation = await _conversation_of(call)
    await (await _store(call)).delete_conversation(conversation.id)
    return _answer({"id": conversation.id, "object": "conversation.deleted", "deleted": True})


async def list_items(call: Call) -> ASGIApp:
    """Answer with a page of a conversation's items."""
    conversation = await _conversation_of(call)
    return _answer(page(await (await _store(call)).items_of(conversation.id), call.http.query_params))


async def create_items(call: Call) -> ASGIApp:
    """Append items to a conversation."""
    conversation = await _conversation_of(call)
    items = _new_items((await _decoded(call, await call.body(), NewItems)).items)
    await (await _store(call)).add_items(conversation.id, items)
    return _answer(_list([client_item(item.json) for item in items], has_more=False))


async def get_item(call: Call) -> ASGIApp:
    """Answer with one item of a conversation."""
    return _answer(await _item_of(call, await _conversation_of(call)))


async def delete_item(call: Call) -> ASGIApp:
    """Remove an item from a conversation."""
    conversation = await _conversation_of(call)
    await _item_of(call, conversation)
    await (await _store(call)).delete_item(conversation.id, call.http.path_params["item"])
    return _answer(_conversation(conversation))


async def _conversation_of(call: Call) -> StoredConversation:
    id = call.http.path_params["id"]
    found = await (await _store(call)).conversation(id)
    if found is None:
        raise NotStored("Conversation", id)
    return found


async def _item_of(call: Call, conversation: StoredConversation) -> bytes:
    wanted = call.http.path_params["item"]
    items = await (await _store(call)).items_of(conversation.id)
    return client_item(_found("Item", wanted, next((item for item in items if _id(item) == wanted), None)))


def _found(kind: str, id: str, value: T | None) -> T:
    if value is None:
        raise NotStored(kind, id)
    return value


def _new_items(items: Sequence[Mapping[str, Any]]) -> list[StoredItem]:
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
    """Return a page of ``items``, which are JSON, oldest first, as a list object.

    Args:
        query: ``limit`` is the length of the page, ``after`` the id of the item before it, ``order`` is ``asc`` for
            oldest first or ``desc`` (default) for newest first.

    Raises InvalidRequest for a wrong value, or the name of an item that does not exist.
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
            raise InvalidRequest(
                f"after is {after!r}, but no item has this id; send the id of an item", param="after"
            )
        ordered = ordered[ids.index(after) + 1 :]
    listed = [client_item(item) for item in ordered[: int(limit)]]
    return _list(listed, has_more=len(listed) < len(ordered))


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
