"""PostgreSQL as the database of the store of responses, for the servers of many machines (``--store-url``)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from singletree.errors import BadConfiguration, without_passwords
from singletree.stored_responses.database import SCHEMA, DatabaseUnavailable, storable

if TYPE_CHECKING:
    from psycopg import Connection

LOG = logging.getLogger(__name__)

T = TypeVar("T")

_TYPES = {
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
                for statement in SCHEMA.format_map(_TYPES).split(";\n"):
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
