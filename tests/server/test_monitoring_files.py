"""Dashboard and alerts name metrics that exist. ``make deploy`` checks the rest of them."""

from __future__ import annotations

import json
import re

import pytest

from engines.real_vllm import ROOT
from singletree.server.telemetry import Tracing

FILES = ROOT / "deploy" / "helm" / "singletree" / "files"


@pytest.mark.parametrize("name", ["dashboard.json", "alerts.yaml"])
def test_each_metric_exists_with_its_labels(name: str) -> None:
    text = (FILES / name).read_text(encoding="utf-8")
    registry = Tracing().registry
    labels: dict[str, set[str]] = {}
    for metric, names in registry._collector_to_names.items():
        for each in names:
            labels[each] = {*getattr(metric, "_labelnames", ()), "le"}
    used = set(re.findall(r"singletree_\w+", text))
    assert len(used) >= 10
    assert used <= set(labels)
    selectors = re.findall(
        r"(singletree_\w+)\{([^{}]*)\}", json.dumps(json.loads(text)) if name.endswith("json") else text
    )
    assert len(selectors) >= 4
    for metric, selector in selectors:
        assert set(re.findall(r"(\w+)(?:=~|!=|=)", selector)) <= labels[metric], (metric, selector)
