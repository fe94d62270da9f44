"""The simulated engines of ``benchmarks/routing.py``: what they cache, and that the modes differ as they should."""

from __future__ import annotations

import asyncio

from benchmarks.routing import EVENTS, Outcome, row, simulate
from benchmarks.simulated_engines import EngineSpeed, VirtualClock


def simulated(mode: str) -> Outcome:
    return asyncio.run(simulate(mode, 2, 4, 3, EngineSpeed(blocks=470), 0.25))


def test_kv_aware_routing_hits_more_than_turns() -> None:
    kv, events, turns = (simulated(mode) for mode in ("kv", EVENTS, "round-robin"))
    assert len(kv.firsts) == len(events.firsts) == len(turns.firsts) == 12
    assert kv.prompt == turns.prompt
    assert min(kv.cached, events.cached) > turns.cached
    assert events.predicted_off <= 0.1 * events.prompt
    assert row(kv).startswith("| kv | ")


def test_a_simulation_repeats_itself() -> None:
    one, other = simulated("power-of-two"), simulated("power-of-two")
    assert (one.cached, one.firsts) == (other.cached, other.firsts)


def test_a_clock_runs_in_order() -> None:
    clock, ran = VirtualClock(), list[tuple[str, float]]()
    for name, seconds in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        clock.after(seconds, lambda name=name: ran.append((name, clock.now)))  # type: ignore[misc]
    while clock.step():
        pass
    assert ran == [("a", 1.0), ("b", 2.0), ("c", 2.0)]
