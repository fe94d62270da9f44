"""The responses of one connection, which it can continue whether they are stored or not.

https://developers.openai.com/api/docs/guides/websocket-mode.
"""

from __future__ import annotations

from dataclasses import replace

from singletree.conversation import Request
from singletree.errors import NotStored, PreviousResponseNotFound
from singletree.lru import LruCache
from singletree.protocols.answer import EncodedResponse
from singletree.protocols.responses.state import References, StoredItems
from singletree.server.answers.stored_responses import KeepResponse
from singletree.server.turn.generation import Generation
from singletree.stored_responses.finished_response import stored_response
from singletree.stored_responses.store import Store

_RECENT = 8
"""How many responses of a connection can be continued although they are not stored."""


class ConnectionResponses:
    """The last responses of one connection, stored or not, each with all items up to its end.

    Args:
        store: what else the server knows; None where it stores no responses.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._items: LruCache[str, list[bytes]] = LruCache(entries=_RECENT)

    async def look_up(self, named: References) -> StoredItems:
        """Return what a request refers to. Raises PreviousResponseNotFound, or NotStored for a conversation."""
        previous = named.previous_response
        history = None if previous is None else self._items.get(previous)
        rest = named if history is None else replace(named, previous_response=None, conversation=None)
        found = StoredItems()
        if self._store is not None:
            found = await self._store.look_up(rest)
        elif rest.previous_response is not None:
            raise PreviousResponseNotFound(rest.previous_response)
        elif rest.conversation is not None:
            raise NotStored("Conversation", rest.conversation)
        if history is not None:
            return replace(found, history=history)
        if previous is not None:
            self._items.put(previous, list(found.history))
        return found

    def keeper(self, request: Request, generation: Generation | None) -> KeepResponse:
        """Return the function that keeps the response to ``request``, and stores it where the client asks for that."""
        state = request.options.stored_state
        store = self._store if state.store or state.conversation_id is not None else None

        def keep(finished: EncodedResponse) -> None:
            response = stored_response(request, finished, generation)
            before = self._items.get(response.previous or "") or []
            new = [item.json for item in (*response.input_items(), *response.output)]
            self._items.put(response.id, [*before, *new])
            if store is not None:
                store.put_soon(response)

        return keep
