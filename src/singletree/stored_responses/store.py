"""Store responses and conversations, for ``previous_response_id``, ``conversation`` and references to items.

One thread does all work in order, so later reads find what was put earlier, and no request waits for the disk.
Responses that end within 50 milliseconds are written together: most of the cost of a response alone is that of its
transaction, and of waking the thread.

All owners have one database. The ids of an owner's responses, conversations and items begin with the owner there
(``owned_id``), so no query for one owner can find what belongs to another, and an id of another owner is one that does
not exist. What was stored without an owner has plain ids.

A connection can continue its own responses whether they are stored or not
(https://developers.openai.com/api/docs/guides/websocket-mode).
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from singletree.conversation import Reasoning, Request
from singletree.engines.checkpoint import cache_folder
from singletree.errors import (
    BadConfiguration,
    NotStored,
    Overloaded,
    PreviousResponseNotFound,
    without_passwords,
)
from singletree.events import fold
from singletree.lru import LruCache
from singletree.owners import owned_id
from singletree.protocols import wire
from singletree.protocols.answer import EncodedItem, EncodedResponse
from singletree.protocols.responses.state import REASONING_FIELD, StoredReasoning, input_forms, item_form
from singletree.request_options import References, StoredItems
from singletree.server.answers.observer import KeepResponse
from singletree.server.ids import NewId
from singletree.server.settings.config import Config
from singletree.server.sparse_log import OncePerMinute
from singletree.server.turn.generation import Generation
from singletree.stored_responses.database import Database, DatabaseUnavailable, SqliteDatabase
from singletree.stored_responses.tables import StoredConversation, StoredItem, StoredResponse, Tables


def stored_response(
    request: Request, response: EncodedResponse, generation: Generation | None
) -> StoredResponse:
    """Return what is stored of ``response``: the whole reasoning, even where the client gets less of it."""
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


LOG = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_SETTLE_SECONDS = 1.0
_GROUP_SECONDS = 0.05
"""How long a response waits for others that are written with it, if nobody asks for what is stored. A process that is
killed loses the responses of this time; the operating system may lose those of seconds (``synchronous = NORMAL``)."""
_LARGEST_GROUP = 128


class _StoreThread:
    """The thread that does all work on ``tables``, and the responses that wait for it."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._thread = ThreadPoolExecutor(1, "store")
        self._waiting: deque[StoredResponse] = deque()
        # Runs out when the responses that wait have to be written; None where the thread knows of all of them.
        self._timer: asyncio.TimerHandle | None = None
        self._last: Future[None] | None = None
        self._failures = OncePerMinute()

    def open(self) -> None:
        self._thread.submit(self._tables.open).result()

    def put_soon(self, response: StoredResponse) -> None:
        self._waiting.append(response)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_GROUP_SECONDS, self._write_waiting)

    @property
    def is_settled(self) -> bool:
        return self._timer is None and (self._last is None or self._last.done())

    async def settled(self) -> None:
        self._write_waiting()
        if self._last is not None and not self._last.done():
            last = asyncio.wrap_future(self._last)
            last.add_done_callback(lambda done: done.cancelled() or done.exception())  # it is logged already
            await asyncio.wait({last}, timeout=_SETTLE_SECONDS)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._write_waiting()
        try:
            return await asyncio.wrap_future(self._thread.submit(work, *args, **kwargs))
        except DatabaseUnavailable as error:
            if (more := self._failures.take()) is not None:
                LOG.warning("the store of responses cannot be used: %s%s", error, more)
            raise Overloaded("the store of responses cannot be used now; try again in a moment") from None

    def close(self) -> None:
        self._write_waiting()
        self._thread.submit(self._tables.close)
        self._thread.shutdown(wait=True)

    def _write_waiting(self) -> None:
        """Let the thread write the responses that wait, before all work that it gets later."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._last = self._thread.submit(self._put_waiting)
            self._last.add_done_callback(self._log_failure)

    def _put_waiting(self) -> None:
        # More may have come while the thread was busy.
        while self._waiting:
            self._tables.put(
                [self._waiting.popleft() for _ in range(min(len(self._waiting), _LARGEST_GROUP))]
            )

    def _log_failure(self, done: Future[None]) -> None:
        if (error := done.exception()) and (more := self._failures.take()) is not None:
            LOG.error(
                "responses could not be stored: %s; they cannot be continued by their ids%s", error, more
            )


class Store:
    """A store of responses and conversations. Several processes may have stores on one database.

    Args:
        database: the database, or the path of an SQLite file; None to store in memory.
        limit: size in bytes above which the oldest responses are deleted.

    Raises:
        Overloaded: from any awaited method, when the database cannot be used.
    """

    def __init__(self, database: Database | Path | None, limit: int) -> None:
        if database is None or isinstance(database, Path):
            database = SqliteDatabase(database)
        self._tables = Tables(database, limit)
        self._thread = _StoreThread(self._tables)
        self._owner = ""

    def open(self) -> None:
        """Open the database, and wait for it. Raises DatabaseUnavailable."""
        self._thread.open()

    async def opened(self) -> Store:
        return self

    def of(self, owner: str) -> Store:
        part = copy.copy(self)
        part._owner = owner
        return part

    async def look_up(self, named: References) -> StoredItems:
        history: list[bytes] = []
        if named.previous_response is not None:
            found = await self.history(named.previous_response)
            if found is None:
                raise PreviousResponseNotFound(named.previous_response)
            history = found
        elif named.conversation is not None:
            if await self.conversation(named.conversation) is None:
                raise NotStored("Conversation", named.conversation)
            history = await self.items_of(named.conversation)
        items = {id: item for id in named.items if (item := await self.item(id)) is not None}
        return StoredItems(history, items)

    def keeper(self, request: Request, generation: Generation | None) -> KeepResponse:
        return lambda finished: self.put_soon(stored_response(request, finished, generation))

    async def put(self, response: StoredResponse) -> None:
        await self._thread.run(self._tables.put, [self._owned(response)])

    def put_soon(self, response: StoredResponse) -> None:
        """Store ``response`` without waiting; a failure is logged. Needs a running event loop."""
        self._thread.put_soon(self._owned(response))

    @property
    def is_settled(self) -> bool:
        """Whether other processes can find what was put, or it could not be stored."""
        return self._thread.is_settled

    async def settled(self) -> None:
        """Wait until ``is_settled``, for a second at most."""
        await self._thread.settled()

    async def body(self, id: str) -> bytes | None:
        return await self._thread.run(self._tables.body, self._own(id))

    async def history(self, id: str) -> list[bytes] | None:
        """Return all items up to the end of the response ``id``; None when it or an earlier one is not stored."""
        return await self._thread.run(self._tables.history, self._own(id))

    async def input_items(self, id: str) -> list[bytes] | None:
        return await self._thread.run(self._tables.input_items, self._own(id))

    async def item(self, id: str) -> bytes | None:
        """Return the newest item ``id`` of any response or conversation."""
        return await self._thread.run(self._tables.item, self._own(id))

    async def delete(self, id: str) -> bool:
        return await self._thread.run(self._tables.delete, self._own(id))

    async def add_conversation(self, conversation: StoredConversation, items: Sequence[StoredItem]) -> None:
        owned = replace(conversation, id=self._own(conversation.id))
        await self._thread.run(self._tables.add_conversation, owned)
        await self.add_items(conversation.id, items)

    async def conversation(self, id: str) -> StoredConversation | None:
        found = await self._thread.run(self._tables.conversation, self._own(id))
        return None if found is None else replace(found, id=id)

    async def set_metadata(self, id: str, metadata: bytes) -> None:
        await self._thread.run(self._tables.set_metadata, self._own(id), metadata)

    async def delete_conversation(self, id: str) -> None:
        """Delete a conversation. Its items stay with the responses that made them, as on the native API."""
        await self._thread.run(self._tables.delete_conversation, self._own(id))

    async def add_items(self, conversation: str, items: Sequence[StoredItem]) -> None:
        owned = [item._replace(id=self._own(item.id)) for item in items]
        await self._thread.run(self._tables.add_items, self._own(conversation), owned)

    async def items_of(self, conversation: str) -> list[bytes]:
        return await self._thread.run(self._tables.items_of, self._own(conversation))

    async def delete_item(self, conversation: str, id: str) -> None:
        await self._thread.run(self._tables.delete_item, self._own(conversation), self._own(id))

    def close(self) -> None:
        """Finish all pending work and close the file, for all owners."""
        self._thread.close()

    def _own(self, id: str) -> str:
        return owned_id(self._owner, id)

    def _owned(self, response: StoredResponse) -> StoredResponse:
        if not self._owner:
            return response
        previous, conversation = response.previous, response.conversation
        return response._replace(
            id=self._own(response.id),
            previous=None if previous is None else self._own(previous),
            conversation=None if conversation is None else self._own(conversation),
            owner=self._owner,
        )


def open_store(config: Config) -> Store | None:
    """Return the store of responses that ``config`` names; None, with a warning, where its default cannot be used.

    Raises BadConfiguration where what ``--store-path`` or ``--store-url`` names cannot be used.
    """
    path = config.store_path or cache_folder() / "responses.sqlite"
    if config.store_url is None:
        store, cure = Store(path, config.store_limit), "give a file that can be written with --store-path"
    else:
        from singletree.stored_responses.database import PostgresDatabase

        store = Store(PostgresDatabase(config.store_url), config.store_limit)
        cure = "start the database, or correct the URL"
    try:
        store.open()
    except DatabaseUnavailable as error:
        store.close()
        reason = without_passwords(" ".join(str(error).split()))
        if config.store_url is not None:
            place = f"--store-url {without_passwords(config.store_url)}"
        elif config.store_path is not None:
            place = f"--store-path {path}"
        else:
            LOG.warning("responses are not stored: %s: %s; %s, or set --no-store", path, reason, cure)
            return None
        raise BadConfiguration(f"{place}: {reason}; {cure}, or leave responses out with --no-store") from None
    return store


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
