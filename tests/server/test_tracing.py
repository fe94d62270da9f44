"""What is told of a server's work: numbers in the metrics, one line a request in the log, and no word of a prompt."""

from __future__ import annotations

import pytest

from singletree.events import Finished
from singletree.server.answers.tracing import Trace, Tracing
from singletree.server.sessions.sessions import Step

from .test_sessions import Harness, remembering


def step(session: str) -> Step:
    return Step(session, 0.0, "m", 1, "appended", 100, 90)


@pytest.mark.parametrize(
    ("session", "shown"), [("s", "s"), ("a b", "a_b"), ("a\nb", "a\\nb"), ("é\x1b[0m", "\\xe9\\x1b[0m")]
)
def test_a_sessions_name_keeps_the_line_one_line(
    session: str, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "singletree.requests")
    trace = Trace(Tracing(), "POST", "/v1/messages", "req_1")
    trace.record_step(step(session))
    trace.generating("m", ())
    trace.generated(Finished("stop"))
    trace.close()
    assert caplog.records[0].getMessage().endswith(f"end=stop session={shown} matched=90 new=10")


async def test_tokens_are_counted_by_how_they_go_on() -> None:
    async with remembering() as served:
        main = Harness(served, "hi")
        await main.go_on("one")
        await main.go_on("two")
        main.said[0]["content"] = "ho"
        await main.go_on("three")
        steps = (await served.client.get("/v1/singletree/sessions/s")).json["steps"]
        metrics = (await served.client.get("/metrics")).body.decode()
    model = 'model="org/test-model"'
    matched, new = (sum(each[f"{kind}_tokens"] for each in steps) for kind in ("matched", "new"))
    assert f'singletree_prefix_tokens_total{{kind="matched",{model}}} {float(matched)}' in metrics
    assert f'singletree_prefix_tokens_total{{kind="new",{model}}} {float(new)}' in metrics
    assert f'singletree_tokens_total{{kind="prompt",{model}}} {float(matched + new)}' in metrics
    for course in ("first", "appended", "broken"):
        assert f'singletree_prefix_courses_total{{course="{course}",{model}}} 1.0' in metrics
    lost = float(steps[-1]["lost_tokens"])
    assert f'singletree_prefix_lost_tokens_total{{cause="message_changed",{model}}} {lost}' in metrics


def test_generations_that_wait_for_an_engine_are_exposed() -> None:
    tracing = Tracing()
    assert b"\nsingletree_generations_waiting 0.0\n" in tracing.exposition()
    tracing.waiting = lambda: 3
    assert b"\nsingletree_generations_waiting 3.0\n" in tracing.exposition()
