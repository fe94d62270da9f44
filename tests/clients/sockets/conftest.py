"""Run each test on both event loops that the server runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return uvloop's loops, and asyncio's, which Windows has."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
