"""What was measured last, in the page of benchmarks and in the README."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks import compare_report
from benchmarks.figures import newest

import check_page
import comparison_page
import page_parts
import product_page

ROOT = Path(__file__).resolve().parent.parent


def page() -> str:
    """Return docs/benchmarks.md with the newest run between its marks."""
    return page_parts.with_parts(ROOT / "docs" / "benchmarks.md", {"product": product_page.page(newest())})


def comparison() -> str:
    """Return docs/comparison.md with the tables of the kept runs of ``make compare`` and ``make compare-gpu``."""
    timed = comparison_page.timed_page(compare_report.read(compare_report.GPU_FILE))
    blocks = {"comparison": comparison_page.page(compare_report.read()), "comparison-gpu": timed}
    return page_parts.with_parts(ROOT / "docs" / "comparison.md", blocks)


def charts() -> Mapping[str, str]:
    """Return the charts of the kept run of ``make compare``, by file name below docs/pictures."""
    return comparison_page.pictures(compare_report.read())


def readme() -> str:
    """Return README.md with six figures of the newest measurements, and the score cards, between its marks."""
    own, other = comparison_page.in_place(compare_report.read(), "vLLM")
    early, late = check_page.call_delays("messages")
    felt = [
        [
            "generated tokens in place in the next prompt, real sessions",
            own,
            f"{other} with vLLM's own server",
        ],
        [
            "tokens from the end of a tool call until the harness has it, Messages",
            early,
            f"{late} with Dynamo",
        ],
    ]
    blocks = {"product": product_page.summary(newest(), felt), "cards": check_page.summary()}
    return page_parts.with_parts(ROOT / "README.md", blocks)
