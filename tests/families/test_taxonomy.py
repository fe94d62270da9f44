"""Every family on every case: the parser returns the turn from which the sample was made."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from family_cases import CASES, TOOLS, Stance, samples, stance, unknown
from parsing.reading import TOKEN, read, turn
from singletree import families
from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.events import ToolCallEnd, fold
from singletree.parsing.family import Family

SAMPLES: dict[str, list[tuple[str, Family, Stance]]] = {}
for _family, _case, _stance in samples():
    SAMPLES.setdefault(_family.name, []).append((_case, _family, _stance))


def shown(parts: Iterable[Part], forgiving: Sequence[str]) -> list[object]:
    """Return parts without ids, and texts without the markers that the format may show or not show."""
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
    """Cut the text: whole, tokens, seeded groups of up to 16 tokens, and single characters if it is short."""
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


@pytest.mark.parametrize("name", SAMPLES)
def test_sample(name: str, subtests: pytest.Subtests) -> None:  # C9 C15 C17 C18 C19 C20
    for case, family, taken in SAMPLES[name]:
        with subtests.test(case):
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
    """Check for whole parts, then perhaps a cut part, then perhaps cut markup of the next, which is shown as text."""
    count = next(
        (i for i, (a, b) in enumerate(zip(found, parts, strict=False)) if not alike(a, b)), len(found)
    )
    count = min(count, len(parts))
    rest, whole = found[count:], parts[count:]
    if rest and whole and is_cut(rest[0], whole[0], text):
        rest = rest[1:]
    assert len(rest) <= 1
    assert all(isinstance(p, Text) and text.rstrip().endswith(p.text.strip()) for p in rest), rest


def alike(one: Part, other: Part) -> bool:
    return shown([one], ()) == shown([other], ())


def is_cut(one: Part, whole: Part, text: str) -> bool:
    """Return whether ``one`` is a beginning of ``whole``; after text the cut markup of the next part may follow."""
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
