"""Make the table of docs/check.md from the cards that ``python -m benchmarks.check_servers`` wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import page_parts
from singletree.checking.contract import CHECKS
from singletree.checking.verdicts import ALL

DOCS = Path(__file__).resolve().parent
CARDS = DOCS.parent / "benchmarks" / "results" / "check"
_ORDER = ("singletree-scripted", "singletree", "llama-server", "vllm", "sglang", "litellm", "dynamo")
_MARKS = {"pass": "✓", "fail": "✗", "not applicable": "–", "undecided": "?"}


def page() -> str:
    """Return the page with the checks and the tables of the present cards."""
    return page_parts.with_parts(DOCS / "check.md", {"cards": f"{_checks()}\n{_cards()}"})


def summary() -> str:
    """Return what README.md shows: how many checks each measured server passes and fails."""
    lines = ["| server | pass | fail |", "| --- | ---: | ---: |"]
    for card in _measured():
        counts = card["counts"]
        lines.append(
            f"| {card['server']} {card['version']} | {counts.get('pass', 0)} | {counts.get('fail', 0)} |"
        )
    return "\n".join(lines)


def call_delays(protocol: str) -> list[str]:
    """Return after how many tokens a finished call arrives, of singletree and of Dynamo on their scripted engines."""
    found = []
    for name in ("singletree-scripted", "dynamo"):
        card = json.loads((CARDS / f"{name}.json").read_text(encoding="utf-8"))
        (reason,) = (
            each["reason"]
            for each in card["results"]
            if (each["check"], each["protocol"]) == ("call-delay", protocol)
        )
        found += re.findall(r"about (\d+) tokens", reason)
    return found


def _checks() -> str:
    rows = [f"| `{c.name}` | {c.title} | {c.users} | {c.reference} |" for c in CHECKS]
    return "\n".join(
        [
            "## Checks",
            "",
            "| check | holds if | users see otherwise | asked for by |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _measured() -> list[dict[str, Any]]:
    paths = [CARDS / f"{name}.json" for name in _ORDER]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def _cards() -> str:
    cards = _measured()
    heads = [f"{card['server']} {card['version']}, {card['date']}" for card in cards]
    lines = [
        "## Measured cards",
        "",
        "A cell has the marks of Messages, Chat and Responses: ✓ pass, ✗ fail, – not applicable, ? undecided, · none.",
        "",
        f"| check | {' | '.join(heads)} |",
        f"|---|{'---|' * len(cards)}",
    ]
    for check in CHECKS:
        cells = [_cell(card, check.name) for card in cards]
        lines.append(f"| `{check.name}` | {' | '.join(cells)} |")
    for card in cards:
        failed = [each for each in card["results"] if each["verdict"] == "fail"]
        lines += ["", f"### {card['server']} {card['version']}", ""]
        counted = ", ".join(f"{number} {verdict}" for verdict, number in card["counts"].items())
        lines += [f"{counted}, in {card['seconds']:.0f} s on a busy machine of two cores.", ""]
        lines += [f"- `{each['check']}` ({each['protocol']}): {_plain(each['reason'])}" for each in failed]
    return "\n".join(lines) + "\n"


def _cell(card: dict[str, Any], check: str) -> str:
    found = {each["protocol"]: each["verdict"] for each in card["results"] if each["check"] == check}
    return "".join(_MARKS[found[name]] if name in found else "·" for name in ALL)


def _plain(text: str) -> str:
    """Return ``text`` as one line of code, with none of the marks that Markdown reads."""
    return "`" + " ".join(text.split()).replace("`", "'") + "`"
