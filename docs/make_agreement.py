"""Write agreement.md: how often the families here parse public parser cases as the authors of the cases expect.

    python docs/make_agreement.py CASES [--show]

``CASES`` is a folder of JSON Lines files (one row: family, text, tools, the expected parts). ``--show`` prints every
difference that no rule explains.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agreement_rules import RULES, Difference
from singletree import families
from singletree.conversation import Reasoning, Text, Tool, Turn
from singletree.errors import BadConfiguration
from singletree.events import fold
from singletree.parsing.family import Family
from singletree.parsing.parser import Parser

Row = Mapping[str, Any]
HERE = Path(__file__).parent

# Families of the cases that have another name, or only one half, here.
OTHER_NAMES = {
    "kimi_k2 / k25": "kimi_k2", "deepseek_v3 / r1": "deepseek_v3", "hunyuan hy3": "hy_v3", "granite 3.1": "granite",
    "mistral v11+": "mistral", "qwen3.5 / nemotron3 (qwen3_coder)": "qwen3_coder", "qwen3+hermes": "qwen3",
    "gigachat3.1": "gigachat3", "hunyuan": "hy_v3", "json_array": "xlam", "nemotron3": "nemotron_v3",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row with the family that parses it, the end of its prompt, and the answers that count as agreement."""

    source: str
    family: Family
    row: Row
    tail: str
    answers: tuple[dict[str, Any], ...]


def cases(folder: Path) -> Iterator[Case]:
    """Yield all rows of all files that name a family and hold a text."""
    for source, read in SOURCES.items():
        for line in (folder / source).read_text(encoding="utf-8").splitlines():
            yield from read(source, json.loads(line))


def disagreement(case: Case) -> Difference | None:
    """Return how the parsed row differs from the case's answers; None if it equals one of them."""
    ours = parsed(case)
    if any(same(ours, answer, partial=bool(case.row.get("is_partial"))) for answer in case.answers):
        return None
    return Difference(case.source, case.family.name, case.row, ours, case.answers)


def rule_of(difference: Difference) -> str:
    """Return the house rule that explains a difference; empty if none does."""
    return next((rule for rule, explains in RULES if explains(difference)), "")


def parsed(case: Case) -> dict[str, Any]:
    """Parse the row; return reasoning, content and calls under the names that the cases use."""
    parser = Parser(case.family, list(_tools(case.row)), case.tail)
    turn: Turn = fold([*parser.feed(case.row["text"]), *parser.close()])
    return {
        "reasoning": [p.text for p in turn.parts if isinstance(p, Reasoning)],
        "content": "".join(p.text for p in turn.parts if isinstance(p, Text)),
        "tool_calls": [(c.name, _parsed(c.arguments), c.complete) for c in turn.tool_calls],
    }


def same(ours: Mapping[str, Any], answer: Mapping[str, Any], *, partial: bool) -> bool:
    """Compare reasoning and text without white space, and arguments as values; ``partial`` allows a beginning."""
    if "reasoning" in answer and _plain(ours["reasoning"]) != _plain(answer["reasoning"]):
        return False
    if "content" in answer and _plain(ours["content"]) != _plain(answer["content"]):
        return False
    if "tool_calls" not in answer:
        return True
    calls = [c for c in ours["tool_calls"] if partial or c[2]]
    wanted = [(c["name"], _parsed(c["arguments"])) for c in answer["tool_calls"] or ()]
    if len(calls) != len(wanted):
        return False
    pairs = zip(calls, wanted, strict=True)
    return all(c[0] == w[0] and (c[1] == w[1] or (partial and _begins(c[1], w[1]))) for c, w in pairs)


def _plain(text: Any) -> str:
    return "".join("".join(text or "").split())


def _begins(one: Any, other: Any) -> bool:
    ours, theirs = (_plain(json.dumps(x) if not isinstance(x, str) else x) for x in (one, other))
    return ours.startswith(theirs.rstrip('"}')) or theirs.startswith(ours.rstrip('"}'))


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _tools(row: Row) -> Iterable[Tool]:
    for tool in row.get("tools") or ():
        function = tool.get("function", tool)
        if isinstance(function, dict) and "name" in function:
            parameters = function.get("parameters")
            yield Tool(function["name"], parameters=_parsed(parameters) if parameters else None)


def _family(tools: str | None, reasoning: str | None) -> Family | None:
    tools, reasoning = (OTHER_NAMES.get(name, name) if name else None for name in (tools, reasoning))
    try:
        if tools and reasoning:
            whole = families.get(tools)
            return whole if whole.reasoning else families.pair(reasoning=reasoning, tools=tools)
        if tools:
            return _without_reasoning(families.pair(tools=tools))
        return families.pair(reasoning=reasoning) if reasoning else None
    except BadConfiguration:
        return None


def _without_reasoning(family: Family) -> Family:
    return replace(family, reasoning=None, also_reasoning=(), also_ends_reasoning=(), starts_open=False)


def _authored(source: str, row: Row) -> Iterator[Case]:
    family = _family(row["family_tool"], row["family_reasoning"] or row["family_tool"])
    family = family or _family(row["family_tool"], None)
    if family:
        yield Case(source, family, row, row["generation_prompt_tail"] or "", (row["expected"],))


