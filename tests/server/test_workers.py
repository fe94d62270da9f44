"""Several processes of one server: what they refuse, what they share, and what they ask each other."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from singletree.errors import BadConfiguration
from singletree.prefix_breaks.causes import CAUSES
from singletree.processes.worker_processes import check_shareable, for_processes
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.sessions.request_headers import InFlight, RequestKey, is_repetition
from singletree.server.sessions.sessions import MovedSession, Sessions
from singletree.server.sessions.step import Break
from singletree.server.settings.config import Config
from singletree.server.telemetry import Tracing

from .serving import serving
from .test_replay import LAYOUT


@pytest.mark.parametrize(
    "config",
    [
        Config(workers=2),
        Config(workers=2, engine="llamacpp"),
        Config(workers=2, each_model=(Config(engine_url=("http://127.0.0.1:1",)), Config(engine="vllm"))),
    ],
)
def test_an_engine_inside_the_server_is_refused(config: Config) -> None:
    with pytest.raises(BadConfiguration, match="--engine-url, or leave --workers out"):
        check_shareable(config)


def test_an_engine_server_is_shared() -> None:
    check_shareable(Config(workers=2, engine_url=("http://127.0.0.1:1",)))
    check_shareable(Config(workers=2, engine="scripted"))


def test_all_models_of_all_processes_have_the_same_key(tmp_path: Path) -> None:
    each = (Config(engine_url=("http://127.0.0.1:1",)), Config(engine_url=("http://127.0.0.1:2",)))
    config = for_processes(Config(workers=2, each_model=each), "127.0.0.1", 4321, tmp_path)
    configs = (config, *config.each_model)
    assert {one.capsule_key for one in configs} == {config.capsule_key} != {()}
    assert {(one.host, one.port, one.shared_folder) for one in configs} == {("127.0.0.1", 4321, tmp_path)}
    assert pickle.loads(pickle.dumps(config)) == config
    given = for_processes(Config(workers=2, capsule_key=("a passphrase of ours",)), "::1", 1, tmp_path)
    assert given.capsule_key == ("a passphrase of ours",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"turn_memory_url": "redis://127.0.0.1"}, "--turn-memory-url needs --capsule-key"),
        (
            {
                "turn_memory_url": "redis://127.0.0.1",
                "turn_memory_path": Path("t"),
                "capsule_key": ("k" * 16,),
            },
            "leave one of them out",
        ),
        ({"store_url": "postgresql://a", "store_path": Path("s")}, "leave one of them out"),
        ({"workers": 0}, "--workers is 0"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfiguration, match=message):
        Config(**settings)


def test_the_causes_of_breaks_go_to_another_process() -> None:
    for cause in CAUSES:
        broken = Break(cause.name, cause.reason, cause.cure, 1, "user", "a", "b", "c", 5, change=cause.change)
        assert pickle.loads(pickle.dumps(broken)) == broken


async def _ask(served: Any, content: str, *earlier: dict[str, str]) -> dict[str, str]:
    messages = [*earlier, {"role": "user", "content": content}]
    reply = await served.client.post(
        "/v1/chat/completions",
        {"model": "alias", "messages": messages},
        headers={"x-singletree-session": "s"},
    )
    return {"role": "assistant", "content": reply.json["choices"][0]["message"]["content"]}


async def test_a_session_moves_with_all_that_it_is_compared_by() -> None:
    scripts = {"a": "One.", "b": "Two."}
    async with serving(scripts, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        here = served.service.sessions
        answer = await _ask(served, "First. [[script:a]]")
        moved = here.take("s")
        assert moved is not None
        assert here.get("s") is None
        there = Sessions(2**20)
        there.receive(pickle.loads(pickle.dumps(moved)))
        served.service.sessions = there
        question = {"role": "user", "content": "First. [[script:a]]"}
        await _ask(served, "Second. [[script:b]]", question, answer)
        session = there.get("s")
        assert session is not None
        assert [step.course for step in session.steps] == ["first", "appended"]
        assert (session.requests, len(session.records)) == (2, 1)


async def test_two_parts_of_a_session_become_one() -> None:
    async with serving({"a": "One.", "b": "Two."}, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        here, parts = served.service.sessions, list[MovedSession]()
        for script in ("a", "b"):
            await _ask(served, f"{script} [[script:{script}]]")
            part = here.take("s")
            assert part is not None
            parts.append(part)
        for part in reversed(parts):
            here.receive(part)
        session = here.get("s")
        assert session is not None
        assert [step.at for step in session.steps] == sorted(step.at for part in parts for step in part.steps)
        assert (session.requests, len(session.records), session.records_made) == (2, 2, 2)
        assert here.take("none") is None


def test_only_the_later_of_two_equal_requests_is_a_repetition() -> None:
    sure, likely = RequestKey(b"d", certain=True), RequestKey(b"d")
    assert is_repetition(sure, [0.1])
    assert not is_repetition(sure, [-0.1])
    assert not is_repetition(likely, [0.1])
    assert is_repetition(likely, [1.5])
    assert not is_repetition(sure, [0.1, 0.2])


def test_equal_requests_of_other_processes_are_looked_for_once() -> None:
    asked: list[RequestKey] = []
    cancelled: list[str] = []
    requests = InFlight(now=lambda: 5.0)
    requests.repeat_elsewhere = asked.append
    key = RequestKey(b"d", certain=True)
    with requests.guard(key, lambda: cancelled.append("first")):
        assert (asked, requests.starts(b"d")) == ([key], [5.0])
        requests.cancel(b"d")
        requests.cancel(b"other")
        assert (cancelled, requests.starts(b"d")) == (["first"], [])


def test_a_gauge_counts_what_runs() -> None:
    tracing = Tracing()
    tracing.running += 2
    assert b"singletree_generations_in_flight 2.0" in tracing.exposition()
