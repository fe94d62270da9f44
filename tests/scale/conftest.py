"""What the tests with many processes share: the harnesses, and real databases, one of each for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clients.conftest import installed, tokens, workspace
from scale import databases
from scale.databases import Database

__all__ = ["installed", "postgres", "redis", "tokens", "workspace"]


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A Redis server."""
    pytest.importorskip("redis", reason="the package redis is not installed: pip install 'singletree[redis]'")
    with databases.redis(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture(scope="session")
def postgres() -> Iterator[Database]:
    """A PostgreSQL server."""
    pytest.importorskip(
        "psycopg", reason="the package psycopg is not installed: pip install 'singletree[postgres]'"
    )
    with databases.postgres() as started:
        yield started
