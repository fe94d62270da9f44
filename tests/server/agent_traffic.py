"""A main agent and its sub-agents, as harnesses send them: conversations that grow by answers and results."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.records.record_queue import RecordQueue, RecordSink
from singletree.records.request_records import RequestRecords

from .serving import MODEL, TEMPLATE, TOKENIZER, Served, serving

LAYOUT = TEMPLATE.layout(TOKENIZER)
CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "src"}}\n</tool_call>'
TOOL = {"name": "ls", "description": "lists", "input_schema": {"type": "object"}}
_PAUSE = 0.02
"""Seconds between steps that have to be one after the other in the record, whose times are in milliseconds."""


class Agent:
    """One agent of a harness: its conversation and its headers."""

    def __init__(
        self, served: Served, question: str, headers: Mapping[str, str], *, tools: bool = True
    ) -> None:
        self.served, self.headers, self.tools = served, dict(headers), [TOOL] if tools else []
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": question}]

    async def ask(self, **headers: str) -> dict[str, Any]:
        """Ask for the next turn, and answer its calls."""
        body = {"model": MODEL, "max_tokens": 999, "messages": self.messages, "tools": self.tools}
        answer = (await self.served.client.post("/v1/messages", body, self.headers | headers)).json
        self.messages.append({"role": "assistant", "content": answer["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": part["id"], "content": "a file"}
            for part in answer["content"]
            if part["type"] == "tool_use"
        ]
        if results:
            reminder = {"type": "text", "text": "Remember the time."}
            self.messages.append({"role": "user", "content": [*results, reminder]})
        found: dict[str, Any] = answer
        return found


async def record_sub_agents(*sinks: RecordSink) -> None:
    """Record a main agent that calls a tool, two sub-agents and a child session meanwhile, and the main agent's end."""
    records = RequestRecords(RecordQueue(*sinks))
    scripts = {"main": CALL, "done": "Done.", "sub": "Found."}
    async with serving(scripts, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        served.service.records = records
        main = Agent(served, "[[script:main,done]] Go. " + "word " * 200, {"x-claude-code-session-id": "s"})
        await main.ask()
        await asyncio.sleep(_PAUSE)
        for name in ("a1", "a2"):
            headers = main.headers | {"x-claude-code-agent-id": name}
            await Agent(served, f"[[script:sub]] Look {name}.", headers).ask()
        headers = {"x-session-id": "c", "x-parent-session-id": "s"}
        await Agent(served, "[[script:sub]] Look there.", headers).ask()
        await asyncio.sleep(_PAUSE)
        await main.ask()
    records.close()
