"""``singletree serve`` with small caches, which counts its tasks and objects: `benchmarks.soak` looks for what grows.

    python -c "from benchmarks.counted_server import main; main('counts.json')" serve ...

With caches of their usual sizes the memory of a server grows for hours until they are full, which hides what has no
limit. So are the pages that SQLite keeps, the texts of the vocabulary, and the background responses that are over.
What is left is the cache of words that a tokenizer has for each thread. SIGUSR1 makes the server write its counts to
the file.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import json
import signal
import sqlite3
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any

from singletree.lru import LruCache

_CACHE_BYTES = 2**20
_CACHE_ENTRIES = 100
_CACHE_PAGES = 16
_JOBS = 2
_BLOCK_BYTES = 100
"""What an object of Python takes, about, where it is too small for the C library."""


class _Mallinfo(ctypes.Structure):
    # mallinfo2 of glibc 2.33: https://man7.org/linux/man-pages/man3/mallinfo.3.html
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def main(report: str) -> None:
    """Run the command line of singletree, and write counts to ``report``."""
    _shrink_caches()
    # What makes caches when it is imported comes after the change.
    from singletree.cli import main as run

    _shrink_tables()
    signal.signal(signal.SIGUSR1, lambda *_: _count(Path(report)))
    run()


def _shrink_caches() -> None:
    make, memoize, connect = LruCache.__init__, functools.lru_cache, sqlite3.connect

    def make_small(cache: LruCache[str, str], limit: float = inf, *, entries: float = inf) -> None:
        make(cache, min(limit, _CACHE_BYTES), entries=min(entries, _CACHE_ENTRIES))

    def memoize_few(maxsize: Any = _CACHE_ENTRIES, typed: bool = False) -> Any:
        return memoize(min(maxsize, _CACHE_ENTRIES) if type(maxsize) is int else maxsize, typed)

    def connect_small(*args: Any, **options: Any) -> sqlite3.Connection:
        database: sqlite3.Connection = connect(*args, **options)
        database.execute(f"PRAGMA cache_size = {_CACHE_PAGES}")
        return database

    LruCache.__init__ = make_small  # type: ignore[method-assign, assignment]
    functools.lru_cache = memoize_few
    sqlite3.connect = connect_small  # type: ignore[assignment]


def _shrink_tables() -> None:
    from singletree.prompts.tokenizer.detokenizer import TokenTexts
    from singletree.server.answers import response
    from singletree.server.models import chat_format

    find = TokenTexts.__missing__

    def find_again(texts: Any, token_id: int) -> Any:
        piece = find(texts, token_id)
        texts.pop(token_id, None)
        return piece

    TokenTexts.__missing__ = find_again  # type: ignore[method-assign, assignment]
    chat_format._PROMPT_BYTES = _CACHE_BYTES
    response._FINISHED_JOBS = _JOBS


def _count(report: Path) -> None:
    gc.collect()
    objects = gc.get_objects()
    kinds = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in objects)
    # A pool starts a thread whenever all are busy, up to its maximum: what has no maximum are pools, and other threads.
    pools = [each for each in objects if type(each) is ThreadPoolExecutor and not each._shutdown]
    room = sum(each._max_workers - len(each._threads) for each in pools)
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Mallinfo
    held = ask().uordblks + ask().hblkhd + sys.getallocatedblocks() * _BLOCK_BYTES
    counts = {"tasks": len(asyncio.all_tasks()), "room of pools": room, "held": held, "objects": kinds}
    written = report.with_suffix(".new")
    written.write_text(json.dumps(counts), encoding="utf-8")
    written.rename(report)
