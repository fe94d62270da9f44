"""What the processes of one server share in a file: sums, rates, loops, moves; what happens when it cannot be used."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from singletree import key_files
from singletree.conversation import AgentContext
from singletree.errors import BadConfiguration, RateLimited
from singletree.key_files import KeyFile, RequestRate
from singletree.processes import served_process
from singletree.processes.served_process import (
    SharedCosts,
    SharedMap,
    SharedState,
    join_processes,
    share_state,
)
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.sessions.step import Cost
from singletree.server.settings.config import Config

from .agent_traffic import LAYOUT, Agent
from .inspecting import peers_in_memory
from .owning import tenants
from .serving import body, serving
from .test_budgets import CHAT, QUESTION, SCRIPTS, ask, call_again, words
from .test_key_file import SESSIONS, entry

Two = tuple[SharedState, SharedState]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    """The file as two processes have it open."""
    path = tmp_path / "shared.sqlite"
    with closing(SharedState(path)) as here, closing(SharedState(path)) as there:
        yield here, there


def test_each_process_reads_the_sums_of_all(two: Two) -> None:
    here, there = (SharedCosts(state, "") for state in two)
    here.charge("s", "", Cost(1, 10))
    there.charge("s", "a", Cost(1, 5))
    here.charge("", "", Cost(1, 1))
    for sums in (here, there):
        assert sums.agents("s") == {"": Cost(1, 10), "a": Cost(1, 5)}
        assert sums.spent == Cost(3, 16)
        assert sums.agents("other") == {}
    assert (here.all[1], there.all[1]) == (11, 5), "metrics add up the processes"
    assert SharedCosts(two[0], "b").spent == Cost()


def test_each_process_finds_the_session_of_a_sub_agent_of_a_sub_agent(two: Two) -> None:
    here, there = (SharedCosts(state, "") for state in two)
    assert here.place("b", AgentContext(parent_session_id="a")) == ("a", "b")
    assert there.place("c", AgentContext(parent_session_id="b")) == ("a", "c")


def test_a_map_is_that_of_its_owner_and_bounded(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = (SharedMap(state, "a", "moves") for state in two)
    here.put(("s", ""), "beta")
    assert there.items() == [(["s", ""], "beta")]
    assert (there.get(("s", "")), len(there), len(SharedMap(two[1], "b", "moves"))) == ("beta", 1, 0)
    there.pop(("s", ""))
    assert (here.get(("s", "")), len(here)) == (None, 0)
    monkeypatch.setattr(served_process, "_KEPT", 3)
    for number in range(5):
        here.put(str(number), number)
    here.put("3", 3)  # as it was
    assert [value for _, value in there.items()] == [4, 3, 2]


def test_costs_that_cannot_be_written_are_written_later(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(served_process, "_WAIT_SECONDS", 0.01)
    with closing(SharedState(tmp_path / "shared.sqlite")) as state:
        here, there = SharedCosts(state, ""), SharedCosts(two[1], "")
        with closing(sqlite3.connect(tmp_path / "shared.sqlite", isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            here.charge("s", "", Cost(1, 10))
            assert here.spent == Cost()
        here.charge("s", "", Cost(1, 5))
        assert there.spent == Cost(2, 15)
    assert [each.message for each in caplog.records] == [
        "what the processes of this server share cannot be used (database is locked)"
    ]


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="set TMPDIR to a folder of this machine"):
        SharedState(tmp_path / "none" / "shared.sqlite")


async def test_a_budget_holds_whichever_process_is_asked(two: Two) -> None:
    config = Config(session_budget="generated=9", workers=2)
    async with serving(SCRIPTS, config=config) as here, serving(SCRIPTS, config=config) as there:
        for served, state in zip((here, there), two, strict=True):
            share_state(served.service, state)
        statuses = [(await ask(served.client)).status for served in (here, there, here)]
        refused = await ask(there.client)
        lowered = await ask(here.client, session="new", x_singletree_budget="generated=1")
        spent = await ask(there.client, session="new", x_singletree_budget="generated=1")
    assert statuses == [200, 200, 402]
    assert words(refused).startswith("the budget of this session is used up: generated 10 of 9 tokens")
    assert (lowered.status, spent.status) == (200, 402)


async def test_a_nameless_session_is_warned_about(two: Two) -> None:
    config = Config(session_budget="generated=9")
    async with serving(SCRIPTS, config=config) as served:
        share_state(served.service, two[0])
        for peers in peers_in_memory(1):
            join_processes(served.service, peers)
        named, nameless = [
            (await served.client.post(CHAT, body(CHAT, QUESTION), headers)).headers.get(
                "x-singletree-warning"
            )
            for headers in ({"x-session-id": "s"}, {})
        ]
    assert named is None
    assert nameless is not None
    assert "which has no name; send x-session-id" in nameless


async def test_a_key_has_one_budget_in_all_processes(two: Two) -> None:
    settings = {"key_budget": "generated=9"}
    async with tenants(SCRIPTS, settings) as here, tenants(SCRIPTS, settings) as there:
        for them, state in zip((here, there), two, strict=True):
            share_state(them.served.service, state)
        statuses = [(await ask(them.a, session=f"s{id(them)}")).status for them in (here, there, here)]
        of_b = (await ask(there.b)).status
    assert (statuses, of_b) == ([200, 200, 402], 200)


async def test_each_process_lists_the_sums_of_all_keys(two: Two) -> None:
    async with tenants(SCRIPTS) as here, tenants(SCRIPTS) as there:
        for them, state, peers in zip((here, there), two, peers_in_memory(2), strict=True):
            share_state(them.served.service, state)
            join_processes(them.served.service, peers)
        for asked in (here.a, there.a, there.b):
            assert (await ask(asked)).status == 200
        listed = [(await them.admin.get(SESSIONS)).json["keys"] for them in (here, there)]
        own = [(await them.a.get(SESSIONS)).json["keys"] for them in (here, there)]
        scraped = [them.served.service.sessions.costs_here().turns for them in (here, there)]
    assert listed[0] == listed[1]
    assert sorted(each["turns"] for each in listed[0].values()) == [0, 1, 2]
    assert [[each["turns"] for each in keys.values()] for keys in own] == [[2], [2]]
    assert scraped == [1, 2], "metrics add up the processes"


def test_the_requests_a_minute_of_a_name_are_those_of_all_processes(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = tmp_path / "keys.toml", [0.0]
    monkeypatch.setattr(key_files, "_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(RequestRate.__init__, "__kwdefaults__", {"clock": lambda: now[0]})
    path.write_text(entry("a", "one", requests_per_minute=2) + entry("b", "two", requests_per_minute=1))
    here, there = (KeyFile(path) for _ in two)
    for keys, state in zip((here, there), two, strict=True):
        keys.change_level = SharedMap(state, "", "rates").change
    here()[0].admit()
    there()[0].admit()
    for keys in (here, there):
        with pytest.raises(RateLimited) as refused:
            keys()[0].admit()
        assert refused.value.retry_after == 30
    there()[1].admit()
    now[0] += 30
    there()[0].admit()
    with pytest.raises(RateLimited):
        here()[0].admit()


def test_requests_a_minute_are_counted_here_while_the_file_cannot_be_used(two: Two) -> None:
    rates = SharedMap(two[0], "", "rates")
    rate = RequestRate(1, partial(rates.change, "a"))
    two[0].close()
    rate.admit()
    with pytest.raises(RateLimited):
        rate.admit()


async def test_a_loop_is_stopped_over_processes_and_the_user_may_go_on(two: Two) -> None:
    config = Config(session_budget="loops=3")
    memory = TurnMemory(2**20)
    async with (
        serving(SCRIPTS, config=config, memory=memory, layout=LAYOUT) as here,
        serving(SCRIPTS, config=config, memory=memory, layout=LAYOUT) as there,
    ):
        for served, state in zip((here, there), two, strict=True):
            share_state(served.service, state)
        agent = Agent(here, "[[script:call]] Go.", {"x-session-id": "s"})
        assert [await call_again(agent, "same") for _ in range(4)] == [200, 200, 200, 402]
        agent.messages.append({"role": "user", "content": "[[script:call]] Try again."})
        agent.served = there
        assert [await call_again(agent, "same") for _ in range(4)] == [200, 200, 200, 402]
