"""What was measured last, in the page of benchmarks and in the README."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks import compare_report, documents, product_report
from benchmarks.figures import newest, read_table

import check_page

ROOT = Path(__file__).resolve().parent.parent


def page() -> str:
    """Return docs/benchmarks.md with the newest run and the tables of the single experiments between their marks."""
    tables = {name: product_report.experiment(read_table(name)) for name in ("replay", "dispatch")}
    return documents.with_parts(
        ROOT / "docs" / "benchmarks.md", {"product": product_report.page(newest()), **tables}
    )


def comparison() -> str:
    """Return docs/comparison.md with the tables of the kept runs of ``make compare`` and ``make compare-gpu``."""
    timed = compare_report.timed_page(compare_report.read(compare_report.GPU_FILE))
    blocks = {"comparison": compare_report.page(compare_report.read()), "comparison-gpu": timed}
    return documents.with_parts(ROOT / "docs" / "comparison.md", blocks)


def charts() -> Mapping[str, str]:
    """Return the charts of the kept run of ``make compare``, by file name below docs/pictures."""
    return compare_report.pictures(compare_report.read())


def readme() -> str:
    """Return README.md with six figures of the newest measurements, and the score cards, between its marks."""
    blocks = {"product": product_report.summary(newest()), "cards": check_page.summary()}
    return documents.with_parts(ROOT / "README.md", blocks)
