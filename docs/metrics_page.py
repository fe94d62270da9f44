"""Make the table of metrics in metrics.md from the metrics of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import page_parts
from singletree.server.telemetry import Tracing

DOCS = Path(__file__).resolve().parent


def page() -> str:
    """Return the text of metrics.md with the present table."""
    return page_parts.with_parts(DOCS / "metrics.md", {"metrics": table()})


def table() -> str:
    """Return a row for each metric: its name, type, labels and meaning."""
    tracing = Tracing()
    # It is in its own registry, without a metric.
    rows = sorted(_row(each) for each in tracing.registry._collector_to_names if each is not tracing)
    return "\n".join(["| metric | type | labels | meaning |", "| --- | --- | --- | --- |", *rows]) + "\n"


def _row(metric: Any) -> str:
    name = metric._name + ("_total" if metric._type == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in metric._labelnames) or "-"
    return f"| `{name}` | {metric._type} | {labels} | {metric._documentation} |"
