"""``singletree tail`` and ``singletree top``: what a running server does, as it happens."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter

from singletree.cli.running_server import DEFAULT_URL, fetch
from singletree.errors import BadConfiguration
from singletree.server.http.session_report import PATH

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_COLOURS = {"first": "cyan", "appended": "green", "back": "yellow", "broken": "red"}
_METRIC_SECONDS = 5
_SHOWN_SESSIONS = 30
_KEY = 24
"""Characters of a session's name that are shown; most are UUIDs."""

_BaseUrl = Annotated[str, Parameter(name=["--base-url", "--url"], env_var="SINGLETREE_BASE_URL")]
_ApiKey = Annotated[str, Parameter(env_var="SINGLETREE_API_KEY")]


def tail(*, base_url: _BaseUrl = DEFAULT_URL, api_key: _ApiKey = "", interval: float = 1.0) -> None:
    """Print a line for each request as it ends: its session, what was cached and new, and why the prefix broke.

    Parameters
    ----------
    base_url
        URL of the server.
    api_key
        API key for the server.
    interval
        Seconds between two looks at the server.
    """
    from rich.console import Console

    watcher = SessionWatcher(base_url, api_key)
    console = Console(highlight=False, soft_wrap=True)
    watcher.new_steps()
    while True:
        for session, step in watcher.new_steps():
            console.print(step_line(session, step))
        time.sleep(_checked(interval))


def top(*, base_url: _BaseUrl = DEFAULT_URL, api_key: _ApiKey = "", interval: float = 1.0) -> None:
    """Show the server's sessions, generations and token rates, until Ctrl-C.

    Parameters
    ----------
    base_url
        URL of the server.
    api_key
        API key for the server.
    interval
        Seconds between two looks at the server.
    """
    from rich.console import Group
    from rich.live import Live

    url, before = _root(base_url), None
    with Live(screen=True, auto_refresh=False) as screen:
        while True:
            now = Counts(_metrics(url, api_key), time.monotonic())
            sessions = fetch(url, api_key, PATH)["data"]
            screen.update(Group(now.line(before), session_table(sessions, time.time())), refresh=True)
            before = now
            time.sleep(_checked(interval))


class SessionWatcher:
    """Finds the requests that ended since it looked last."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._url, self._key = _root(base_url), api_key
        self._seen: dict[str, int] = {}

    def new_steps(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Return (session, step) of each request that ended since the last call, in the order of their start.

        Raises BadConfiguration if the server does not answer as singletree does.
        """
        listed = fetch(self._url, self._key, PATH)["data"]
        found: list[tuple[float, str, Mapping[str, Any]]] = []
        for session in listed:
            key, requests = session["id"], session["requests"]
            new = requests - self._seen.get(key, 0)
            if new > 0:
                steps = fetch(self._url, self._key, f"{PATH}/{quote(key, safe='/')}")["steps"]
                found += [(step["at"], key, step) for step in steps[-new:]]
        self._seen = {session["id"]: session["requests"] for session in listed}
        return ((key, step) for _, key, step in sorted(found, key=lambda each: each[0]))


def step_line(session: str, step: Mapping[str, Any]) -> Text:
    """Return one line about a request."""
    from rich.text import Text

    cached = "-" if step["cached_tokens"] is None else f"{step['cached_tokens']:,}"
    line = Text(time.strftime("%H:%M:%S", time.localtime(step["at"])), style="dim")
    line.append(f"  {_short(session):{_KEY}}", style="default")
    line.append(f"  {step['course']:9}", style=_COLOURS.get(step["course"], "default"))
    line.append(
        f"prompt {step['prompt_tokens']:>8,}  new {step['new_tokens']:>7,}  cached {cached:>8}  "
        f"generated {step['generated_tokens']:>6,}",
        style="default",
    )
    broken = step["break"]
    if broken is not None:
        line.append(
            f"  {broken['cause']} in {broken['place']}, {step['lost_tokens']:,} lost", style="bold red"
        )
    return line


class Counts:
    """The server's counters at one time.

    Args:
        values: the metrics, by name without labels, summed over labels; counters of tokens by kind.
        at: the time in seconds, on a clock that never goes back.
    """

    def __init__(self, values: Mapping[str, float], at: float) -> None:
        self.values, self.at = values, at

    def line(self, before: Counts | None) -> Text:
        """Return a line with what runs now and the rates since ``before``."""
        from rich.text import Text

        running = self.values.get("singletree_generations_in_flight", 0)
        parts = [f"{running:.0f} generations"]
        if before is not None:
            for label, kind in (("prompt", "prompt"), ("cached", "cached"), ("generated", "completion")):
                parts.append(f"{label} {self._rate(before, f'singletree_tokens_total {kind}'):,.0f} tokens/s")
        return Text("  ".join(parts), style="bold")

    def _rate(self, before: Counts, name: str) -> float:
        grown = self.values.get(name, 0) - before.values.get(name, 0)
        return max(0.0, grown) / max(self.at - before.at, 1e-9)


def session_table(sessions: list[Mapping[str, Any]], now: float) -> Table:
    """Return the table of the sessions that were used last.

    Args:
        sessions: as the server lists them, the one used last first.
        now: the time in unix seconds.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("session", "model"):
        table.add_column(name, no_wrap=True)
    for name in ("requests", "prompt", "breaks", "lost", "last"):
        table.add_column(name, justify="right")
    for each in sessions[:_SHOWN_SESSIONS]:
        table.add_row(
            _short(each["id"]),
            _short(each["model"]),
            f"{each['requests']:,}",
            f"{each['prompt_tokens']:,}",
            f"{each['breaks']}",
            f"{each['lost_tokens']:,}",
            f"{max(0.0, now - each['last_at']):.0f} s ago",
            style="red" if each["breaks"] else None,
        )
    return table


def _metrics(url: str, key: str) -> dict[str, float]:
    from prometheus_client.parser import text_string_to_metric_families

    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=_METRIC_SECONDS) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except (OSError, ValueError) as error:
        raise BadConfiguration(f"{url}/metrics cannot be read ({error}); is it singletree?") from None
    values: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        kind = sample.labels.get("kind")
        name = f"{sample.name} {kind}" if kind else sample.name
        values[name] = values.get(name, 0) + sample.value
    return values


def _root(base_url: str) -> str:
    return base_url.rstrip("/").removesuffix("/v1")


def _checked(interval: float) -> float:
    if not 0.05 <= interval <= 3600:
        raise BadConfiguration(f"--interval is {interval}; give seconds from 0.05 to 3600")
    return interval


def _short(text: str) -> str:
    """Return ``text`` on one line without control characters, cut to the width of its column."""
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return plain if len(plain) <= _KEY else f"{plain[: _KEY - 1]}…"
