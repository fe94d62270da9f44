"""The OpenResponses checker's own cases, against our Responses API in memory.

Every event and body of all other tests goes through its schema too: ``protocols.judge_responses``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import llm_comply
import pytest
from llm_comply.schema import SpecLoader
from llm_comply.tests.open_responses import OPEN_RESPONSES_TESTS

from server.carrying import capsules
from server.serving import serving
from singletree.server.http.route_table import ROUTES

from . import comply

pytestmark = pytest.mark.filterwarnings("ignore:jsonschema.RefResolver:DeprecationWarning")

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>'
OUTPUTS = {"tool-calling": CALL, "reasoning-summary": "<think>\nLet me see.\n</think>\n\nIt is 555."}
PATHS = {row.path for row in ROUTES if row.method == "POST" and row.path.startswith("/v1/responses")}
CASES = [case for case in OPEN_RESPONSES_TESTS if f"/v1{case.endpoint}" in PATHS]


@cache
def spec() -> SpecLoader:
    """The description of the API."""
    return SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / "openresponses.json"))


def test_the_schema_is_the_current_one() -> None:
    assert spec().spec_version >= "2026-04-24"


@pytest.mark.parametrize("case", comply.cases(CASES))
async def test_the_checkers_own_cases(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # C32
    async with serving({"s": OUTPUTS.get(case.id, "One two three.")}, capsules=capsules()) as served:
        await comply.check(case, spec(), served, monkeypatch, "input")