def _llamacpp(source: str, row: Row) -> Iterator[Case]:
    template = row["file"].rpartition("/")[2]
    family = _FAMILY_OF_TEMPLATE.get(template) or row["family_tool"] or row["family_reasoning"]
    whole = _family(family, row["family_reasoning"] or family) if family else None
    whole = whole or (_family(family, None) if family else None)
    if whole:
        read = (
            whole
            if row["reasoning_format"] or whole.message_header or whole.text
            else _without_reasoning(whole)
        )
        yield Case(source, read, row, row["generation_prompt"] or " ", (row["expected"],))


_FAMILY_OF_TEMPLATE = {
    "meetkai-functionary-medium-v3.1.jinja": "functionary_v3_1",
    "meetkai-functionary-medium-v3.2.jinja": "functionary_v3_2",
}


def _sglang(source: str, row: Row) -> Iterator[Case]:
    family = _family(row["family_tool"], row["family_reasoning"])
    if family and row["text"]:
        wanted = row["expected"]
        halves = {k: wanted[k] for k in ("reasoning", "content", "tool_calls") if k in wanted}
        if not row["family_reasoning"]:
            halves.pop("reasoning", None)
        if not row["family_tool"]:
            halves.pop("tool_calls", None)
        yield Case(source, family, row, "", (halves,))


def _dynamo(source: str, row: Row) -> Iterator[Case]:
    family = _family(row["family_tool"], row["family_reasoning"])
    answers = [a for a in (_dynamo_answer(row["expected"].get(e)) for e in row["expected"]) if a]
    if family and row["text"] and answers:
        yield Case(source, family, row, "", tuple(answers))


def _dynamo_answer(expected: Any) -> dict[str, Any] | None:
    if not isinstance(expected, dict):
        return None
    if "reasoning_text" in expected:
        return {"reasoning": [expected["reasoning_text"] or ""], "content": expected.get("normal_text") or ""}
    if "calls" in expected:
        return {"tool_calls": expected["calls"], "content": expected.get("normal_text") or ""}
    return None


SOURCES: dict[str, Callable[[str, Row], Iterator[Case]]] = {
    "authored_samples.jsonl": _authored,
    "llamacpp_test_chat.jsonl": _llamacpp,
    "sglang_2026-08.jsonl": _sglang,
    "dynamo_parity_2026-06.jsonl": _dynamo,
}


def page(folder: Path) -> tuple[str, list[Difference]]:
    """Return the page, and the differences that no rule explains."""
    agreed: Counter[tuple[str, str]] = Counter()
    rows: Counter[tuple[str, str]] = Counter()
    rules: Counter[tuple[str, str]] = Counter()
    unexplained = []
    for case in cases(folder):
        rows[case.source, case.family.name] += 1
        difference = disagreement(case)
        if difference is None:
            agreed[case.source, case.family.name] += 1
        elif rule := rule_of(difference):
            rules[case.source, rule] += 1
        else:
            rules[case.source, "unexplained"] += 1
            unexplained.append(difference)
    return "\n".join(
        [*_HEAD, *_sources(rows, agreed), *_by_rule(rules), *_by_family(rows, agreed)]
    ) + "\n", unexplained


_HEAD = (
    "# Agreement with public parser cases",
    "",
    "Written by `python docs/make_agreement.py CASES`. A row agrees if reasoning and text are the same except for",
    "white space, and calls have the same names and arguments. If a row records several engines, one is enough.",
    "[family-cases.md](family-cases.md) shows what every family does in every case of our own list.",
    "",
)


def _sources(rows: Counter[tuple[str, str]], agreed: Counter[tuple[str, str]]) -> Iterator[str]:
    yield from ("| Cases | Rows | Agree | Share |", "|---|---:|---:|---:|")
    for source in SOURCES:
        total, right = (sum(n for (s, _), n in c.items() if s == source) for c in (rows, agreed))
        yield f"| {source} | {total} | {right} | {right / max(total, 1):.1%} |"


def _by_rule(rules: Counter[tuple[str, str]]) -> Iterator[str]:
    yield from (
        "",
        "## Why the others differ",
        "",
        "| Rule | " + " | ".join(SOURCES) + " |",
        "|---|" + "---:|" * len(SOURCES),
    )
    for rule in [*dict(RULES), "unexplained"]:
        counts = [rules[source, rule] for source in SOURCES]
        if any(counts):
            yield f"| {rule} | " + " | ".join(map(str, counts)) + " |"


def _by_family(rows: Counter[tuple[str, str]], agreed: Counter[tuple[str, str]]) -> Iterator[str]:
    yield from (
        "",
        "## By family (agree / rows)",
        "",
        "| Family | " + " | ".join(SOURCES) + " |",
        "|---|" + "---:|" * len(SOURCES),
    )
    for family in sorted({f for _, f in rows}):
        cells = (f"{agreed[s, family]}/{rows[s, family]}" if rows[s, family] else "" for s in SOURCES)
        yield f"| {family} | " + " | ".join(cells) + " |"


def main(arguments: list[str]) -> int:
    """Write the page; return 1 if a difference is unexplained, else 0."""
    text, unexplained = page(Path(arguments[0]))
    (HERE / "agreement.md").write_text(text, encoding="utf-8")
    for difference in unexplained if "--show" in arguments else ():
        print(difference.shown())
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
