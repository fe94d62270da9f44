"""The figures of the newest run of ``make bench``, in the page of benchmarks and in the README."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import documents, product_report  # noqa: E402 (found by the line before)
from benchmarks.figures import newest  # noqa: E402


def page() -> str:
    """Return docs/benchmarks.md with the figures of the newest run between its marks."""
    return _with_block(documents.PATH, product_report.page(newest()))


def readme() -> str:
    """Return README.md with a line for each target between its marks; as it is if it has none."""
    return _with_block(ROOT / "README.md", product_report.summary(newest()))


def _with_block(path: Path, text: str) -> str:
    document = path.read_text(encoding="utf-8")
    changed = documents.replaced(product_report.BLOCK, text, document)
    return document if changed is None else changed
