"""Ids cannot be guessed, and no two are the same."""

from __future__ import annotations

import os
import string
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from singletree.server import ids as ids_module
from singletree.server.ids import new_id, numbered_ids

_CHARACTERS = string.ascii_letters + string.digits


def test_an_id_has_17_random_letters_and_digits_all_equally_likely() -> None:
    ids = [new_id("msg_") for _ in range(4000)]
    assert len(set(ids)) == len(ids)
    assert all(id.startswith("msg_") and len(id) == 28 for id in ids)
    assert set("".join(ids)) <= {*_CHARACTERS, "_"}
    counts = Counter("".join(id[11:] for id in ids))
    assert set(counts) == set(_CHARACTERS)
    # 68,000 characters: 1,097 of each, with a deviation of 33.
    assert max(abs(count - 1097) for count in counts.values()) < 6 * 33


def test_ids_grow_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for milliseconds in (0, 61, 62, 1_795_000_000_000, 1_795_000_000_001, 1_895_000_000_000):
        monkeypatch.setattr(ids_module, "_SPARE_IDS", [])
        monkeypatch.setattr(time, "time_ns", lambda now=milliseconds: now * 1_000_000)
        made.append(new_id("resp_")[:12])
    assert made == sorted(set(made))
    assert made[:3] == ["resp_0000000", "resp_000000z", "resp_0000010"]


def test_numbered_ids_differ_within_a_response_and_between_responses() -> None:
    makers = [numbered_ids(new_id) for _ in range(3)]
    ids = [make("item_") for make in makers for _ in range(10_050)]
    assert len(set(ids)) == len(ids)
    assert {len(id) for id in ids} == {29, 30}
    assert all(set(id.removeprefix("item_")) <= set(_CHARACTERS) for id in ids)


def test_ids_of_several_threads_differ() -> None:
    with ThreadPoolExecutor(8) as threads:
        made = threads.map(lambda _: [new_id("") for _ in range(2000)], range(8))
        ids = [id for each in made for id in each]
    assert len(set(ids)) == len(ids) == 16_000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_does_not_give_the_ids_of_its_parent() -> None:
    script = (
        "import os; from singletree.server.ids import new_id; new_id('');"
        " child = os.fork(); child and os.wait(); print(new_id(''))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    first, second = printed.split()
    assert first != second
