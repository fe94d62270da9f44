"""``singletree explain``, ``tail``, ``inspect``, ``sessions cost``: what a running server reports on its sessions."""

from __future__ import annotations

import sys
import time
import webbrowser
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter

from singletree.cli.flag_values import AsJson
from singletree.cli.inspect import print_value
from singletree.cli.running_server import RunningServer
from singletree.errors import BadConfiguration
from singletree.private_files import create_private
from singletree.server.sessions import PATH

if TYPE_CHECKING:
    from rich.text import Text

_COURSE_TEXTS = {
    "first": "a new conversation: there is no earlier prompt to continue",
    "appended": "continues the last prompt and turn completely",
    "back": "continues from an earlier turn: a fork, a retry or a side request",
}
_EXCERPT = 60


def explain(
    session: str | None = None,
    *,
    server: RunningServer = RunningServer(),  # noqa: B008 (frozen)
    json: AsJson = False,
) -> None:
    """Show where the prompts of a session broke the prefix cache, and why. Without a session, list the sessions.

    Parameters
    ----------
    session
        The session's id, as the list and the server's log show it.
    """
    value = server.fetch(PATH) if session is None else server.fetch_session(session)
    if json:
        print_value(value)
    else:
        server.print_lines(_sessions(value) if session is None else _session(value, server.root))


def _sessions(value: dict[str, Any]) -> Iterator[str]:
    sessions = value["data"]
    if not sessions:
        yield "the server has no sessions yet"
        return
    yield f"{'last':8}  {'requests':>8}  {'tokens':>8}  {'breaks':>6}  {'lost':>8}  session"
    for each in sessions:
        yield (
            f"{_clock(each['last_at'])}  {each['requests']:8}  {each['prompt_tokens']:8}  {each['breaks']:6}  "
            f"{each['lost_tokens']:8}  {printable(each['id'])}"
        )


def _session(session: dict[str, Any], root: str) -> Iterator[str]:
    yield f"session {printable(session['id'])}, model {printable(session['model'])}: {session['requests']} requests"
    if link := session.get("inspect"):
        yield f"inspect {root}{printable(link)}"
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
    yield f"   after   {printable(broken['before'][-_EXCERPT:])}"
    yield f"   was     {printable(broken['was'][:_EXCERPT])}"
    yield f"   is      {printable(broken['now'][:_EXCERPT])}"


def _route(route: dict[str, Any], cached: int | None) -> str:
    """Describe which engine generated, how many cached tokens were expected there and how many came, and why."""
    words = [printable(route["worker"] or "the only one")]
    if (predicted := route["predicted_cached_tokens"]) is not None and not route["failovers"]:
        came = "" if cached is None else f", {cached} came"
        words.append(f"{predicted} cached tokens predicted{came}")
    if route["failovers"]:
        words.append(f"after {route['failovers']} failed")
    return "; ".join([*words, *([printable(route["reason"])] if route["reason"] else [])])


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped: one line, and no terminal control sequences."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


_COLOURS = {"first": "cyan", "appended": "green", "back": "yellow", "broken": "red"}
_BAD_ENDS = ("error", "cancelled", "context_overflow")
_KEY = 24
"""Characters of a session's name that are shown; most are UUIDs."""


def tail(*, server: RunningServer = RunningServer(), interval: float = 1.0) -> None:  # noqa: B008 (frozen)
    """Print a line for each request as it ends: its session, what was cached and new, and why the prefix broke.

    Parameters
    ----------
    interval
        Seconds between two looks at the server.
    """
    from rich.console import Console

    watcher = SessionWatcher(server)
    console = Console(highlight=False, soft_wrap=True)
    watcher.look()
    is_there = True
    while True:
        try:
            for session, step in watcher.new_steps():
                console.print(step_line(session, step))
            is_there = True
        except BadConfiguration as gone:
            # It may be restarted.
            if is_there:
                console.print(gone.message, style="red")
            is_there = False
        time.sleep(_checked(interval))


