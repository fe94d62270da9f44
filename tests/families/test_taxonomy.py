"""A stance of every family on every case: what a sample says is the turn that it was made from."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from family_cases import CASES, HERE, TOOLS, Stance, page, samples, stance, unknown
from parsing.reading import TOKEN, read, turn
from singletree import families
from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.events import ToolCallEnd, fold
from singletree.parsing.family import Family

SAMPLES = [
    pytest.param(family, taken, id=f"{family.name}-{case.replace(' ', '_')}")
    for family, case, taken in samples()
]


def shown(parts: Iterable[Part], forgiving: Sequence[str]) -> list[object]:
    """Parts without ids, and texts without what the format may show or not show."""
    return [
        (p.name, p.arguments, p.complete)
        if isinstance(p, ToolCall)
        else (type(p).__name__, without(p.text, forgiving))
        for p in parts
        if isinstance(p, ToolCall | Text | Reasoning)
    ]


def without(text: str, forgiving: Sequence[str]) -> str:
    for marker in forgiving:
        text = text.replace(marker, "")
    return "".join(text.split()) if forgiving else text


def pieces(text: str) -> list[list[str]]:
    """The whole, single characters where there are not many, and seeded groups of up to sixteen tokens."""
    rng = random.Random(11)
    tokens = TOKEN.findall(text)
    groups, at = [], 0
    while at < len(tokens):
        size = rng.randint(1, 16)
        groups.append("".join(tokens[at : at + size]))
        at += size
    return [[text], tokens, groups, *([list(text)] if len(text) < 1000 else [])]


def check(family: Family, taken: Stance) -> None:
    expected = shown(taken.parts, taken.forgiving)
    for cut in pieces(taken.text):
        found = turn(family, cut, TOOLS, taken.tail).parts
        assert shown(found, taken.forgiving) == expected
        assert len({p.id for p in found if isinstance(p, ToolCall)}) == len(
            [p for p in found if isinstance(p, ToolCall)]
        )


@pytest.mark.parametrize(("family", "taken"), SAMPLES)
def test_sample(family: Family, taken: Stance) -> None:  # C9 C15 C17 C18 C19 C20
    if taken.known_broken:
        with pytest.raises(AssertionError):
            check(family, taken)
    else:
        check(family, taken)


@pytest.mark.parametrize("family", families.table(), ids=lambda f: f.name)
def test_a_cut_turn_says_what_came_before_the_cut(family: Family) -> None:  # C15
    taken = stance(family, "truncated at each place")
    ended = 0
    for end in range(len(taken.text)):
        text = taken.text[:end]
        events = read(family, [text], TOOLS, taken.tail)
        found = list(fold(events).parts)
        begins(found, taken.parts, text)
        calls = [p for p in found if isinstance(p, ToolCall) and p.complete]
        assert len(calls) == sum(isinstance(e, ToolCallEnd) for e in events) >= ended
        ended = len(calls)


def begins(found: list[Part], parts: tuple[Part, ...], text: str) -> None:
    """Whole parts, then perhaps one that is cut, then perhaps the cut markup of the next, which is shown as text."""
    said = next(
        (i for i, (a, b) in enumerate(zip(found, parts, strict=False)) if not alike(a, b)), len(found)
    )
    said = min(said, len(parts))
    rest, whole = found[said:], parts[said:]
    if rest and whole and is_cut(rest[0], whole[0], text):
        rest = rest[1:]
    assert len(rest) <= 1
    assert all(isinstance(p, Text) and text.rstrip().endswith(p.text.strip()) for p in rest), rest


def alike(one: Part, other: Part) -> bool:
    return shown([one], ()) == shown([other], ())


def is_cut(one: Part, whole: Part, text: str) -> bool:
    """Whether ``one`` is ``whole`` as far as it goes; behind text the cut markup of what comes next may stand."""
    if isinstance(one, ToolCall) and isinstance(whole, ToolCall):
        return not one.complete and one.name == whole.name and whole.arguments.startswith(one.arguments)
    if isinstance(one, ToolCall) or isinstance(whole, ToolCall) or type(one) is not type(whole):
        return False
    assert isinstance(one, Text | Reasoning)
    assert isinstance(whole, Text | Reasoning)
    markup = one.text.removeprefix(whole.text)
    return whole.text.startswith(one.text) or text.rstrip().endswith(markup.strip())


def test_every_family_takes_a_stance_on_every_case() -> None:
    assert len(CASES) == 16
    assert unknown() == []
    for family in families.table():
        for case in CASES:
            taken = stance(family, case)
            assert bool(taken.text) is not bool(taken.not_applicable), (family.name, case)


def test_the_table_is_current() -> None:
    path = HERE / "cases.md"
    assert path.read_text(encoding="utf-8") == page(), "run `python docs/family_cases.py`"
