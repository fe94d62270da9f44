"""``singletree sessions cost``: the sums of the receipts of a running server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from singletree.cli.inspect import print_value
from singletree.cli.running_server import RunningServer
from singletree.cli.session_commands import printable
from singletree.server.sessions.session_report import PATH

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
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Show what sessions cost: tokens new, repeated from the cache, read again and by whose fault, and seconds.

    Without a session, list the sessions, each with its agents, and the sum of each API key.

    Parameters
    ----------
    session
        The session's id, as the list shows it.
    json
        Print JSON.
    """
    value = server.fetch(PATH) if session is None else server.fetch_session(session)
    if json:
        costs = value.get("cost", {"sessions": _by_session(value.get("data", [])), "keys": value.get("keys")})
        print_value(costs)
    else:
        server.print_lines(_all(value) if session is None else _session(value))


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


def _all(value: Mapping[str, Any]) -> Iterator[str]:
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


def _session(value: Mapping[str, Any]) -> Iterator[str]:
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
