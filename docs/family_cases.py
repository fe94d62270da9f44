"""Define cases for every model family, and make family-cases.md, the table of them (``make docs``).

A family's stance on a case is a sample, or the reason why the case cannot arise, or a known defect and its reason.
Samples are made here from the family's declaration and a turn; a parser must return that turn. A sample file in
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
from singletree.parsing.family import SLOT, Family, markers
from singletree.parsing.render_turn import render_turn

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
    """What a family's model writes in a case, and the turn that this is; or the reason why there is no such case.

    Attributes:
        text: what the model writes after ``tail``, the end of the prompt.
        parts: the turn that a parser must return.
        anywhere: whether the text may be cut anywhere; the turn is then what came before the cut.
        forgiving: markers that the format may show or not show; a comparison leaves them and white space out.
        not_applicable: why the case cannot arise.
        known_broken: why the parser is known to return another turn.
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
_NO_MARK = "only its place and a known name mark a call of this family (H8)"
_NO_OPENER = "the prompt holds the opening marker of a call; the model begins with the name"
_NO_CLOSER = "nothing follows the arguments of a call"
_NO_MARKERS = "the family has no markers"


def _rendered(family: Family, *parts: Part) -> Stance:
    return Stance(render_turn(family, parts), parts, family.message_header or " ")


def _with_calls(*parts: Part) -> Callable[[Family], Stance]:
    return lambda family: _rendered(family, *parts) if family.forms else Stance(not_applicable=_NO_CALLS)


def _with_arguments(**arguments: object) -> Callable[[Family], Stance]:
    return _with_calls(ToolCall("f", json.dumps(arguments, ensure_ascii=False), "abcdefghi"))


def _malformed(family: Family) -> Stance:
    """Arguments that break in the middle: all of it comes back as text (H6), except for markers that end a turn."""
    if not family.forms:
        return Stance(not_applicable=_NO_CALLS)
    text = broken_behind(family)
    return Stance(text, (Text(text),), family.message_header or " ", forgiving=family.dropped_markers)


def broken_behind(family: Family, *parts: Part) -> str:
    """Return ``parts`` and then a call whose arguments break in the middle, as the family writes them."""
    form = family.forms[0]
    if "{args}" in form.call:
        return render_turn(family, [*parts, ToolCall("f", '{"s": oops}', "broken000")])
    rendered = render_turn(family, [*parts, ToolCall("f", '{"s": "zz"}', "broken000")])
    if form.literals:
        quote = form.literals.quote
        return rendered.replace(f"{quote}zz{quote}", f"{quote}zz{quote}{quote}oops{quote}")
    slots = {"{key}": "s", "{value}": "zz", "{string}": "true", "{type}": "string"}
    parameter = re.sub(r"\{\w+\}", lambda m: slots[m[0]], form.parameter)
    return rendered.replace(parameter, parameter + "oops ")


def _inside_reasoning(family: Family) -> Stance:
    if not family.reasoning or not family.forms:
        return Stance(not_applicable=_NO_CALLS if family.reasoning else _NO_THOUGHT)
    if family.forms[0].unmarked:
        return Stance(not_applicable=_NO_MARK)
    text = family.reasoning[0] + "plan" + family.message_header + render_turn(family, [F])
    return Stance(text, (Reasoning("plan"), F), family.message_header or " ")


def _without_opener(family: Family) -> Stance:
    """A call without its opening marker: text, unless models of the family are known to forget the marker."""
    if not family.forms:
        return Stance(not_applicable=_NO_CALLS)
    form, rendered = family.forms[0], render_turn(family, [F])
    if form.unmarked or not form.opener:
        return Stance(not_applicable=_NO_MARK if form.unmarked else _NO_OPENER)
    if form.optional:
        return Stance(rendered.removeprefix(form.calls[0]), (F,), family.message_header or " ")
    text = rendered.removeprefix(form.opener)
    stray = {tag for m in markers(family) for tag in _TAG.findall(m)}
    # Closers that do not look like tags are dropped as well (H9).
    stray |= {m.strip() for m in (SLOT.split(form.call)[-1], form.calls[1]) if re.search(r"\w", m)}
    # Where another form of the family needs no marker, the call is one without it.
    part = F if any(each.unmarked and text.startswith(each.opener) for each in family.forms) else Text(text)
    return Stance(text, (part,), family.message_header or " ", forgiving=tuple(sorted(stray)))


_TAG = re.compile(r"<[^<>\n]*>|\[/?[A-Z_]+\]")


