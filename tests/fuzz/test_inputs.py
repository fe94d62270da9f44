"""The targets of the fuzzer on their seeds, on changes of them, and on each input that failed once."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from fuzz.run import _NAMES
from fuzz.targets import TARGETS

INPUTS = Path(__file__).parent / "inputs"
CHANGES = 40


def test_the_runner_knows_all_targets() -> None:
    assert list(TARGETS) == _NAMES
    assert {path.name for path in INPUTS.glob("*")} <= set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_their_changes(name: str) -> None:
    function, seeds = TARGETS[name]
    random = Random(name)
    for seed in seeds:
        function(seed)
    for _ in range(CHANGES):
        data = bytearray(random.choice(seeds))
        for _ in range(random.randrange(1, 6)):
            at = random.randrange(len(data))
            data[at : at + random.randrange(2)] = random.randbytes(random.randrange(3))
            data = data or bytearray(1)
        function(bytes(data))


@pytest.mark.parametrize(
    "path", sorted(INPUTS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_what_failed_once(path: Path) -> None:
    TARGETS[path.parent.name][0](path.read_bytes())