class SessionWatcher:
    """Finds the requests that ended since it looked last."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._seen: dict[str, int] = {}

    def new_steps(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Return (session, step) of each request that ended since the last call, in the order of their start.

        Raises BadConfiguration if the server does not answer as singletree does.
        """
        seen = self._seen
        found: list[tuple[float, str, Mapping[str, Any]]] = []
        for key, requests in self.look().items():
            new = requests - seen.get(key, 0)
            if new > 0:
                steps = self._server.fetch_session(key)["steps"]
                found += [(step["at"], key, step) for step in steps[-new:]]
        return ((key, step) for _, key, step in sorted(found, key=lambda each: each[0]))

    def look(self) -> dict[str, int]:
        """Note how many requests each session has had, and return it. Raises BadConfiguration as ``new_steps``."""
        listed = self._server.fetch(PATH)["data"]
        self._seen = {session["id"]: session["requests"] for session in listed}
        return self._seen


def step_line(session: str, step: Mapping[str, Any]) -> Text:
    """Return one line about a request."""
    from rich.text import Text

    cached = "-" if step["cached_tokens"] is None else f"{step['cached_tokens']:,}"
    line = Text(_clock(step["at"]), style="dim")
    line.append(f"  {_short(session):{_KEY}}", style="default")
    line.append(f"  {step['course']:9}", style=_COLOURS.get(step["course"], "default"))
    line.append(
        f"prompt {step['prompt_tokens']:>8,}  new {step['new_tokens']:>7,}  cached {cached:>8}  "
        f"generated {step['generated_tokens']:>6,}",
        style="default",
    )
    first, took, ended = step.get("first_seconds"), step.get("seconds"), step.get("ended")
    line.append(f"  first {_seconds(first):>7}  took {_seconds(took):>7}", style="default")
    if ended in _BAD_ENDS:
        line.append(f"  {ended}", style="bold red")
    broken = step["break"]
    if broken is not None:
        line.append(
            f"  {broken['cause']} in {broken['place']}, {step['lost_tokens']:,} lost", style="bold red"
        )
    return line


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _checked(interval: float) -> float:
    if not 0.05 <= interval <= 3600:
        raise BadConfiguration(f"--interval is {interval}; give seconds from 0.05 to 3600")
    return interval


def _short(text: str) -> str:
    """Return ``text`` on one line without control characters, cut to the width of its column."""
    plain = printable(text)
    return plain if len(plain) <= _KEY else f"{plain[: _KEY - 1]}…"


_COLUMNS = (
    ("turns", "turns"),
    ("prompt", "prompt_tokens"),
    ("cached", "cached_tokens"),
    ("new", "new_tokens"),
    ("again", "reread_tokens"),
    ("written", "generated_tokens"),
    ("prefill s", "prefill_seconds"),
    ("decode s", "decode_seconds"),
)
"""Titles and the fields of a cost."""

_Cost = Mapping[str, Any]


def cost(
    session: str | None = None,
    *,
    server: RunningServer = RunningServer(),  # noqa: B008 (frozen)
    json: AsJson = False,
) -> None:
    """Show what sessions cost: tokens new, repeated from the cache, read again and by whose fault, and seconds.

    Without a session, list the sessions, each with its agents, and the sum of each API key.

    Parameters
    ----------
    session
        The session's id, as the list shows it.
    """
    value = server.fetch(PATH) if session is None else server.fetch_session(session)
    if json:
        costs = value.get("cost", {"sessions": _by_session(value.get("data", [])), "keys": value.get("keys")})
        print_value(costs)
    else:
        server.print_lines(_all_costs(value) if session is None else _session_cost(value))


def _by_session(listed: list[dict[str, Any]]) -> dict[str, list[_Cost]]:
    """Return the costs of agents by the session that they belong to, the session used last first."""
    found: dict[str, list[_Cost]] = {}
    for each in listed:
        # The id of another owner's session begins with the owner.
        owner = f"{each['owner']}/" if each["owner"] and each["id"].startswith(f"{each['owner']}/") else ""
        agents = found.setdefault(owner + each["cost"]["session"], [])
        if each["cost"]["agent"] not in {known["agent"] for known in agents}:
            agents.append(each["cost"])
    return found


