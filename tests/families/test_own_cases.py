"""Agreement cases of our own, for machines without the public ones: ``agreement/<vendor>.toml``.

The cases are written from descriptions of the formats and not from the declarations in ``families``. A case holds what
a request sets (``tail``: the end of its prompt; ``tool_choice``), what the model writes, and the parts of the turn in
order. As in the public cases, arguments are compared as values, and text and reasoning without outer white space.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import make_agreement
from parsing.reading import turn
from singletree import families
from singletree.conversation import Part, Reasoning, Text, Tool, ToolCall
from singletree.parsing.family import Family

Case = dict[str, Any]
FOLDER = Path(__file__).parent / "agreement"
NAMES = [family.name for family in families.table()]
CUT_OFF: dict[str, Any] = {}
"""The arguments that a case expects of a call that is cut: how much of them is shown is up to the family."""


@cache
def tools() -> tuple[Tool, ...]:
    file = tomllib.loads((FOLDER / "tools.toml").read_text(encoding="utf-8"))
    return tuple(Tool(tool["name"], parameters=tool["parameters"]) for tool in file["tool"])


@cache
def cases() -> dict[str, list[Case]]:
    """Return the cases by family."""
    found: dict[str, list[Case]] = defaultdict(list)
    for path in sorted(FOLDER.glob("*.toml")):
        for case in tomllib.loads(path.read_text(encoding="utf-8")).get("case", ()):
            found[case["family"]].append(case)
    return found


def asked(case: Case) -> Family:
    """Return the family as the case's request has it read."""
    family = families.get(case["family"])
    return family.without_calls() if case.get("tool_choice") == "none" else family


def shown(part: Part) -> dict[str, Any]:
    if isinstance(part, ToolCall):
        arguments = json.loads(part.arguments) if part.complete else CUT_OFF
        return {"call": part.name, "arguments": arguments, "complete": part.complete}
    assert isinstance(part, Text | Reasoning)
    return {"text" if isinstance(part, Text) else "reasoning": part.text.strip()}


def expected(part: dict[str, Any]) -> dict[str, Any]:
    if "call" in part:
        return {"complete": True} | part
    return {kind: text.strip() for kind, text in part.items()}


def streams(text: str) -> Iterator[list[str]]:
    """Yield ``text`` whole, character by character, and in pieces of one to twelve characters."""
    yield [text]
    yield list(text)
    rng = random.Random(11)
    for _ in range(4):
        ends = [0]
        while ends[-1] < len(text):
            ends.append(ends[-1] + rng.randint(1, 12))
        yield [text[start:end] for start, end in pairwise(ends)]


def as_public(case: Case) -> make_agreement.Case:
    """Return the case in the form of the public ones, which have no order of parts."""
    parts = case["parts"]
    answer = {
        "reasoning": [p["reasoning"] for p in parts if "reasoning" in p],
        "content": "".join(p["text"] for p in parts if "text" in p),
        "tool_calls": [
            {"name": p["call"], "arguments": p["arguments"]}
            for p in parts
            if "call" in p and p.get("complete", True)
        ],
    }
    declared = [{"name": tool.name, "parameters": tool.parameters} for tool in tools()]
    row = {"text": case["text"], "tools": declared}
    return make_agreement.Case("own", asked(case), row, case.get("tail", ""), (answer,))


@pytest.mark.parametrize("name", NAMES)
def test_parts_in_order_whole_and_streamed(name: str, subtests: pytest.Subtests) -> None:
    for case in cases()[name]:
        with subtests.test(case["case"]):
            for pieces in streams(case["text"]):
                parts = turn(asked(case), pieces, tools(), case.get("tail", "")).parts
                assert list(map(shown, parts)) == list(map(expected, case["parts"]))


@pytest.mark.parametrize("name", NAMES)
def test_it_agrees_as_a_public_case_does(name: str) -> None:
    found = [make_agreement.disagreement(as_public(case)) for case in cases()[name]]
    assert [difference.shown() for difference in found if difference] == []


def test_every_family_has_cases_and_every_case_a_family() -> None:
    assert set(cases()) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_no_case_is_a_sample(name: str) -> None:
    samples = tomllib.loads((FOLDER.parent / "samples" / f"{name}.toml").read_text(encoding="utf-8"))[
        "sample"
    ]
    texts = {sample["text"] for sample in samples}
    assert [case["case"] for case in cases()[name] if case["text"] in texts] == []
    assert len({case["case"] for case in cases()[name]}) == len(cases()[name])
