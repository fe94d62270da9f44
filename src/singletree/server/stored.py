"""Requests that go on from stored responses, and responses that are stored.

Only the Responses API has them (https://platform.openai.com/docs/guides/conversation-state).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct

from singletree.conversation import Request
from singletree.errors import InvalidRequest, NotStored, PreviousResponseNotFound
from singletree.protocols import responses
from singletree.protocols.responses_compaction import OpenSummary, unopened_by
from singletree.protocols.responses_state import Known, References, refers_to, response_of, with_id
from singletree.server.identity import NewId
from singletree.server.store import Item, Store, StoredResponse

Keep = Callable[[bytes], None]
"""Takes the end of an answer: its body, or the last events of its stream."""


_RECENT = 8
"""How many responses of a connection can be gone on from though they are not stored."""


class _Output(Struct):
    id: str = ""


class _Response(Struct):
    id: str
    output: list[Raw] = []


class Recent:
    """The last responses of one connection, stored or not, by their items and all before them."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, list[bytes]] = OrderedDict()

    def history(self, id: str) -> list[bytes] | None:
        """All items up to the end of the response ``id``."""
        return self._items.get(id)

    def know(self, id: str, items: list[bytes]) -> None:
        """``items`` are those up to the end of ``id``."""
        self._items[id] = items
        while len(self._items) > _RECENT:
            self._items.popitem(last=False)

    def keep(self, response: StoredResponse) -> None:
        """One more."""
        before = self.history(response.previous or "") or []
        self.know(response.id, [*before, *(item.json for item in (*response.input, *response.output))])


async def read(
    store: Store | None,
    body: bytes,
    headers: Mapping[str, str],
    recent: Recent | None = None,
    *,
    summaries: Callable[[str], OpenSummary] = unopened_by,
) -> Request:
    """``body`` with what it goes on from.

    Raises:
        InvalidRequest: it cannot be read, or names what is not stored.
        NotStored: there is no such conversation.
    """
    if store is None and recent is None:
        return responses.decode(body, headers, summaries=summaries)
    known = await _look_up(store, recent, refers_to(body))
    request = responses.decode(body, headers, known=known, stores=store is not None, summaries=summaries)
    if request.extra["background"] and not request.extra["store"]:
        raise InvalidRequest(
            "background needs store: true, or nobody could ask for the response", param="background"
        )
    return request


async def _look_up(store: Store | None, recent: Recent | None, named: References) -> Known:
    history: list[bytes] = []
    if named.previous_response is not None:
        history = await _history(store, recent, named.previous_response)
    elif named.conversation is not None:
        if store is None or await store.conversation(named.conversation) is None:
            raise NotStored("Conversation", named.conversation)
        history = await store.items_of(named.conversation)
    items = {id: item for id in named.items if store and (item := await store.item(id)) is not None}
    return Known(_values(history), {id: msgspec.json.decode(item) for id, item in items.items()})


async def _history(store: Store | None, recent: Recent | None, id: str) -> list[bytes]:
    found = recent.history(id) if recent is not None else None
    if found is None and store is not None:
        found = await store.history(id)
        if found is not None and recent is not None:
            recent.know(id, found)
    if found is None:
        raise PreviousResponseNotFound(id)
    return found


def _values(items: list[bytes]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = msgspec.json.decode(b"[" + b",".join(items) + b"]")
    return found


def keeper(store: Store | None, request: Request, new_id: NewId, recent: Recent | None = None) -> Keep | None:
    """What stores the response to ``request``; None where it is not to be kept."""
    wanted = store is not None and bool(request.extra.get("store") or request.extra.get("conversation"))
    if not wanted and recent is None:
        return None
    items = [as_item(item, new_id) for item in request.extra["input"]]

    def keep(end: bytes) -> None:
        response = _made(request, items, response_of(end))
        if recent is not None:
            recent.keep(response)
        if store is not None and wanted:
            store.put_soon(response)

    return keep


def _made(request: Request, input: list[Item], body: bytes) -> StoredResponse:
    said, extra = msgspec.json.decode(body, type=_Response), request.extra
    output = [Item(msgspec.json.decode(raw, type=_Output).id, bytes(raw)) for raw in said.output]
    previous, conversation = extra.get("previous_response_id"), extra.get("conversation")
    return StoredResponse(said.id, int(time.time()), body, input, output, previous, conversation)


def as_item(item: Mapping[str, Any], new_id: NewId) -> Item:
    """An input item as it is stored: under an id."""
    named = with_id(item, new_id)
    return Item(named["id"], msgspec.json.encode(named))
