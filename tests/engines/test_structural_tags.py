"""Structural tags take what is drawn and nothing else. The oracle is XGrammar, as vLLM brings it along."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engines.real_vllm import PEERS
from parsing.asking import BREAKING, NOON, PARIS, TIME, WEATHER, WITH_CALLS, a_call
from singletree import families
from singletree.conversation import Part, Reasoning, ResponseFormat, Text, Tool
from singletree.parsing.constrain import calls, json_text, marks_calls, prose
from singletree.parsing.draw import draw
from singletree.parsing.expression import Expression, Unsayable
from singletree.parsing.family import Family
from singletree.parsing.structural_tag import structural_tag

Case = tuple[str, Expression, list[tuple[str, bool]]]
"""What it shows, the expression, and texts with whether they are to be taken."""


def asked(cases: list[Case]) -> list[Any]:
    python = PEERS / "vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {python}: `make engines` installs vLLM, which brings XGrammar")
    question = [[structural_tag(expression), [text for text, _ in texts]] for _, expression, texts in cases]
    run = subprocess.run(
        [python, Path(__file__).with_name("xgrammar_oracle.py")],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    verdicts: list[Any] = json.loads(run.stdout)
    return verdicts


def forced(family: Family) -> list[Case]:
    both = calls(family, [WEATHER, TIME], thinking="over", parallel=True)
    one = calls(family, [WEATHER], thinking="over", parallel=False)
    wrong = [draw(family, [a_call(family, arguments)]) for arguments in BREAKING]
    cases: list[Case] = [
        ("calls", both, [(draw(family, [PARIS]), True), (draw(family, [PARIS, NOON]), True)]),
        (
            "no call",
            both,
            [("I would rather talk.", False), (draw(family, [a_call(family, "{}", "rm")]), False)],
        ),
        ("wrong arguments", both, [(text, False) for text in wrong]),
        ("one call", one, [(draw(family, [PARIS]), True), (draw(family, [PARIS, PARIS]), False)]),
    ]
    if family.reasoning:
        parts: list[Part] = [Reasoning("I need < it."), PARIS]
        thought = draw(family, parts)
        possible = calls(family, [WEATHER], thinking="possible", parallel=True)
        goes_on = calls(family, [WEATHER], thinking="open", parallel=True)
        cases.append(("thought", possible, [(thought, True), (draw(family, [PARIS]), True)]))
        cases.append(("open thought", goes_on, [(thought.removeprefix(family.reasoning[0]), True)]))
    return cases


def free(family: Family) -> list[Case]:
    if not marks_calls(family):
        return []
    both = prose(family, [WEATHER, TIME], thinking="possible", parallel=True)
    one = prose(family, [WEATHER], thinking="possible", parallel=False)
    none = prose(family, [], thinking="possible", parallel=True)
    assert both is not None
    assert one is not None
    assert none is not None
    turns: list[list[Part]] = [[], [Text("So.")], [PARIS], [Text("So."), PARIS], [PARIS, NOON, Text("So.")]]
    wrong = [draw(family, [Text("So."), a_call(family, arguments)]) for arguments in BREAKING]
    return [
        ("free", both, [(draw(family, parts), True) for parts in turns]),
        ("free, wrong arguments", both, [(text, False) for text in wrong]),
        (
            "free, one call",
            one,
            [(draw(family, [Text("So."), PARIS]), True), (draw(family, [PARIS, PARIS]), False)],
        ),
        ("free, none allowed", none, [(draw(family, [Text("So.")]), True), (draw(family, [NOON]), False)]),
    ]


@pytest.mark.engines
def test_every_family_is_held_to_its_format() -> None:  # C38 C42
    cases = [(f.name, case) for f in WITH_CALLS for case in (*forced(f), *free(f))]
    verdicts = asked([case for _, case in cases])
    wrong = [
        (name, what, verdict)
        for (name, (what, _, texts)), verdict in zip(cases, verdicts, strict=True)
        if verdict != [wanted for _, wanted in texts]
    ]
    assert not wrong


@pytest.mark.engines
def test_text_is_held_to_json() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    qwen3 = families.get("qwen3")
    held = json_text(qwen3, ResponseFormat(schema), [TIME], thinking="open", parallel=True)
    any_object = json_text(qwen3, ResponseFormat(), thinking="over", parallel=True)
    noon = draw(qwen3, [NOON])
    texts = [
        ('So </think>\n\n{"a": 1}', True),
        ('</think>\n\n{"a": "x"}', False),
        (f"</think>\n\n{noon}", True),
    ]
    cases: list[Case] = [
        ("json", held, texts),
        ("any object", any_object, [('{"b": [1, {"c": null}]}', True)]),
    ]
    assert asked(cases) == [[wanted for _, wanted in texts] for _, _, texts in cases]


@pytest.mark.parametrize(
    "keyword",
    [{"multipleOf": 5}, {"allOf": [{"type": "integer"}, {"minimum": 1}]}, {"patternProperties": {"a": {}}}],
)
def test_what_xgrammar_would_pass_over_is_not_said(keyword: dict[str, Any]) -> None:  # C42
    tool = Tool("f", parameters={"type": "object", "properties": {"n": keyword}}, strict=True)
    with pytest.raises(Unsayable):
        structural_tag(calls(families.get("hermes"), [tool], thinking="over", parallel=True))
