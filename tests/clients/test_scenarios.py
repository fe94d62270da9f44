"""Real harnesses when things go as they do: turns of all forms, and failures of all kinds.

What each harness does is its own way, the same as on the backend that it was written for.
"""

from __future__ import annotations

from itertools import product

import pytest

from clients.conftest import Perform, Workspace
from clients.harness import FEWER, HARNESSES, Harness
from clients.scenarios import SCENARIOS, Scenario
from clients.scripts import HERMES

_CASES = [
    pytest.param(scenario, harness, id=f"{scenario.name}-{harness.title}")
    for scenario, harness in product(SCENARIOS, HARNESSES)
    if scenario.is_smooth or harness in FEWER
]


@pytest.mark.parametrize(("scenario", "harness"), _CASES)
def test_scenario(ran: Perform, scenario: Scenario, harness: Harness, workspace: Workspace) -> None:
    expected = scenario.behaviour(harness)
    done = ran(harness, HERMES, scenario.turns, scenario.flags)
    output = done.outcome.output
    assert done.outcome.answer.startswith(expected.answer), output
    assert tuple(done.turns) == expected.asks, output
    first = done.turns.index(1)
    ends = [scenario.broken if at == first else "stop" for at in range(len(done.turns))]
    assert [play.finish for play in done.plays] == ends, output
    assert done.refused == scenario.refused.get(harness.speaks, {}), output
    assert expected.says in done.added(len(done.plays) - 1)
    if scenario.is_smooth:
        assert done.outcome.complaints == [], output
        done.came_back(harness)
