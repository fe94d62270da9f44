"""The files of ``deploy/`` start vLLM with what singletree uses of it."""

from __future__ import annotations

from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[1] / "deploy"


@pytest.mark.parametrize("name", ["compose.yaml", "helm/singletree/templates/engine-statefulset.yaml"])
@pytest.mark.parametrize(
    "flag", ["--enable-scale-out", "--enable-prompt-tokens-details", "--enable-prefix-caching"]
)
def test_vllm_is_started_with(name: str, flag: str) -> None:
    # Without the first, vLLM has no interface for pictures beside token ids.
    assert f"- {flag}\n" in (DEPLOY / name).read_text(encoding="utf-8")