def _without_closer(family: Family) -> Stance:
    """A call without its closing marker: complete if its arguments are (H5); cut if only the marker ends them (H7)."""
    if not family.forms:
        return Stance(not_applicable=_NO_CALLS)
    head, body, tail = re.split(r"\{(args|params|literals)\}", family.forms[0].call)
    kept = "" if body == "args" else tail[:1] if body == "literals" else _closing(tail)
    form = replace(family.forms[0], call=f"{head}{{{body}}}{kept}", calls=(family.forms[0].calls[0], ""))
    text = render_turn(replace(family, forms=(form,)), [F]).rstrip()
    if text == render_turn(family, [F]).rstrip():
        return Stance(not_applicable=_NO_CLOSER)
    complete = body != "params" or bool(kept.strip())
    call = F if complete else replace(F, arguments=F.arguments.removesuffix("}"), complete=False)
    return Stance(text, (call,), family.message_header or " ")


def _closing(tail: str) -> str:
    found = re.match(r"\s*</[^<>]*>", tail)
    return found.group() if found else tail


def _quoted(family: Family) -> Stance:
    """Markers in backticks: they are prose, and the answer continues."""
    found = [m.split("\n")[0].strip() for m in _shown_markers(family)]
    if not any(found):
        return Stance(not_applicable=_NO_MARKERS)
    prose = Text(
        "The marks " + " and ".join(f"`{m}`" for m in dict.fromkeys(found) if m) + " mean something."
    )
    return _rendered(family, prose, F) if family.forms else _rendered(family, prose)


def _shown_markers(family: Family) -> list[str]:
    calls = [form for form in family.forms[:1] if not form.unmarked]
    pairs = [m for form in calls for m in (form.opener, form.calls[1])]
    return [*pairs, *(family.reasoning or ()), family.message_header]


def _cut(family: Family) -> Stance:
    parts: list[Part] = [Reasoning("some plan")] if family.reasoning else []
    parts += [Text("Let me look."), *([F, G] if family.forms else [])]
    return replace(_rendered(family, *parts), anywhere=True)


_SEPARATORS = 'a, b; c: d = e} ] ) { [ ( | \\ \' " < > \t\n\n, "k": 1}, {'
_LONG = "def f(x):\n    return x < 3  # “quoted” { } [ ]\n" * 220

CASES: dict[str, Callable[[Family], Stance]] = {
    "single": _with_calls(F),
    "parallel": _with_calls(F, G, replace(F, arguments='{"s": "y", "n": 4}', id="third00id")),
    "none": lambda family: _rendered(family, Text("Just an answer, a < b.")),
    "malformed": _malformed,
    "truncated at each place": _cut,
    "empty arguments": _with_calls(G),
    "nested": _with_arguments(o={"k": [{"deep": "x"}, {"deep": "a {b} [c]"}]}),
    "unicode": _with_arguments(s="né 数据 😀 “q” \u2028 \u00a0 ё́"),
    "text around": _with_calls(Text("Before."), F, Text("After.")),
    "duplicates": _with_calls(F, replace(F, id="123456789")),
    "10 KB arguments": _with_arguments(s=_LONG),
    "separators inside strings": _with_arguments(s=_SEPARATORS),
    "marker quoted in prose": _quoted,
    "call inside reasoning": _inside_reasoning,
    "missing opener": _without_opener,
    "missing closer": _without_closer,
}


@lru_cache(maxsize=1)
def _own() -> dict[tuple[str, str], dict[str, str]]:
    """Return the stances of sample files, by family and case."""
    found = {}
    for path in SAMPLES.glob("*.toml"):
        for row in tomllib.loads(path.read_text(encoding="utf-8")).get("stance", ()):
            found[path.stem, row.pop("case")] = row
    return found


def stance(family: Family, case: str) -> Stance:
    """Return the stance of ``family`` on ``case``."""
    made = CASES[case](family)
    return replace(made, **_own().get((family.name, case), {}))  # type: ignore[arg-type]


def unknown() -> list[tuple[str, str]]:
    """Return (family, case) of stances in sample files on cases that do not exist."""
    return [key for key in _own() if key[1] not in CASES]


def page() -> str:
    """Return the table of families and cases."""
    reasons: list[str] = []
    rows = [_row(family, reasons) for family in families.table()]
    heads = ("family", *CASES)
    rule = ["---", *(":-:" for _ in CASES)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))
    notes = "\n".join(f"{i}. {why}" for i, why in enumerate(reasons, 1))
    return f"{_HEAD}\n{table}\n\n{notes}\n"


_HEAD = """# Model families, case by case

Written by `make docs`. ✓: the parser returns the turn from which the sample was made (`tests/families`). A number: the
case does not arise, for the reason with that number below. ✗ and a number: known to be parsed wrongly, with the reason.
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
    """Yield every stance that is a sample, also those that are known to be parsed wrongly."""
    for family in families.table():
        for case in CASES:
            taken = stance(family, case)
            if not taken.not_applicable:
                yield family, case, taken
