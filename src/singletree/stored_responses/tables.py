"""The tables of stored responses and conversations, read and written by one thread.

A response is stored with its own input and output only; earlier items are stored with the responses that it continues.
Where a client sends its whole input with each request, the start that was stored with an earlier response is shared.
So storing a turn costs only the turn's own length.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from singletree.lru import LruCache
from singletree.owners import owned_id
from singletree.protocols.responses.state import InputForms
from singletree.server.ids import new_id, numbered_ids
from singletree.stored_responses.database import Database

KEPT_SECONDS = 30 * 24 * 3600
"""How long a response is kept: 30 days, as on the native API."""
_LONGEST_CHAIN = 10_000
_ROWS_AT_ONCE = 64
"""How many rows one statement adds at most. Databases limit the number of values, SQLite before 3.32 to 999."""
_KNOWN_INPUTS = 4096
"""How many of the last inputs can be shared by the next responses; each takes about 400 bytes of memory."""
_LONGEST_INPUT_CHAIN = 1000
"""Of how many stretches an input consists at most; a longer one is written anew."""

_CHAIN = """
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 0 FROM responses WHERE id = ?
    UNION ALL
    SELECT r.id, r.previous, depth + 1 FROM responses r JOIN chain ON r.id = chain.previous WHERE depth < ?
)
"""
_CHAIN_ITEMS = (
    _CHAIN.rstrip()
    + """, parts (owner, next, depth, level) AS (
    SELECT chain.id, input, depth, 0 FROM chain LEFT JOIN response_inputs ON response = chain.id
    UNION ALL
    SELECT inputs.id, inputs.previous, depth, level + 1 FROM inputs JOIN parts ON inputs.id = parts.next
)
SELECT item FROM parts JOIN items ON items.response = parts.owner WHERE NOT (is_output = 1 AND response = ?)
ORDER BY depth DESC, is_output, level DESC, at
"""
)


_ITEMS = "items (id, response, conversation, is_output, item)"

_NO_INPUT = InputForms()


class StoredItem(NamedTuple):
    """An item with its id, as JSON."""

    id: str
    json: bytes


class StoredResponse(NamedTuple):
    """One response with the items that it added.

    Attributes:
        created: unix time in seconds.
        body: the response object, as JSON.
        input: its own input items, without those of earlier responses.
        output: the output items of ``body``.
        previous, conversation: ids of the response and the conversation that it continues, if any.
        owner: whose response it is; ``id``, ``previous`` and ``conversation`` have it already (``owned_id``).
    """

    id: str
    created: int
    body: bytes
    input: InputForms = _NO_INPUT
    output: Sequence[StoredItem] = ()
    previous: str | None = None
    conversation: str | None = None
    owner: str = ""

    def input_items(self, start: int = 0) -> list[StoredItem]:
        """Return the input items from ``start`` on, each with an id: its own, or a new one."""
        item_ids = numbered_ids(new_id)
        return [StoredItem(*form.encode(item_ids)) for form in self.input.forms[start:]]


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation without its items. ``created`` is unix time in seconds, ``metadata`` is JSON."""

    id: str
    created: int
    metadata: bytes


class _Input(NamedTuple):
    """A stored input: the id of its last stretch, and of how many stretches it consists."""

    id: str
    stretches: int


@dataclass(slots=True)
class _Rows:
    """The rows to add for responses that are stored together, by table.

    Attributes:
        inputs: id and previous one of each new stretch.
        uses: the uses to count, by input: all of a new one, those after the first of one that was stored before.
    """

    responses: list[Sequence[Any]] = field(default_factory=list)
    inputs: list[Sequence[Any]] = field(default_factory=list)
    response_inputs: list[Sequence[Any]] = field(default_factory=list)
    items: list[Sequence[Any]] = field(default_factory=list)
    uses: dict[str, int] = field(default_factory=dict)


