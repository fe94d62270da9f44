"""``singletree explain``: how the prompts of a session went on, asked of a running server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter

from singletree.cli.running_server import DEFAULT_URL, fetch
from singletree.errors import BadConfiguration
from singletree.server.explaining import PATH

_SAID = {
    "first": "a new line: nothing to go on from",
    "appended": "goes on from all of the last prompt and turn",
    "back": "goes on from an earlier turn: a fork, a retry or a side request",
}
_EXCERPT = 60


def explain(
    session: str | None = None,
    *,
    base_url: Annotated[
        str, Parameter(name=["--base-url", "--url"], env_var="SINGLETREE_BASE_URL")
    ] = DEFAULT_URL,
    api_key: Annotated[str | None, Parameter(env_var="SINGLETREE_API_KEY")] = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Say where the prompts of a session broke, and why; without a session, list the sessions.

    Parameters
    ----------
    session
        The session's key, as the list and the log have it.
    base_url
        Where the server is.
    api_key
        A key that it takes.
    json
        Print JSON.
    """
    path = PATH if session is None else f"{PATH}/{quote(session, safe='/')}"
    value = fetch(base_url.rstrip("/").removesuffix("/v1"), api_key or "", path)
    if json:
        _print_json(value)
        return
    try:
        lines = list(_sessions(value["data"]) if session is None else _session(value))
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        raise BadConfiguration(
            f"{base_url} is another version of singletree; --json shows its answer"
        ) from None
    print("\n".join(lines))


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _sessions(sessions: list[dict[str, Any]]) -> Iterator[str]:
    if not sessions:
        yield "no session is known yet"
        return
    yield f"{'last':8}  {'requests':>8}  {'tokens':>8}  {'breaks':>6}  {'lost':>8}  session"
    for each in sessions:
        yield (
            f"{_clock(each['last_at'])}  {each['requests']:8}  {each['prompt_tokens']:8}  {each['breaks']:6}  "
            f"{each['lost_tokens']:8}  {_shown(each['id'])}"
        )


def _session(session: dict[str, Any]) -> Iterator[str]:
    yield f"session {_shown(session['id'])} of {_shown(session['model'])}: {session['requests']} requests"
    steps = session["steps"]
    if len(steps) < session["requests"]:
        yield f"the last {len(steps)} of them:"
    for number, step in enumerate(steps, session["requests"] - len(steps) + 1):
        yield from _step(number, step)


def _step(number: int, step: dict[str, Any]) -> Iterator[str]:
    cached = "" if step["cached_tokens"] is None else f", {step['cached_tokens']} cached by the engine"
    yield ""
    yield (
        f"{number}  {_clock(step['at'])}  line {step['line']}  prompt {step['prompt_tokens']}: "
        f"{step['matched_tokens']} matched, {step['new_tokens']} new{cached}; {step['generated_tokens']} generated"
    )
    broken = step["break"]
    if broken is None:
        yield f"   {_SAID.get(step['course'], step['course'])}"
        return
    yield f"   BROKEN in {broken['place']}, {step['lost_tokens']} tokens lost: {broken['cause']}"
    yield f"   why     {broken['says']}"
    yield f"   cure    {broken['cure']}"
    yield f"   after   {_shown(broken['before'][-_EXCERPT:])}"
    yield f"   was     {_shown(broken['was'][:_EXCERPT])}"
    yield f"   is      {_shown(broken['now'][:_EXCERPT])}"


def _shown(text: str) -> str:
    """``text`` on one line, without anything that a terminal obeys."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
