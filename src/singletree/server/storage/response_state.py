"""Read requests that continue stored responses, and store responses.

Only the Responses API has them (https://platform.openai.com/docs/guides/conversation-state).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Protocol, TypeVar

import msgspec

from singletree.conversation import Reasoning, Request
from singletree.errors import InvalidRequest, NotStored, PreviousResponseNotFound
from singletree.events import fold
from singletree.lru import LruCache
from singletree.protocols import responses, wire
from singletree.protocols.answer import EncodedItem, EncodedResponse
from singletree.protocols.responses.state import (
    REASONING_FIELD,
    OpenSummary,
    References,
    StoredItems,
    StoredReasoning,
    input_forms,
    item_form,
    no_summaries,
)
from singletree.server.ids import NewId
from singletree.server.storage.response_store import Store, StoredItem, StoredResponse
from singletree.server.turn.generation import Generation

T = TypeVar("T")


class Offload(Protocol):
    """Runs ``work``, which processes ``size`` bytes."""

    async def __call__(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of ``work``."""


KeepResponse = Callable[[EncodedResponse], None]
"""Gets a finished response and stores it."""

_RECENT = 8
"""How many responses of a connection can be continued although they are not stored."""


class ConnectionResponses:
    """The last responses of one connection, stored or not, each with all items up to its end."""

    def __init__(self) -> None:
        self._items: LruCache[str, list[bytes]] = LruCache(entries=_RECENT)

    def history(self, id: str) -> list[bytes] | None:
        return self._items.get(id)

    def remember(self, id: str, items: list[bytes]) -> None:
        self._items.put(id, items)

    def keep(self, response: StoredResponse) -> None:
        before = self.history(response.previous or "") or []
        self.remember(
            response.id, [*before, *(item.json for item in (*response.input_items(), *response.output))]
        )


async def read_request(
    store: Store | None,
    body: bytes,
    recent: ConnectionResponses | None = None,
    *,
    offload: Offload,
    summaries: Callable[[str], OpenSummary] = no_summaries,
) -> Request:
    """Decode a Responses request, with the items of the response or conversation that it continues.

    Args:
        store: None for a server that does not store responses.
        recent: the responses of the request's connection.
        offload: runs long work off the event loop.
        summaries: opens encrypted summaries of compacted conversations.

    Raises:
        InvalidRequest: the body is wrong, or names a response or an item that is not stored.
        NotStored: the conversation does not exist.
    """
    if store is None and recent is None:
        return await offload(len(body), lambda: responses.decode(body, summaries=summaries))
    sent = await offload(len(body), lambda: responses.parse_body(body))
    known = await _look_up(store, recent, sent.references)
    size = len(body) + sum(map(len, known.history))
    request = await offload(
        size, lambda: responses.resolve_request(sent, known, summaries, stores=store is not None)
    )
    state = request.options.stored_state
    if state.background and not state.store:
        raise InvalidRequest(
            "background needs store: true; otherwise the response could not be retrieved", param="background"
        )
    return request


_NOTHING = StoredItems()


async def _look_up(store: Store | None, recent: ConnectionResponses | None, named: References) -> StoredItems:
    if not named:
        return _NOTHING
    history: list[bytes] = []
    if named.previous_response is not None:
        history = await _history(store, recent, named.previous_response)
    elif named.conversation is not None:
        if store is None or await store.conversation(named.conversation) is None:
            raise NotStored("Conversation", named.conversation)
        history = await store.items_of(named.conversation)
    items = {id: item for id in named.items if store and (item := await store.item(id)) is not None}
    return StoredItems(history, items)


async def _history(store: Store | None, recent: ConnectionResponses | None, id: str) -> list[bytes]:
    found = recent.history(id) if recent is not None else None
    if found is None and store is not None:
        found = await store.history(id)
        if found is not None and recent is not None:
            recent.remember(id, found)
    if found is None:
        raise PreviousResponseNotFound(id)
    return found


def response_keeper(
    store: Store | None,
    request: Request,
    recent: ConnectionResponses | None = None,
    generation: Generation | None = None,
) -> KeepResponse | None:
    """Return the function that stores the response to ``request``; None where the response is not stored.

    The whole reasoning of ``generation`` is stored, even where the client gets less of it.
    """
    state = request.options.stored_state
    stores = store is not None and (state.store or state.conversation_id is not None)
    if not stores and recent is None:
        return None

    def keep(finished: EncodedResponse) -> None:
        response = _stored_response(request, finished, generation)
        if recent is not None:
            recent.keep(response)
        if store is not None and stores:
            store.put_soon(response)

    return keep


def _stored_response(
    request: Request, response: EncodedResponse, generation: Generation | None
) -> StoredResponse:
    state = request.options.stored_state
    return StoredResponse(
        response.id,
        int(time.time()),
        response.json,
        input_forms(state.input_items),
        list(_output(response.items, generation)),
        state.previous_response_id,
        state.conversation_id,
    )


def _output(items: Sequence[EncodedItem], generation: Generation | None) -> Iterator[StoredItem]:
    """Yield the items of a response as they are stored: with the parts of the turn that the client did not get.

    These are the text of its reasoning and the capsules of its tokens. The last item has the tokens up to the end of
    the turn.
    """
    recorder = None if generation is None else generation.recorder
    ordinals = count()
    reasoning: list[str] | None = None
    for number, (item, encoded) in enumerate(items, 1):
        kept = StoredReasoning()
        if item["type"] == "reasoning" and generation is not None:
            if reasoning is None:
                turn = (recorder.turn if recorder else None) or fold(generation.events)
                reasoning = [part.text for part in turn.parts if isinstance(part, Reasoning)]
            ordinal = next(ordinals)
            # A capsule may be made only once, so none is made where the client already has it.
            sealed = generation.seal(ordinal) if generation.seal and not item.get("encrypted_content") else ""
            text = reasoning[ordinal] if ordinal < len(reasoning) and not item.get("content") else ""
            kept = StoredReasoning(text, sealed)
        elif number == len(items) and recorder is not None:
            kept = StoredReasoning("", recorder.seal_rest())
        if kept.text or kept.encrypted_content or item["type"] == "reasoning":
            encoded = wire.dump({**item, REASONING_FIELD: msgspec.to_builtins(kept)})
        yield StoredItem(item["id"], encoded)


def as_item(item: Mapping[str, Any], new_id: NewId) -> StoredItem:
    """Return an input item as it is stored, with a new id where it has none."""
    return StoredItem(*item_form(item).encode(new_id))