class Tables:
    """The tables in ``database``. Every method blocks, and raises DatabaseUnavailable.

    Args:
        limit: size in bytes above which the oldest responses are deleted.
    """

    def __init__(self, database: Database, limit: int) -> None:
        self._database = database
        self._limit = limit
        self._unmeasured = 0
        self._inputs: LruCache[bytes, _Input] = LruCache(entries=_KNOWN_INPUTS)

    def open(self) -> None:
        self._database.open()

    def close(self) -> None:
        self._database.close()

    def put(self, responses: Sequence[StoredResponse]) -> None:
        """Store ``responses``, then delete what is too old or too much."""
        rows, group = _Rows(), {response.id: response for response in responses}
        with self._database.transaction():
            # Inputs are found before a response is replaced, which may be all that refers to its input.
            for response in group.values():
                self._collect(response, rows)
            known = f"SELECT id FROM responses WHERE id IN ({', '.join('?' * len(group))})"
            for (id,) in self._fetch_all(known, list(group)):
                self._forget(id)
            self._insert("responses", rows.responses)
            self._insert("response_inputs", rows.response_inputs)
            self._insert("inputs", [(id, previous, rows.uses.pop(id)) for id, previous in rows.inputs])
            for id, uses in rows.uses.items():
                if uses:
                    self._database.execute("UPDATE inputs SET uses = uses + ? WHERE id = ?", (uses, id))
            self._insert(_ITEMS, rows.items)
        self._evict(responses[-1].id, len(responses))

    def body(self, id: str) -> bytes | None:
        found = self._fetch_one("SELECT body FROM responses WHERE id = ?", (id,))
        return None if found is None else bytes(found[0])

    def item(self, id: str) -> bytes | None:
        """Return the newest item ``id`` of any response or conversation."""
        found = self._fetch_one("SELECT item FROM items WHERE id = ? ORDER BY at DESC LIMIT 1", (id,))
        return None if found is None else bytes(found[0])

    def add_conversation(self, conversation: StoredConversation) -> None:
        row = (conversation.id, conversation.created, conversation.metadata)
        self._database.execute("INSERT INTO conversations VALUES (?, ?, ?)", row)

    def conversation(self, id: str) -> StoredConversation | None:
        row = self._fetch_one("SELECT id, created, metadata FROM conversations WHERE id = ?", (id,))
        return None if row is None else StoredConversation(*row)

    def set_metadata(self, id: str, metadata: bytes) -> None:
        self._database.execute("UPDATE conversations SET metadata = ? WHERE id = ?", (metadata, id))

    def items_of(self, conversation: str) -> list[bytes]:
        query = "SELECT item FROM items WHERE conversation = ? ORDER BY at"
        return [bytes(item) for (item,) in self._fetch_all(query, (conversation,))]

    def delete_item(self, conversation: str, id: str) -> None:
        self._detach_items("conversation = ? AND id = ?", (conversation, id))

    def _fetch_one(self, query: str, values: Sequence[Any]) -> tuple[Any, ...] | None:
        return next(iter(self._database.fetch(query, values)), None)

    def _fetch_all(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        return self._database.fetch(query, values)

    def _collect(self, response: StoredResponse, rows: _Rows) -> None:
        id, conversation = response.id, response.conversation
        rows.responses.append((id, response.created, response.previous, conversation, response.body))
        if conversation is None and response.input.forms:
            rows.response_inputs.append((id, self._shared_input(response, rows)))
        else:
            rows.items += _item_rows(id, conversation, response.input_items(), False, response.owner)
        rows.items += _item_rows(id, conversation, response.output, True, response.owner)

    def _shared_input(self, response: StoredResponse, rows: _Rows) -> str:
        """Add rows for what is new of the response's input, and return the id of its last stretch, with a use more."""
        inputs = self._inputs.part(response.owner)
        count, known = _known_input(inputs, response.input.digests)
        if known is not None and not self._use(known.id, rows):
            count, known = 0, None  # It has been deleted, perhaps by another process.
        if known is not None and count == len(response.input.digests):
            return known.id
        stretch = _Input(new_id("in_"), 1 if known is None else known.stretches + 1)
        rows.inputs.append((stretch.id, known and known.id))
        rows.uses[stretch.id] = 1
        rows.items += _item_rows(stretch.id, None, response.input_items(count), False, response.owner)
        # After a rollback, no such row is found, and the input is written anew.
        inputs.put(response.input.digests[-1], stretch)
        return stretch.id

    def _use(self, input: str, rows: _Rows) -> bool:
        if input in rows.uses:
            rows.uses[input] += 1
            return True
        is_stored = self._database.execute("UPDATE inputs SET uses = uses + 1 WHERE id = ?", (input,)) > 0
        if is_stored:
            rows.uses[input] = 0
        return is_stored

    def add_items(self, conversation: str, items: Sequence[StoredItem]) -> None:
        with self._database.transaction():
            self._insert(_ITEMS, _item_rows(None, conversation, items, False))

    def _insert(self, into: str, rows: Sequence[Sequence[Any]]) -> None:
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[start : start + _ROWS_AT_ONCE]
            marks = f"({', '.join('?' * len(some[0]))})"
            values = [value for row in some for value in row]
            self._database.execute(f"INSERT INTO {into} VALUES {', '.join([marks] * len(some))}", values)

    def history(self, id: str, *, without_output_of: str = "") -> list[bytes] | None:
        """Return all items up to the end of the response ``id``; None when it or an earlier one is not stored."""
        values = (id, _LONGEST_CHAIN)
        first = self._fetch_one(_CHAIN + "SELECT previous FROM chain ORDER BY depth DESC LIMIT 1", values)
        if first is None or first[0] is not None:
            return None
        return [bytes(item) for (item,) in self._fetch_all(_CHAIN_ITEMS, (*values, without_output_of))]

    def input_items(self, id: str) -> list[bytes] | None:
        found = self._fetch_one("SELECT conversation FROM responses WHERE id = ?", (id,))
        if found is None or found[0] is None:
            return self.history(id, without_output_of=id)
        query = (
            "SELECT item FROM items WHERE conversation = ? AND at <="
            " (SELECT max(at) FROM items WHERE response = ? AND is_output = 0) ORDER BY at"
        )
        return [bytes(item) for (item,) in self._fetch_all(query, (found[0], id))]

    def delete(self, id: str) -> bool:
        with self._database.transaction():
            return self._forget(id)

    def _forget(self, id: str) -> bool:
        gone = self._database.execute("DELETE FROM responses WHERE id = ?", (id,)) > 0
        if gone:
            self._database.execute("DELETE FROM items WHERE response = ? AND conversation IS NULL", (id,))
            input = self._fetch_one("SELECT input FROM response_inputs WHERE response = ?", (id,))
            if input is not None:
                self._database.execute("DELETE FROM response_inputs WHERE response = ?", (id,))
                self._release_input(input[0])
        return gone

    def _release_input(self, id: str | None) -> None:
        """Take a use from an input, and delete the stretches that nothing refers to any more."""
        while id is not None:
            self._database.execute("UPDATE inputs SET uses = uses - 1 WHERE id = ?", (id,))
            unused = self._fetch_one("SELECT previous FROM inputs WHERE id = ? AND uses = 0", (id,))
            if unused is None:
                return
            self._database.execute("DELETE FROM inputs WHERE id = ?", (id,))
            self._database.execute("DELETE FROM items WHERE response = ?", (id,))
            (id,) = unused

    def delete_conversation(self, id: str) -> None:
        """Delete a conversation. Its items stay with the responses that made them, as on the native API."""
        self._detach_items("conversation = ?", (id,))
        self._database.execute("DELETE FROM conversations WHERE id = ?", (id,))

    def _detach_items(self, which: str, values: Sequence[Any]) -> None:
        """Remove items from their conversation, and delete those that belong to no response either."""
        with self._database.transaction():
            orphans = f"{which} AND (response IS NULL OR response NOT IN (SELECT id FROM responses))"
            self._database.execute(f"DELETE FROM items WHERE {orphans}", values)
            self._database.execute(f"UPDATE items SET conversation = NULL WHERE {which}", values)

    def _evict(self, newest: str, added: int) -> None:
        """Delete expired responses, then the oldest until the size fits, but never ``newest``. ``added`` were added."""
        old = "SELECT id FROM responses WHERE created < ?"
        for (id,) in self._fetch_all(old, (int(time.time()) - KEPT_SECONDS,)):
            self.delete(id)
        self._unmeasured += added
        if self._unmeasured < self._database.measured_every:
            return
        self._unmeasured = 0
        while self._database.used() > self._limit:
            query = "SELECT id FROM responses WHERE id <> ? ORDER BY created, id LIMIT ?"
            oldest = self._fetch_all(query, (newest, self._database.measured_every))
            for (id,) in oldest:
                self.delete(id)
            if not oldest and not self._evict_conversation(newest):
                return

    def _evict_conversation(self, newest: str) -> bool:
        query = (
            "SELECT id FROM conversations"
            " WHERE id <> coalesce((SELECT conversation FROM responses WHERE id = ?), '')"
            " ORDER BY created, id LIMIT 1"
        )
        oldest = self._fetch_one(query, (newest,))
        if oldest is not None:
            self.delete_conversation(oldest[0])
        return oldest is not None


def _known_input(inputs: LruCache[bytes, _Input], digests: Sequence[bytes]) -> tuple[int, _Input | None]:
    """Return how many of an input's items a stored input has in the same order, and that input."""
    for count in range(len(digests), 0, -1):
        found = inputs.peek(digests[count - 1])
        if found is not None and (found.stretches < _LONGEST_INPUT_CHAIN or count == len(digests)):
            return count, found
    return 0, None


def _item_rows(
    response: str | None,
    conversation: str | None,
    items: Iterable[StoredItem],
    is_output: bool,
    owner: str = "",
) -> list[Sequence[Any]]:
    return [(owned_id(owner, item.id), response, conversation, int(is_output), item.json) for item in items]
