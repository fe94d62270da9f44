"""The databases of the store of responses: what a store needs of one, SQLite, and PostgreSQL (``--store-url``)."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from singletree.errors import BadConfiguration, without_passwords
from singletree.private_files import FOLDER_MODE, create_private

if TYPE_CHECKING:
    from psycopg import Connection


SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, created {number} NOT NULL, previous TEXT, conversation TEXT, body {bytes} NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_created ON responses (created);
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, created {number} NOT NULL, metadata {bytes} NOT NULL
){keyed};
CREATE TABLE IF NOT EXISTS items (
    at {ascending}, id TEXT NOT NULL, response TEXT, conversation TEXT,
    is_output {number} NOT NULL, item {bytes} NOT NULL
);
CREATE TABLE IF NOT EXISTS inputs (
    id TEXT PRIMARY KEY, previous TEXT, uses {number} NOT NULL
){keyed};
CREATE TABLE IF NOT EXISTS response_inputs (
    response TEXT PRIMARY KEY, input TEXT NOT NULL
){keyed};
CREATE INDEX IF NOT EXISTS items_id ON items (id);
CREATE INDEX IF NOT EXISTS items_response ON items (response);
CREATE INDEX IF NOT EXISTS items_conversation ON items (conversation) WHERE conversation IS NOT NULL;
"""
"""The tables. The names of types, and what a table with a key of its own is, are those of a database.

A row of ``inputs`` is a stretch of input items, behind those of ``previous``. Responses whose input starts alike share
it, so ``uses`` counts the responses and stretches that refer to it. ``items.response`` is the id of a response for its
output and for items in a conversation, else that of a stretch. Earlier versions stored the input of each response under
the id of the response; these rows are read in the same way.

Rows are added at the end of a table, and ids grow (``new_id``), so that those of responses that are stored together are
on the same pages. Responses have no key of their own in the table: in the tree of a key, each body would take a page to
itself. The tables and indexes of earlier versions keep their form.
"""

_SQLITE_TYPES = {
    "number": "INTEGER",
    "bytes": "BLOB",
    "keyed": " WITHOUT ROWID",
    "ascending": "INTEGER PRIMARY KEY",
}


class DatabaseUnavailable(Exception):
    """A database did not answer, or not in time."""


