"""What a session will do next: seen by the server, and given to an engine that reads it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from singletree.engines.engine import Chunk, EngineInfo, GenerationJob, Outlook
from singletree.foresight import UNKNOWN_PAUSE
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.settings.config import Config
from singletree.testing.scripted_engine import ScriptedEngine

from .agent_traffic import CALL, LAYOUT, Agent
from .serving import TOKENIZER, Served, body, serving

SCRIPTS = {"call": CALL, "end": "Done.", "sub": "Found."}
SESSION = {"x-claude-code-session-id": "s"}


class ReadingEngine(ScriptedEngine):
    """Reads outlooks; ``outlooks`` has those of its jobs."""

    def __init__(self) -> None:
        end = TOKENIZER.added_tokens["<|im_end|>"]
        super().__init__(TOKENIZER.encode, TOKENIZER.decode, SCRIPTS, end_token_id=end)
        self.outlooks: list[Outlook | None] = []

    def info(self) -> EngineInfo:
        return replace(super().info(), reads_outlooks=True)

    def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        self.outlooks.append(job.outlook)
        assert job.outlook is None or job.outlook.is_running
        return super().generate(job)


@asynccontextmanager
async def reading(**settings: Any) -> AsyncIterator[tuple[Served, list[Outlook]]]:
    engine: Any = ReadingEngine()
    async with serving(engine=engine, memory=TurnMemory(2**20), layout=LAYOUT, **settings) as served:
        yield served, engine.outlooks


def agent(served: Served, script: str, **headers: str) -> Agent:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Agent(served, f"[[script:{script}]] Go. " + "word " * 50, SESSION | named)


async def test_a_call_goes_out_and_its_session_is_expected_after_the_usual_pause() -> None:
    async with reading() as (served, outlooks):
        main = agent(served, "call,call,call,end")
        for usual in (UNKNOWN_PAUSE, 7.0, 7.0):  # the median of what was seen
            await main.ask()
            outlook = outlooks[-1]
            assert (outlook.is_running, outlook.is_over) == (False, False)
            assert outlook.returns_at == pytest.approx(time.monotonic() + usual, abs=1)
            outlook.since -= 7.0  # so long did the tool run
        await main.ask()
        assert outlook.returns_at is None, "the answer has no call"
        assert not outlook.is_over, "a person may go on"
    assert outlook.goes_on
    assert {id(each) for each in outlooks} == {id(outlook)}, "it goes with the conversation"


async def test_a_sub_agent_that_answers_is_over() -> None:
    async with reading() as (served, outlooks):
        main, sub = agent(served, "call,end"), agent(served, "call,sub", x_claude_code_agent_id="a")
        await main.ask()
        await sub.ask()
        assert not outlooks[1].is_over, "its call is out"
        await sub.ask()
        assert [each.is_over for each in outlooks] == [False, True, True]
        await sub.ask()
        assert not outlooks[3].is_running


async def test_the_last_request_of_a_session_says_so() -> None:
    async with reading() as (served, outlooks):
        await agent(served, "call").ask(**{"x-dynamo-session-final": "1"})
    assert outlooks[0].is_over


async def test_a_branch_that_its_client_rewrites_is_over() -> None:
    async with reading() as (served, outlooks):
        main = agent(served, "call,call,end")
        await main.ask()
        await main.ask()
        main.messages[1]["content"][0]["input"]["path"] = "another"
        await main.ask()
    assert [each.is_over for each in outlooks] == [True, True, False]
    assert outlooks[0] is not outlooks[2]


async def test_a_compacted_conversation_leaves_the_long_one_behind() -> None:
    async with reading() as (served, outlooks):
        main = agent(served, "call,end")
        await main.ask()
        await main.ask()
        main.messages[1:] = [{"role": "user", "content": "You did this so far: nothing."}]
        await main.ask()
    assert [each.is_over for each in outlooks] == [True, True, False]


async def test_a_side_request_leaves_its_conversation_alone() -> None:
    async with reading() as (served, outlooks):
        await agent(served, "call,end").ask()
        side = agent(served, "end")
        side.messages[0]["content"] = "Write a title. [[script:end]]"
        await side.ask()
    assert [each.is_over for each in outlooks] == [False, False]


async def test_a_harness_asks_to_keep_a_session() -> None:
    async with reading() as (served, outlooks):
        await agent(served, "call").ask(**{"x-singletree-keep": "1"})
    assert outlooks[0].is_pinned


async def test_nothing_is_kept_where_nobody_reads_it() -> None:
    async with reading(config=Config(foresight=False)) as (served, outlooks):
        await agent(served, "call").ask()
        assert outlooks[0] is None
        assert served.service.foresight is None
    async with serving(SCRIPTS) as plain:
        await plain.client.post("/v1/messages", body("/v1/messages", "[[script:end]]"), SESSION)
        assert plain.service.foresight is None
