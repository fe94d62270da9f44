"""The benchmark of the first token: it sends the documented requests, and shows what it measured."""

from __future__ import annotations

import pytest
from benchmarks.first_token import (
    CONSTANT,
    GROUPS,
    REFERENCE,
    RENDERED,
    REPLAYED,
    STRIPPED,
    VARYING,
    Timed,
    billing_header,
    opening,
    report,
    source,
    without_thoughts,
)

from singletree.conversation import Conversation, Text, Turn
from singletree.prompts.history.canonicalization import Canonicalize

THOUGHT = {"type": "thinking", "thinking": "why", "signature": "s"}
CALL = {"type": "tool_use", "id": "1", "name": "read", "input": {}}


def test_thoughts_are_cleared_from_the_first_generated_turn_on() -> None:
    messages = [*opening(), *({"role": "assistant", "content": [THOUGHT, CALL]} for _ in range(3))]
    given = len(opening())
    sent = without_thoughts(messages, 2)
    assert sent[:given] == messages[:given], "nobody generated those"
    assert [message["content"] for message in sent[given:]] == [[CALL], [CALL], [THOUGHT, CALL]]
    assert without_thoughts(messages, 0) == messages


def test_a_model_that_does_not_think_is_reported() -> None:
    with pytest.raises(SystemExit, match="measure another model"):
        without_thoughts([*opening(), {"role": "assistant", "content": [CALL]}], 1)


def test_the_header_is_one_that_the_rule_strips() -> None:
    assert billing_header(changes=False) == billing_header(changes=False)
    assert billing_header(changes=True) != billing_header(changes=True)
    system = Turn("system", (Text(billing_header(changes=True)), Text("Be brief.")))
    (stable, rules, _), _ = Canonicalize().run(Conversation((system,)), None)
    assert stable.turns[0].parts == (Text("Be brief."),)
    assert rules == ("billing_header",)


def test_texts_differ_by_number() -> None:
    assert source(100, 1) != source(100, 2)
    assert len(source(100, 1)) == len(source(100, 2)) > 100


def test_the_table_shows_ratios_to_the_stable_prompt() -> None:
    measured = {case: [Timed(10.0, 1000, 900, 0.5)] for cases in GROUPS for case in cases}
    measured[VARYING] = [Timed(50.0, 1000, 0, 0.5)] * 3
    measured[RENDERED] = [Timed(20.0, 1000, 500, 0.5)]
    text = report(measured, "the default model", 1)
    assert "| billing header changes | 1,000 | 1,000 | 50 | 5.00 | 912 | 5.40 |" in text
    assert "| thoughts are cleared, no replay | 1,000 | 500 | 20 | 2.00 | 322 | 1.93 |" in text
    assert set(REFERENCE) == {CONSTANT, VARYING, STRIPPED, REPLAYED, RENDERED}