def _all_costs(value: Mapping[str, Any]) -> Iterator[str]:
    sessions = _by_session(value["data"])
    if not sessions:
        yield "the server has no sessions yet"
        return
    yield _head("session")
    for id, agents in sessions.items():
        yield _row(_sum(agents), id)
        if len(agents) > 1:
            yield from (_row(each, f"  {each['agent'] or 'main agent'}") for each in agents)
    for owner, each in value["keys"].items():
        if each["turns"]:
            yield _row(each, f"key {owner}" if owner else "all turns since the start")


def _session_cost(value: Mapping[str, Any]) -> Iterator[str]:
    whole = value["cost"]
    yield _head(f"session {whole['session']}")
    yield _row(whole, "all")
    if len(whole["agents"]) > 1:
        yield from (_row(each, agent or "main agent") for agent, each in whole["agents"].items())
    if again := whole["reread_by_fault"]:
        yield f"tokens read again, by fault: {_faults(again)}"
    for number, step in enumerate(value["steps"], value["requests"] - len(value["steps"]) + 1):
        if (receipt := step["receipt"]) and receipt["reread_tokens"]:
            why = f" ({step['break']['cause']})" if step["break"] else ""
            yield f"  request {number} of this agent: {_faults(receipt['reread_by_fault'])}{why}"


def _faults(again: Mapping[str, int]) -> str:
    return ", ".join(f"{fault} {tokens:,}" for fault, tokens in again.items())


def _sum(costs: list[_Cost]) -> _Cost:
    return {field: sum(each[field] for each in costs) for _, field in _COLUMNS}


def _head(last: str) -> str:
    return "  ".join([*(f"{title:>{_width(title)}}" for title, _ in _COLUMNS), printable(last)])


def _row(cost: _Cost, last: str) -> str:
    values = (
        f"{cost[field]:>{_width(title)}{',.1f' if 'seconds' in field else ','}}" for title, field in _COLUMNS
    )
    return "  ".join([*values, printable(last)])


def _width(title: str) -> int:
    return 5 if title == "turns" else 10


_PAGE = "/inspect"
_EXPORT_SECONDS = 120


def inspect(
    session: str | None = None,
    *,
    server: RunningServer = RunningServer(),  # noqa: B008 (frozen)
    open: bool = True,
    export: str | None = None,
    output: Annotated[Path | None, Parameter(name=["-o", "--output"])] = None,
    without_texts: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Open the page that shows what the agents of a running server do. The server needs --inspect.

    Parameters
    ----------
    session
        The session to show, by its id or by its name in the server's log; the list of sessions by default.
    open
        Open a browser; the URL is printed in any case.
    export
        Save this session as one HTML file instead.
    output
        The file; SESSION.html by default.
    without_texts
        Leave prompts, answers and requests out of the file.
    """
    # Says how to start the server where the inspector is off.
    state = server.fetch(f"{_PAGE}/api/server")
    if export is not None:
        _export(server, export, output, without_texts=without_texts)
        return
    if output is not None or without_texts:
        raise BadConfiguration("--output and --without-texts belong to --export SESSION; give that as well")
    place = "/sessions" if session is None else f"/sessions/{_session_id(session)}"
    url = f"{server.root}{_PAGE}#{place}"
    print(url)
    if not state.get("content"):
        print("texts are not kept; start the server with --inspect-content to see them", file=sys.stderr)
    if server.api_key:
        # It is not put into the URL: the command line of a browser can be read by others.
        print("the page asks for the API key", file=sys.stderr)
    if open:
        _open(url)


def _session_id(session: str) -> str:
    from singletree.inspector.turn_record import known_session_id

    return known_session_id(session)


def _open(url: str) -> None:
    try:
        webbrowser.get()
    except webbrowser.Error:
        return
    webbrowser.open(url)


def _export(server: RunningServer, session: str, output: Path | None, *, without_texts: bool) -> None:
    texts = "0" if without_texts else "1"
    path = f"{_PAGE}/api/export?session={quote(session, safe='')}&texts={texts}"
    document = server.fetch_bytes(path, seconds=_EXPORT_SECONDS)
    file = output or Path(f"singletree-{_session_id(session)}.html")
    create_private(file)
    file.write_bytes(document)
    print(f"{file} ({len(document):,} bytes)")
