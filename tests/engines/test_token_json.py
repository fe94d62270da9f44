"""Token ids as JSON: the same text as without a memory, whatever was written before."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from singletree.engines import token_json
from singletree.engines.token_json import encode_token_ids
from singletree.lru import LruCache


@pytest.fixture(autouse=True)
def texts(monkeypatch: pytest.MonkeyPatch) -> LruCache[tuple[Any, ...], tuple[bytes, bytes]]:
    cache: LruCache[tuple[Any, ...], tuple[bytes, bytes]] = LruCache(100_000)
    monkeypatch.setattr(token_json, "_token_texts", cache)
    return cache


@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1025, 2048, 5000, 8191, 8192, 8193, 9216, 20000])
def test_the_text_is_that_of_the_list(length: int) -> None:
    ids = [at * 7919 % 2**32 for at in range(length)]
    for _ in range(2):
        assert json.loads(bytes(encode_token_ids(array("I", ids)))) == ids
    assert json.loads(bytes(encode_token_ids(tuple(ids)))) == ids


def test_a_prompt_that_grows_or_parts_is_written_anew_where_it_differs(
    texts: LruCache[tuple[Any, ...], tuple[bytes, bytes]],
) -> None:
    first = array("I", range(4000))
    encode_token_ids(first)
    assert len(texts) == 3
    grown = first + array("I", range(9000, 10000))
    parted = first[:1500] + array("I", [1]) + first[1501:]
    for prompt in (grown, parted, first):
        assert json.loads(bytes(encode_token_ids(prompt))) == list(prompt)
    assert len(texts) == 5


def test_numbers_of_another_size_are_not_mixed_up() -> None:
    small = array("H", range(4096))
    encode_token_ids(array("I", small.tobytes()))
    for kind in "HBLQi":
        ids = array(kind, [at % 100 for at in range(4096)])
        assert json.loads(bytes(encode_token_ids(ids))) == list(ids)


def test_the_memory_is_bounded(texts: LruCache[tuple[Any, ...], tuple[bytes, bytes]]) -> None:
    for start in range(100):
        ids = array("I", range(start * 10_000, start * 10_000 + 2048))
        assert json.loads(bytes(encode_token_ids(ids))) == list(ids)
        assert texts.bytes <= 100_000
