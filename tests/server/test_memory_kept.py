"""What a server keeps of sessions that are over: nothing beyond its caches, however many sessions there were."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest

from protocols import judge_responses
from singletree.lru import LruCache
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.models import chat_format
from singletree.server.settings.config import Config
from singletree.stored_responses.store import Store

from .serving import Served, body, serving
from .test_app import PATHS

_SMALL = 2**15
_ENTRIES = 16
_AT_ONCE = 40


async def _sessions(served: Served, start: int, older: list[LruCache[Any, Any]]) -> int:
    """Run sessions of their own name, client, tools and prompt; return how many objects there are after them."""
    for number in range(start, start + _AT_ONCE):
        headers = {"x-session-id": f"s{number}", "user-agent": f"client{number}/1"}
        path = PATHS[number % len(PATHS)]
        for stream in (False, True):
            asked = body(path, f"[[echo:answer {number}]] {stream}", stream=stream)
            assert (await served.client.post(path, asked, headers)).status == 200
        unknown = body(path, "x", model=f"m{number}")
        assert (await served.client.post(path, unknown, headers)).status == 404
        assert (await served.client.get(f"/nowhere/{number}", headers)).status == 404
    assert served.service.store is not None
    await served.service.store.settled()
    judge_responses.forget()
    _shrink(older)
    gc.collect()
    # SQLite's connections keep up to 200 weak references to cursors that are gone.
    return sum(type(each) is not ref for each in gc.get_objects())


def _caches() -> list[LruCache[Any, Any]]:
    return [each for each in gc.get_objects() if type(each) is LruCache]


def _shrink(older: list[LruCache[Any, Any]]) -> None:
    """Make every cache small, those of sessions and requests included: it is full after a few sessions."""
    for each in (*older, *_caches()):
        each._limit, each._most_entries = min(each._limit, _SMALL), min(each._most_entries, _ENTRIES)


async def test_sessions_that_are_over_leave_nothing_but_full_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.unfreeze()  # caches of modules, which were imported when the tests were collected
    monkeypatch.setattr(chat_format, "_PROMPT_BYTES", _SMALL)
    older = _caches()
    limits = [(each, each._limit, each._most_entries) for each in older]
    # Other tests may have left millions of objects. None of them is new, so none has to be counted.
    gc.freeze()
    config = Config(session_memory=_SMALL)
    try:
        async with serving(config=config, memory=TurnMemory(_SMALL)) as served:
            served.service.store = Store(None, 2**20)
            served.engine._log_room = 0
            _shrink(older)
            counts = [await _sessions(served, start, older) for start in range(0, 6 * _AT_ONCE, _AT_ONCE)]
            exposition = len(served.service.tracing.exposition())
            await _sessions(served, 7 * _AT_ONCE, older)
            assert abs(len(served.service.tracing.exposition()) - exposition) < 200, (
                "a metric has a series a session"
            )
            served.service.store.close()
    finally:
        for each, limit, entries in limits:
            each._limit, each._most_entries = limit, entries
    assert counts[-1] - counts[2] < _AT_ONCE, counts  # less than one object for three sessions
