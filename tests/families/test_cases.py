"""Public parser cases: how many are parsed as their authors expect; a house rule explains each of the others."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

import make_agreement
from agreement_rules import Difference

CASES = Path(__file__).parents[3] / "shared" / "cases"
# How many rows agree at least: a row that stops agreeing needs a reason even where a rule would explain it.
AGREE = {
    "authored_samples.jsonl": 226,
    "llamacpp_test_chat.jsonl": 369,
    "sglang_2026-08.jsonl": 355,
    "dynamo_parity_2026-06.jsonl": 754,
}


@lru_cache(maxsize=1)
def differences() -> tuple[Counter[str], list[Difference]]:
    if not CASES.is_dir():
        pytest.skip("the collection of parser cases is not here")
    agreed: Counter[str] = Counter()
    found = []
    for case in make_agreement.cases(CASES):
        difference = make_agreement.disagreement(case)
        if difference is None:
            agreed[case.source] += 1
        else:
            found.append(difference)
    return agreed, found


@pytest.mark.parametrize("source", AGREE)
def test_agreement_does_not_fall(source: str) -> None:
    assert differences()[0][source] >= AGREE[source]


@pytest.mark.parametrize("source", AGREE)
def test_every_disagreement_is_explained(source: str) -> None:
    differing = [d for d in differences()[1] if d.source == source]
    assert [d.shown() for d in differing if not make_agreement.rule_of(d)] == []
