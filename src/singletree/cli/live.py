"""``singletree tail`` and ``singletree top``: what a running server does, as it happens."""

from __future__ import annotations

import time
import urllib.request
from collections import deque
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
_BAD_ENDS = ("error", "cancelled", "context_overflow")
_METRIC_SECONDS = 5
_WINDOW_SECONDS = 10.0
"""Rates are means over this time: a server counts tokens at the end of answers, which are some seconds apart."""
_SHOWN_SESSIONS = 30
_HEAD_LINES = 6
"""Lines of the screen that are not for sessions."""
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
    from rich.text import Text

    url, seen, was_there = _root(base_url), deque[Counts](), False
    with Live(screen=True, auto_refresh=False) as screen:
        while True:
            try:
                sessions = fetch(url, api_key, PATH)["data"]
                now = Counts(_metrics(url, api_key), time.monotonic())
            except BadConfiguration as gone:
                if not was_there:
                    raise
                # It may be restarted, with counters that begin again.
                seen.clear()
                screen.update(Text(gone.message, style="red"), refresh=True)
                time.sleep(_checked(interval))
                continue
            was_there = True
            seen.append(now)
            while len(seen) > 2 and now.at - seen[1].at >= _WINDOW_SECONDS:
                seen.popleft()
            rows = max(1, screen.console.height - _HEAD_LINES)
            screen.update(
                Group(*now.lines(seen[0]), "", session_table(sessions, time.time(), rows)), refresh=True
            )
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


class Counts:
    """The server's counters at one time.

    Args:
        values: the metrics, by name, and by name with the value of each label; summed over the other labels.
        at: the time in seconds, on a clock that never goes back.
    """

    def __init__(self, values: Mapping[str, float], at: float) -> None:
        self.values, self.at = values, at

    def lines(self, before: Counts) -> list[Text]:
        """Return lines with what runs now, and with the rates since ``before``."""
        from rich.text import Text

        now = self._now()
        read = self._grown(before, "singletree_tokens_total kind=prompt")
        cached = self._grown(before, "singletree_tokens_total kind=cached")
        lost = self._grown(before, "singletree_prefix_lost_tokens_total")
        rates = [
            f"prompt {self._rate(before, 'singletree_tokens_total kind=prompt'):,.0f} tokens/s",
            f"cached {_share(cached, read)}",
            f"lost {_share(lost, read)}",
            f"generated {self._rate(before, 'singletree_tokens_total kind=completion'):,.0f} tokens/s",
            f"first token {_seconds(self._mean(before, 'singletree_time_to_first_token_seconds'))}",
            f"between {_seconds(self._mean(before, 'singletree_time_per_output_token_seconds'))}",
        ]
        failed = sum(
            self._grown(before, name)
            for name in self.values
            if name.startswith("singletree_requests_total status=5")
        )
        lines = [Text("   ".join(now), style="bold"), Text("   ".join(rates))]
        if failed:
            lines.append(
                Text(f"{failed:,.0f} requests failed in the last {_WINDOW_SECONDS:.0f} s", style="bold red")
            )
        lines += self._engines(before)
        return lines

    def _now(self) -> list[str]:
        running, waiting = (
            self.values.get(f"singletree_generations_{name}", 0) for name in ("in_flight", "waiting")
        )
        states = (
            f"{_short(model)} {state}"
            for (name, model, state) in map(_state_labels, self.values)
            if name and self.values[name] and state != "loaded"
        )
        return [f"{running:.0f} running", f"{waiting:.0f} waiting", *states]

    def _engines(self, before: Counts) -> list[Text]:
        """Return a line for each of several engines: its generations, and how much of them was cached."""
        from rich.text import Text

        lines, named = [], "singletree_routed_generations_total worker="
        for name in sorted(self.values):
            if name.startswith(named):
                worker = name.removeprefix(named)
                sent = self._grown(before, name)
                lines.append(Text(f"engine {_short(worker, 48)}: {sent:.0f} generations", style="dim"))
        return lines

    def _grown(self, before: Counts, name: str) -> float:
        return max(0.0, self.values.get(name, 0) - before.values.get(name, 0))

    def _rate(self, before: Counts, name: str) -> float:
        return self._grown(before, name) / max(self.at - before.at, 1e-9)

    def _mean(self, before: Counts, histogram: str) -> float | None:
        count = self._grown(before, f"{histogram}_count")
        return self._grown(before, f"{histogram}_sum") / count if count else None


def _state_labels(name: str) -> tuple[str, str, str]:
    """Return a name of ``Counts.values`` with the model and the state in it; empty for other metrics."""
    kind, _, labels = name.partition(" model,state=")
    model, _, state = labels.rpartition("\0")
    return (name, model, state) if labels and kind == "singletree_model_state" else ("", "", "")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def session_table(sessions: list[Mapping[str, Any]], now: float, rows: int = _SHOWN_SESSIONS) -> Table:
    """Return the table of the sessions that were used last.

    Args:
        sessions: as the server lists them, the one used last first.
        now: the time in unix seconds.
        rows: how many to show; the last row tells how many more there are.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("session", "model"):
        table.add_column(name, no_wrap=True)
    for name in ("requests", "prompt", "cached", "generated", "first", "breaks", "lost", "last"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = sessions if len(sessions) <= rows else sessions[: max(0, rows - 1)]
    for each in shown:
        table.add_row(
            _short(each["id"]),
            _short(each["model"]),
            f"{each['requests']:,}",
            f"{each['prompt_tokens']:,}",
            _share(each.get("cached_tokens") or 0, each["prompt_tokens"]),
            f"{each.get('generated_tokens', 0):,}",
            _seconds(each.get("first_seconds")),
            f"{each['breaks']}",
            f"{each['lost_tokens']:,}",
            _ago(now - each["last_at"]),
            style="red" if each["breaks"] else None,
        )
    if len(shown) < len(sessions):
        table.add_row(f"and {len(sessions) - len(shown):,} more", style="dim")
    return table


def _ago(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


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
        labels = sample.labels
        names = [sample.name, *(f"{sample.name} {label}={value}" for label, value in labels.items())]
        if {"model", "state"} <= labels.keys():
            names.append(f"{sample.name} model,state={labels['model']}\0{labels['state']}")
        for name in names:
            values[name] = values.get(name, 0) + sample.value
    return values


def _root(base_url: str) -> str:
    return base_url.rstrip("/").removesuffix("/v1")


def _checked(interval: float) -> float:
    if not 0.05 <= interval <= 3600:
        raise BadConfiguration(f"--interval is {interval}; give seconds from 0.05 to 3600")
    return interval


def _short(text: str, width: int = _KEY) -> str:
    """Return ``text`` on one line without control characters, cut to the width of its column."""
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return plain if len(plain) <= width else f"{plain[: width - 1]}…"
