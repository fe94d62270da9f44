"""Structural tags take what is drawn and nothing else. The oracle is XGrammar, as vLLM brings it along."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engines.real_vllm import PEERS
from parsing.asking import (
    BAD_PATCH,
    BREAKING,
    GOOD_PATCH,
    NOON,
    PARIS,
    PATCH,
    TIME,
    WEATHER,
    WITH_CALLS,
    a_call,
)
from singletree import families
from singletree.constraints.constrain import allow_calls, marks_calls, require_call, require_format
from singletree.constraints.expression import Expression, NotExpressible, structural_tag
from singletree.conversation import Part, Reasoning, ResponseFormat, Text, Tool
from singletree.parsing.family import Family
from singletree.parsing.render_turn import render_turn

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
    both = require_call(family, [WEATHER, TIME], thinking="over", parallel=True)
    one = require_call(family, [WEATHER], thinking="over", parallel=False)
    wrong = [render_turn(family, [a_call(family, arguments)]) for arguments in BREAKING]
    cases: list[Case] = [
        ("calls", both, [(render_turn(family, [PARIS]), True), (render_turn(family, [PARIS, NOON]), True)]),
        (
            "no call",
            both,
            [("I would rather talk.", False), (render_turn(family, [a_call(family, "{}", "rm")]), False)],
        ),
        ("wrong arguments", both, [(text, False) for text in wrong]),
        (
            "one call",
            one,
            [(render_turn(family, [PARIS]), True), (render_turn(family, [PARIS, PARIS]), False)],
        ),
    ]
    if family.reasoning:
        parts: list[Part] = [Reasoning("I need < it."), PARIS]
        thought = render_turn(family, parts)
        possible = require_call(family, [WEATHER], thinking="possible", parallel=True)
        goes_on = require_call(family, [WEATHER], thinking="open", parallel=True)
        cases.append(("thought", possible, [(thought, True), (render_turn(family, [PARIS]), True)]))
        cases.append(("open thought", goes_on, [(thought.removeprefix(family.reasoning[0]), True)]))
    return cases


def free(family: Family) -> list[Case]:
    if not marks_calls(family):
        return []
    both = allow_calls(family, [WEATHER, TIME], thinking="possible", parallel=True)
    one = allow_calls(family, [WEATHER], thinking="possible", parallel=False)
    none = allow_calls(family, [], thinking="possible", parallel=True)
    assert both is not None
    assert one is not None
    assert none is not None
    turns: list[list[Part]] = [[], [Text("So.")], [PARIS], [Text("So."), PARIS], [PARIS, NOON, Text("So.")]]
    wrong = [render_turn(family, [Text("So."), a_call(family, arguments)]) for arguments in BREAKING]
    return [
        ("free", both, [(render_turn(family, parts), True) for parts in turns]),
        ("free, wrong arguments", both, [(text, False) for text in wrong]),
        (
            "free, one call",
            one,
            [(render_turn(family, [Text("So."), PARIS]), True), (render_turn(family, [PARIS, PARIS]), False)],
        ),
        (
            "free, none allowed",
            none,
            [(render_turn(family, [Text("So.")]), True), (render_turn(family, [NOON]), False)],
        ),
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
    held = require_format(qwen3, ResponseFormat(schema), [TIME], thinking="open", parallel=True)
    any_object = require_format(qwen3, ResponseFormat(), thinking="over", parallel=True)
    noon = render_turn(qwen3, [NOON])
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


INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
PATCHES = Tool("patch", parameters=INPUT, kind="custom", grammar=("lark", PATCH))
FREE_TEXT = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}


@pytest.mark.engines
def test_every_family_may_call_tools_with_optional_text() -> None:
    tools = [
        Tool("write", parameters=FREE_TEXT, strict=True),
        Tool("stop", parameters={"type": "object"}),
        PATCHES,
    ]
    cases: list[Case] = []
    for family in WITH_CALLS:
        free = allow_calls(family, tools, thinking="over", parallel=True)
        if marks_calls(family) and free is not None:
            call = a_call(family, json.dumps({"a": "x <y>"}), "write")
            cases.append((family.name, free, [(render_turn(family, [Text("So."), call]), True)]))
    verdicts = asked(cases)
    wrong = [(name, each) for (name, _, _), each in zip(cases, verdicts, strict=True) if each != [True]]
    assert not wrong


@pytest.mark.engines
@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "minimax_m2", "deepseek_v3_2"])
def test_a_call_is_held_to_a_grammar_in_lark(name: str) -> None:
    family = families.get(name)
    free = allow_calls(family, [PATCHES], thinking="over", parallel=True)
    assert free is not None
    texts = [
        (render_turn(family, [a_call(family, json.dumps({"input": text}), "patch")]), right)
        for text, right in ((GOOD_PATCH, True), (GOOD_PATCH + "\n", True), (BAD_PATCH, False))
    ]
    forced = require_call(family, [PATCHES], thinking="over", parallel=True)
    assert asked([("forced", forced, texts), ("free", free, texts)]) == [[right for _, right in texts]] * 2


@pytest.mark.parametrize(
    "keyword",
    [{"multipleOf": 5}, {"allOf": [{"type": "integer"}, {"minimum": 1}]}, {"patternProperties": {"a": {}}}],
)
def test_what_xgrammar_would_ignore_is_not_sent(keyword: dict[str, Any]) -> None:  # C42
    tool = Tool("f", parameters={"type": "object", "properties": {"n": keyword}}, strict=True)
    with pytest.raises(NotExpressible):
        structural_tag(require_call(families.get("hermes"), [tool], thinking="over", parallel=True))
