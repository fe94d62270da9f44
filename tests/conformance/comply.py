"""``llm-comply`` (a package, MIT) in memory: its cases ask, its checks judge the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from llm_comply import runner
from llm_comply.config import ComplianceConfig
from llm_comply.result import TestStatus as Status
from llm_comply.schema import SpecLoader

from server.memory import events
from server.serving import MODEL, Served

NO_MODEL = pytest.mark.xfail(
    reason="a server with one model answers a request that names none, as vLLM and llama.cpp do", strict=True
)


def cases(known: Iterable[Any]) -> list[Any]:
    """Return the checker's cases as parameters; one sends no model, and expects to be refused."""
    names = ("error-handling", "chat-error-handling", "compact-missing-model")
    return [pytest.param(case, id=case.id, marks=[NO_MODEL] * (case.id in names)) for case in known]


MARK = "[[script:s]]"
"""Asks the scripted engine for its script ``s``."""


async def check(
    case: Any,
    spec: SpecLoader,
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    prompt: str,
    *,
    mark: str = MARK,
    seconds: float = 10,
    **more: Any,
) -> None:
    """Fails where ``case`` does.

    ``prompt`` is the field of its requests that holds the messages; ``mark`` is put behind the last one. ``seconds``:
    how long an answer may take. ``more``: further fields of the requests.
    """
    loop = asyncio.get_running_loop()
    case.skip_reason = None  # it skips by the vendor's names of models

    def ask(config: Any, endpoint: str, asked: dict[str, Any], *, streaming: bool = False) -> Any:
        last = asked[prompt][-1]
        asked[prompt][-1] = {**last, "content": _marked(last["content"], mark)}
        sending = served.client.post(f"/v1{endpoint}", asked | {"stream": streaming} | more)
        reply = asyncio.run_coroutine_threadsafe(sending, loop).result(seconds)
        if not streaming:
            return reply.status, reply.json, None
        reported = [_event(name, data) for name, data in events(reply.body)]
        return reply.status, _final(reported), reported

    monkeypatch.setattr(runner, "make_request", ask)
    config = ComplianceConfig("http://singletree.test/v1", "k", model=MODEL)
    result = await asyncio.to_thread(runner.TestRunner(config, [case], spec).run_one, case)
    assert (result.status, result.errors, result.warnings) == (Status.PASSED, [], [])


def _final(reported: list[dict[str, Any]]) -> Mapping[str, Any] | None:
    last = reported[-1]["data"]
    found: Mapping[str, Any] | None = last.get("response") if isinstance(last, dict) else None
    return found


def _event(name: str, data: Any) -> dict[str, Any]:
    """The event as the checker's own client gives it; those of Chat Completions have no type."""
    return {"type": data.get("type", name) if isinstance(data, dict) else data, "data": data}


def _marked(content: Any, mark: str) -> Any:
    if isinstance(content, str):
        return f"{content} {mark}"
    kind = "input_text" if content[-1]["type"].startswith("input_") else "text"
    return [*content, {"type": kind, "text": mark}]
