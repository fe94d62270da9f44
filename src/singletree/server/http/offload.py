"""Move long work off the event loop, so that other streams continue meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LARGE_BYTES = 64 * 1024
"""Smallest number of bytes whose prompt is built in a thread. A cold prompt of 200,000 tokens takes 25 ms with the fast
encoder and 600 ms without it; a thread costs 0.1 to 0.6 ms.
"""


async def offload(size: int, work: Callable[[], T], *, waits: bool = False) -> T:
    """Return ``work()``, run in a thread when it processes at least ``LARGE_BYTES``. Raises what ``work`` raises.

    Args:
        size: how many bytes ``work`` processes.
        work: what is run.
        waits: whether it may wait for another machine, so that it runs in a thread in any case.
    """
    return work() if size < LARGE_BYTES and not waits else await asyncio.to_thread(work)
