"""A Redis that answers with what no Redis answers: the shared turn memory goes on without it."""

from __future__ import annotations

from typing import Any

import pytest

from singletree.turn_stores.redis_store import RedisTurnStore
from singletree.turn_stores.store import NAME_BYTES, StoreUnavailable

pytest.importorskip("redis")

NAME = b"n" * NAME_BYTES


class _Pipeline:
    """Takes any command, and gives ``answers``, or raises them."""

    def __init__(self, answers: Any) -> None:
        self._answers = answers

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def execute(self) -> Any:
        if isinstance(self._answers, Exception):
            raise self._answers
        return self._answers


def _store(monkeypatch: pytest.MonkeyPatch, answers: Any) -> RedisTurnStore:
    store = RedisTurnStore("redis://127.0.0.1:1")
    monkeypatch.setattr(store._client, "pipeline", lambda **_: _Pipeline(answers))
    return store


ODD: list[Any] = [
    [5],
    [None],
    [{b"a": 1}],
    [[7]],
    [["text"]],
    ["text"],
    [],
    5,
    None,
    ValueError("x"),
    TypeError("x"),
]


@pytest.mark.parametrize("answers", ODD, ids=repr)
def test_odd_lists_of_names_are_a_store_that_fails(answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreUnavailable):
        _store(monkeypatch, answers).names([b"key"])


@pytest.mark.parametrize(
    "answers", [[5], [{}], ["text"], [[NAME]], [b"short"], [], 5, None, IndexError()], ids=repr
)
def test_odd_turns_are_a_store_that_fails(answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreUnavailable):
        _store(monkeypatch, answers).turns([NAME])


def test_what_a_redis_answers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _store(monkeypatch, [[NAME]]).names([b"key"]) == [[NAME]]
    assert _store(monkeypatch, [None]).turns([NAME]) == {}
    [turn] = _store(monkeypatch, [NAME + b"sealed"]).turns([NAME]).values()
    assert (turn.conversation, turn.sealed) == (NAME, b"sealed")
