"""A cache that evicts what was used least recently."""

from __future__ import annotations

from singletree.lru import ENTRY_BYTES, LruCache


def keys(cache: LruCache[str, int]) -> str:
    """The keys, the most recently used first."""
    return "".join(key for key, _ in cache.items())


def filled(cache: LruCache[str, int], size: int = 0) -> LruCache[str, int]:
    for value, key in enumerate("abc"):
        cache.put(key, value, size)
    return cache


def test_the_least_recently_used_goes_first() -> None:
    cache = filled(LruCache(entries=3))
    assert cache.get("a") == 0
    cache.put("d", 3)
    assert (keys(cache), cache.get("b"), len(cache)) == ("dac", None, 3)


def test_a_look_is_no_use() -> None:
    cache = filled(LruCache(entries=3))
    assert cache.peek("a") == 0
    assert cache.peek("x") is None
    assert cache.items() == [("c", 2), ("b", 1), ("a", 0)]
    cache.put("d", 3)
    assert keys(cache) == "dcb"


def test_bytes_are_bounded() -> None:
    cache = filled(LruCache(2 * (ENTRY_BYTES + 100)), 100)
    assert (keys(cache), cache.bytes) == ("cb", 2 * (ENTRY_BYTES + 100))
    cache.put("d", 3, 0)
    assert (keys(cache), cache.bytes) == ("dc", 2 * ENTRY_BYTES + 100)


def test_a_value_takes_the_place_of_the_last_one() -> None:
    cache = filled(LruCache(3 * (ENTRY_BYTES + 100)), 100)
    cache.put("a", 9, 50)
    assert (keys(cache), cache.get("a"), cache.bytes) == ("acb", 9, 3 * ENTRY_BYTES + 250)


def test_what_is_over_the_limit_is_not_cached_nor_its_last_value() -> None:
    cache = filled(LruCache(3 * (ENTRY_BYTES + 100)), 100)
    cache.put("b", 9, 10_000)
    assert (keys(cache), cache.bytes) == ("ca", 2 * (ENTRY_BYTES + 100))


def test_pop() -> None:
    cache = filled(LruCache(entries=3), 100)
    assert (cache.pop("b"), cache.pop("b"), keys(cache)) == (1, None, "ca")
    assert cache.bytes == 2 * (ENTRY_BYTES + 100)


def test_a_smaller_limit_evicts_at_once() -> None:
    cache = filled(LruCache(3 * (ENTRY_BYTES + 100)), 100)
    cache.resize(2 * (ENTRY_BYTES + 100))
    assert (keys(cache), cache.bytes) == ("cb", 2 * (ENTRY_BYTES + 100))
    cache.resize(0)
    cache.put("d", 3)
    assert (len(cache), cache.bytes) == (0, 0)
