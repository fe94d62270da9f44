"""``singletree explain``: print a running server's report on the prompts of a session."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter

from singletree.cli.running_server import DEFAULT_URL, fetch
from singletree.errors import BadConfiguration
from singletree.server.http.session_report import PATH

_COURSE_TEXTS = {
    "first": "a new conversation: there is no earlier prompt to continue",
    "appended": "continues the last prompt and turn completely",
    "back": "continues from an earlier turn: a fork, a retry or a side request",
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
    """Show where the prompts of a session broke the prefix cache, and why. Without a session, list the sessions.

    Parameters
    ----------
    session
        The session's id, as the list and the server's log show it.
    base_url
        URL of the server.
    api_key
        API key for the server.
    json
        Print JSON.
    """
    path = PATH if session is None else f"{PATH}/{quote(session, safe='/')}"
    value = fetch(base_url.rstrip("/").removesuffix("/v1"), api_key or "", path)
    if json:
        _print_json(value)
        return
    root = base_url.rstrip("/").removesuffix("/v1")
    try:
        lines = list(_sessions(value["data"]) if session is None else _session(value, root))
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        raise BadConfiguration(
            f"cannot read the answer of {base_url}, which may run another version of singletree; "
            "--json prints the answer as it is"
        ) from None
    print("\n".join(lines))


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _sessions(sessions: list[dict[str, Any]]) -> Iterator[str]:
    if not sessions:
        yield "the server has no sessions yet"
        return
    yield f"{'last':8}  {'requests':>8}  {'tokens':>8}  {'breaks':>6}  {'lost':>8}  session"
    for each in sessions:
        yield (
            f"{_clock(each['last_at'])}  {each['requests']:8}  {each['prompt_tokens']:8}  {each['breaks']:6}  "
            f"{each['lost_tokens']:8}  {_printable(each['id'])}"
        )


def _session(session: dict[str, Any], root: str) -> Iterator[str]:
    yield f"session {_printable(session['id'])}, model {_printable(session['model'])}: {session['requests']} requests"
    if link := session.get("inspect"):
        yield f"inspect {root}{_printable(link)}"
    steps = session["steps"]
    if len(steps) < session["requests"]:
        yield f"the last {len(steps)} requests:"
    for number, step in enumerate(steps, session["requests"] - len(steps) + 1):
        yield from _step(number, step)


def _step(number: int, step: dict[str, Any]) -> Iterator[str]:
    cached = "" if step["cached_tokens"] is None else f", {step['cached_tokens']} cached by the engine"
    yield ""
    yield (
        f"{number}  {_clock(step['at'])}  conversation {step['line']}  prompt {step['prompt_tokens']}: "
        f"{step['matched_tokens']} matched, {step['new_tokens']} new{cached}; {step['generated_tokens']} generated"
    )
    if (route := step.get("route")) is not None:
        yield f"   engine  {_route(route, step['cached_tokens'])}"
    broken = step["break"]
    if broken is None:
        yield f"   {_COURSE_TEXTS.get(step['course'], step['course'])}"
        return
    yield f"   BREAK in {broken['place']}, {step['lost_tokens']} tokens lost: {broken['cause']}"
    yield f"   why     {broken['says']}"
    yield f"   cure    {broken['cure']}"
    yield f"   after   {_printable(broken['before'][-_EXCERPT:])}"
    yield f"   was     {_printable(broken['was'][:_EXCERPT])}"
    yield f"   is      {_printable(broken['now'][:_EXCERPT])}"


def _route(route: dict[str, Any], cached: int | None) -> str:
    """Describe which engine generated, how many cached tokens were expected there and how many came, and why."""
    words = [_printable(route["worker"] or "the only one")]
    if (predicted := route["predicted_cached_tokens"]) is not None and not route["failovers"]:
        came = "" if cached is None else f", {cached} came"
        words.append(f"{predicted} cached tokens predicted{came}")
    if route["failovers"]:
        words.append(f"after {route['failovers']} failed")
    return "; ".join([*words, *([_printable(route["reason"])] if route["reason"] else [])])


def _printable(text: str) -> str:
    """Return ``text`` with control characters escaped: one line, and no terminal control sequences."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
