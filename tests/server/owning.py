"""A server with three keys: two tenants and the operator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.settings.config import Config
from singletree.stored_responses.store import Store
from singletree.testing.scripts import Script

from .carrying import LAYOUT
from .memory import Client
from .serving import Served, serving

KEYS = ("key of a", "key of b")
ADMIN = "key of the operator"


class Tenants(NamedTuple):
    """A running server, and clients with the keys of two tenants, of the operator and of nobody."""

    served: Served
    a: Client
    b: Client
    admin: Client
    nobody: Client


def client(served: Served, key: str) -> Client:
    """A client with a key; without one if it is empty."""
    return Client(served.client.app, {"x-api-key": key} if key else {})


@asynccontextmanager
async def tenants(
    scripts: Mapping[str, str | Script] | None = None, flags: Mapping[str, Any] = {}, **settings: Any
) -> AsyncIterator[Tenants]:
    """The server until the context ends. ``flags`` are the configuration's, ``settings`` the model's."""
    config = Config(**{"api_key": KEYS, "admin_key": (ADMIN,), "explain": True, **flags})
    given = {"memory": TurnMemory(2**20), "layout": LAYOUT, **settings}
    async with serving(scripts, config=config, **given) as served:
        served.service.store = store = Store(None, 2**30)
        try:
            yield Tenants(served, *(client(served, key) for key in (*KEYS, ADMIN, "")))
        finally:
            store.close()