class Database(Protocol):
    """A database with the tables of ``SCHEMA``. One thread uses it. Statements have ``?`` for their values.

    Attributes:
        measured_every: after how many additions its size is worth measuring.
    """

    measured_every: int

    def open(self) -> None:
        """Make sure that rows can be read and written. Raises DatabaseUnavailable."""

    def execute(self, query: str, values: Sequence[Any] = ()) -> int:
        """Change rows, and return how many. Raises DatabaseUnavailable."""

    def fetch(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows that a query finds. Raises DatabaseUnavailable."""

    def transaction(self) -> AbstractContextManager[None]:
        """Return a context whose changes are made together, or not at all if it raises."""

    def used(self) -> int:
        """Return the size of what is stored, in bytes."""

    def close(self) -> None: ...


def storable(value: Any) -> Any:
    """Return ``value`` without characters that a database refuses: a client may send any id, and this server makes no
    id with such characters.
    """
    if not isinstance(value, str) or (value.isascii() and "\0" not in value):
        return value
    return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise DatabaseUnavailable(str(error)) from None
    except FileExistsError:
        raise DatabaseUnavailable("a folder of its path is a file") from None
    except OSError as error:
        raise DatabaseUnavailable(error.strerror or str(error)) from None


class SqliteDatabase:
    """An SQLite file, for the processes of one machine. It is opened by its first use.

    Args:
        path: the file; None to store in memory.
    """

    measured_every = 1

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._opened: sqlite3.Connection | None = None

    def open(self) -> None:
        with _reported():
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.rollback()

    def execute(self, query: str, values: Sequence[Any] = ()) -> int:
        with _reported():
            return self._connection.execute(query, [storable(value) for value in values]).rowcount

    def fetch(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with _reported():
            return self._connection.execute(query, [storable(value) for value in values]).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with _reported():
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:
                yield

    def used(self) -> int:
        query = (
            "SELECT (page_count - freelist_count) * page_size"
            " FROM pragma_page_count(), pragma_freelist_count(), pragma_page_size()"
        )
        return int(self.fetch(query)[0][0])

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._opened is None:
            if self._path is not None:
                self._path.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
                create_private(self._path)
            # Each statement is a transaction, unless one is begun by hand.
            database = sqlite3.connect(self._path or ":memory:", timeout=30, isolation_level=None)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(SCHEMA.format_map(_SQLITE_TYPES))
            self._opened = database
        return self._opened


_POSTGRES_TYPES = {
    "number": "BIGINT",
    "bytes": "BYTEA",
    "keyed": "",
    "ascending": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
}

_CONNECT_SECONDS = 3
_STATEMENT_MILLISECONDS = 5000
"""How long the connection, and one statement, may take."""

_PAUSE_SECONDS = 5.0
"""How long the database is left alone after a failure: work for it must not pile up."""

_SCHEMA_LOCK = 0x73696E676C65
"""An advisory lock. Without it, servers that start together create the tables at the same time, and all but one fail.
"""


class PostgresDatabase:
    """Tables in the schema ``singletree`` of a PostgreSQL database. The connection is opened by its first use.

    Args:
        url: ``postgresql://user:password@host/database``, or another connection string of libpq.

    Raises:
        BadConfiguration: the URL is invalid, or the package ``psycopg`` is not installed.
    """

    measured_every = 64

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError:
            raise BadConfiguration(
                "--store-url needs the package psycopg: pip install 'singletree[postgres]'"
            ) from None
        try:
            psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError as error:
            raise BadConfiguration(
                f"--store-url: {without_passwords(str(error).strip())}; give one such as postgresql://user@127.0.0.1/singletree"
            ) from None
        self._url = url
        self._connect, self._lost, self._error = psycopg.connect, psycopg.OperationalError, psycopg.Error
        self._opened: Connection[tuple[Any, ...]] | None = None
        self._in_transaction = False
        self._down_until = float("-inf")

    def open(self) -> None:
        self._run("SELECT 1", ())

    def execute(self, query: str, values: Sequence[Any] = ()) -> int:
        return int(self._run(query, values).rowcount)

    def fetch(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return list(self._run(query, values).fetchall())

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._run("SELECT 1", ())  # Connects again, if the server has closed the connection.
        with self._reported(), self._connection.transaction():
            self._in_transaction = True
            try:
                yield
            finally:
                self._in_transaction = False

    def used(self) -> int:
        """Return the size of the stored items and responses in bytes, without indexes and deleted rows."""
        parts = ("octet_length(body) FROM responses", "octet_length(item) FROM items")
        return sum(
            int(self.fetch(f"SELECT coalesce(sum(n), 0) FROM (SELECT {p}) AS s(n)")[0][0]) for p in parts
        )

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @property
    def _connection(self) -> Connection[tuple[Any, ...]]:
        if self._opened is None or self._opened.closed:
            if time.monotonic() < self._down_until:
                raise DatabaseUnavailable("it did not answer a moment ago")
            opened = self._connect(
                self._url,
                autocommit=True,
                connect_timeout=_CONNECT_SECONDS,
                options=f"-c statement_timeout={_STATEMENT_MILLISECONDS} -c search_path=singletree",
            )
            with opened.transaction():
                opened.execute("SELECT pg_advisory_xact_lock(%s)", (_SCHEMA_LOCK,))
                opened.execute("CREATE SCHEMA IF NOT EXISTS singletree")
                for statement in SCHEMA.format_map(_POSTGRES_TYPES).split(";\n"):
                    if statement.strip():
                        opened.execute(statement)
            self._opened = opened
        return self._opened

    def _run(self, query: str, values: Sequence[Any]) -> Any:
        statement, given = query.replace("?", "%s"), [storable(value) for value in values]
        reused = self._opened is not None
        with self._reported():
            try:
                return self._connection.execute(statement, given)
            except self._lost:
                # A server that was started again has closed the connections; inside a transaction nothing is repeated.
                if not reused or self._opened is None or not self._opened.closed or self._in_transaction:
                    raise
                return self._connection.execute(statement, given)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            if isinstance(error, self._lost):
                self._down_until = time.monotonic() + _PAUSE_SECONDS
                with suppress(self._error):
                    self.close()
            raise DatabaseUnavailable(str(error).strip()) from None
