"""The cases that every model family takes a stance on, and cases.md, the table of them.

    python docs/family_cases.py

A stance is a sample, or says why the case cannot arise, or that it is broken and why. Samples are made here from the
family's declaration and a turn: what a parser must read is that turn, whatever the parser. A sample file of
``tests/families/samples`` may hold stances of its own, which win:

    [[stance]]
    case = "missing closer"
    known_broken = "why"        # or: not_applicable = "why"
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from singletree import families
from singletree.conversation import Part, Reasoning, Text, Tool, ToolCall
from singletree.parsing.draw import draw
from singletree.parsing.family import Family, markers

HERE = Path(__file__).parent
SAMPLES = HERE.parent / "tests" / "families" / "samples"

_ITEM = {"type": "object", "properties": {"deep": {"type": "string"}}}
TOOLS = (
    Tool(
        "f",
        parameters={
            "properties": {
                "s": {"type": "string"},
                "n": {"type": "integer"},
                "o": {"type": "object", "properties": {"k": {"type": "array", "items": _ITEM}}},
            }
        },
    ),
    Tool("g", parameters={"properties": {}}),
)
F = ToolCall("f", '{"s": "x", "n": 3}', "abcdefghi")
G = ToolCall("g", "{}", "123456789")


@dataclass(frozen=True)
class Stance:
    """What a family's model writes in a case, and the turn that it says; or why there is no such case.

    Attributes:
        text: what the model writes behind ``tail``, the end of the prompt.
        parts: what it says.
        anywhere: it may be cut anywhere, and says then what came before the cut.
        forgiving: (markers, white space) that the format may show or not show; they are left out of a comparison.
    """

    text: str = ""
    parts: tuple[Part, ...] = ()
    tail: str = " "
    anywhere: bool = False
    forgiving: tuple[str, ...] = ()
    not_applicable: str = ""
    known_broken: str = ""


_NO_CALLS = "the family makes no calls"
_NO_THOUGHT = "the family marks no reasoning"
_NO_MARK = "nothing marks a call of this family but its place and a known name (H8)"
_NO_OPENER = "the prompt holds what opens a call; the model begins with the name"
_NO_CLOSER = "nothing stands behind the arguments of a call"
_NO_MARKERS = "the family has no markers"


def _drawn(family: Family, *parts: Part) -> Stance:
    return Stance(draw(family, parts), parts, family.turn or " ")


def _with_calls(*parts: Part) -> Callable[[Family], Stance]:
    return lambda family: _drawn(family, *parts) if family.forms else Stance(not_applicable=_NO_CALLS)


def _saying(**arguments: object) -> Callable[[Family], Stance]:
    return _with_calls(ToolCall("f", json.dumps(arguments, ensure_ascii=False), "abcdefghi"))


def _malformed(family: Family) -> Stance:
    """The arguments break in the middle: all of it comes back as text (H6), but for what ends a turn."""
    if not family.forms:
        return Stance(not_applicable=_NO_CALLS)
    text = broken_behind(family)
    return Stance(text, (Text(text),), family.turn or " ", forgiving=family.ends)


def broken_behind(family: Family, *parts: Part) -> str:
    """``parts`` and then a call whose arguments break in the middle, as the family writes it."""
    form = family.forms[0]
    if "{args}" in form.call:
        return draw(family, [*parts, ToolCall("f", '{"s": oops}', "broken000")])
    drawn = draw(family, [*parts, ToolCall("f", '{"s": "zz"}', "broken000")])
    if form.literals:
        quote = form.literals.quote
        return drawn.replace(f"{quote}zz{quote}", f"{quote}zz{quote}{quote}oops{quote}")
    slots = {"{key}": "s", "{value}": "zz", "{string}": "true", "{type}": "string"}
    parameter = re.sub(r"\{\w+\}", lambda m: slots[m[0]], form.parameter)
    return drawn.replace(parameter, parameter + "oops ")


def _inside_reasoning(family: Family) -> Stance:
    if not family.reasoning or not family.forms:
        return Stance(not_applicable=_NO_CALLS if family.reasoning else _NO_THOUGHT)
    if family.forms[0].bare:
        return Stance(not_applicable=_NO_MARK)
    text = family.reasoning[0] + "plan" + family.turn + draw(family, [F])
    return Stance(text, (Reasoning("plan"), F), family.turn or " ")


def _without_opener(family: Family) -> Stance:
    """Without it there is no call, unless models of the family are known to forget it."""
    if not family.forms:
        return Stance(not_applicable=_NO_CALLS)
    form, drawn = family.forms[0], draw(family, [F])
    if form.bare or not form.opener:
        return Stance(not_applicable=_NO_MARK if form.bare else _NO_OPENER)
    if form.optional:
        return Stance(drawn.removeprefix(form.calls[0]), (F,), family.turn or " ")
    text = drawn.removeprefix(form.opener)
    stray = {tag for m in markers(family) for tag in _TAG.findall(m)}
    return Stance(text, (Text(text),), family.turn or " ", forgiving=tuple(sorted(stray)))


_TAG = re.compile(r"<[^<>\n]*>|\[/?[A-Z_]+\]")


def _without_closer(family: Family) -> Stance:
    """A call is complete when its arguments are (H5); where its closer is what completes them, it is cut (H7)."""
    if not family.forms:
        return Stance(not_applicable=_NO_CALLS)
    head, body, tail = re.split(r"\{(args|params|literals)\}", family.forms[0].call)
    kept = "" if body == "args" else tail[:1] if body == "literals" else _closing(tail)
    form = replace(family.forms[0], call=f"{head}{{{body}}}{kept}", calls=(family.forms[0].calls[0], ""))
    text = draw(replace(family, forms=(form,)), [F]).rstrip()
    if text == draw(family, [F]).rstrip():
        return Stance(not_applicable=_NO_CLOSER)
    complete = body != "params" or bool(kept.strip())
    call = F if complete else replace(F, arguments=F.arguments.removesuffix("}"), complete=False)
    return Stance(text, (call,), family.turn or " ")


def _closing(tail: str) -> str:
    found = re.match(r"\s*</[^<>]*>", tail)
    return found.group() if found else tail


def _quoted(family: Family) -> Stance:
    """Markers in backticks are prose, and the answer goes on."""
    found = [m.split("\n")[0].strip() for m in _shown_markers(family)]
    if not any(found):
        return Stance(not_applicable=_NO_MARKERS)
    said = Text("The marks " + " and ".join(f"`{m}`" for m in dict.fromkeys(found) if m) + " mean something.")
    return _drawn(family, said, F) if family.forms else _drawn(family, said)


def _shown_markers(family: Family) -> list[str]:
    calls = [form for form in family.forms[:1] if not form.bare]
    pairs = [m for form in calls for m in (form.opener, form.calls[1])]
    return [*pairs, *(family.reasoning or ()), family.turn]


def _cut(family: Family) -> Stance:
    parts: list[Part] = [Reasoning("some plan")] if family.reasoning else []
    parts += [Text("Let me look."), *([F, G] if family.forms else [])]
    return replace(_drawn(family, *parts), anywhere=True)


_SEPARATORS = 'a, b; c: d = e} ] ) { [ ( | \\ \' " < > \t\n\n, "k": 1}, {'
_LONG = "def f(x):\n    return x < 3  # “quoted” { } [ ]\n" * 220

CASES: dict[str, Callable[[Family], Stance]] = {
    "single": _with_calls(F),
    "parallel": _with_calls(F, G, replace(F, arguments='{"s": "y", "n": 4}', id="third00id")),
    "none": lambda family: _drawn(family, Text("Just an answer, a < b.")),
    "malformed": _malformed,
    "truncated at each place": _cut,
    "empty arguments": _with_calls(G),
    "nested": _saying(o={"k": [{"deep": "x"}, {"deep": "a {b} [c]"}]}),
    "unicode": _saying(s="né 数据 😀 “q” \u2028 \u00a0 ё́"),
    "text around": _with_calls(Text("Before."), F, Text("After.")),
    "duplicates": _with_calls(F, replace(F, id="123456789")),
    "10 KB arguments": _saying(s=_LONG),
    "separators inside strings": _saying(s=_SEPARATORS),
    "marker quoted in prose": _quoted,
    "call inside reasoning": _inside_reasoning,
    "missing opener": _without_opener,
    "missing closer": _without_closer,
}


@lru_cache(maxsize=1)
def _own() -> dict[tuple[str, str], dict[str, str]]:
    """The stances that sample files take themselves, by family and case."""
    found = {}
    for path in SAMPLES.glob("*.toml"):
        for row in tomllib.loads(path.read_text(encoding="utf-8")).get("stance", ()):
            found[path.stem, row.pop("case")] = row
    return found


def stance(family: Family, case: str) -> Stance:
    """The stance of ``family`` on ``case``."""
    made = CASES[case](family)
    return replace(made, **_own().get((family.name, case), {}))  # type: ignore[arg-type]


def unknown() -> list[tuple[str, str]]:
    """Stances of sample files on cases that do not exist."""
    return [key for key in _own() if key[1] not in CASES]


def page() -> str:
    """The table of families and cases."""
    reasons: list[str] = []
    rows = [_row(family, reasons) for family in families.table()]
    heads = ("family", *CASES)
    rule = ["---", *(":-:" for _ in CASES)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))
    notes = "\n".join(f"{i}. {why}" for i, why in enumerate(reasons, 1))
    return f"{_HEAD}\n{table}\n\n{notes}\n"


_HEAD = """# Model families, case by case

Written by `python docs/family_cases.py`. ✓: a sample, read as the turn that it was made from (`tests/families`).
A number: the case does not arise, for the reason of that number below. ✗ and a number: known to be read wrongly.
"""


def _row(family: Family, reasons: list[str]) -> Sequence[str]:
    cells = [family.name]
    for case in CASES:
        taken = stance(family, case)
        why = taken.known_broken or taken.not_applicable
        if why and why not in reasons:
            reasons.append(why)
        number = str(reasons.index(why) + 1) if why else "✓"
        cells.append(f"✗ {number}" if taken.known_broken else number)
    return cells


def samples() -> Iterator[tuple[Family, str, Stance]]:
    """Every stance that is a sample, those that are known to be read wrongly among them."""
    for family in families.table():
        for case in CASES:
            taken = stance(family, case)
            if not taken.not_applicable:
                yield family, case, taken


if __name__ == "__main__":
    (HERE / "cases.md").write_text(page(), encoding="utf-8")
