"""``singletree check``: check any endpoint that serves agents; its score card as text, JSON or a page."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from singletree.checking.contract import CHECKS, Result, choose, run_all
from singletree.checking.verdicts import ALL
from singletree.cli.flag_values import Secret, read_secret, split_entries

if TYPE_CHECKING:
    from rich.console import Console


_Names = Annotated[tuple[str, ...], Parameter(converter=split_entries, consume_multiple=False)]


def check_endpoint(
    url: str,
    *,
    model: str = "",
    api_key: Secret = "",
    second_key: Annotated[str, Parameter(converter=read_secret)] = "",
    only: _Names = (),
    skip: _Names = (),
    seconds: float = 120,
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
    html_file: Annotated[Path | None, Parameter(name="--html")] = None,
    list_checks: Annotated[bool, Parameter(name="--list", negative="")] = False,
) -> None:
    """Check an endpoint that serves agents: this server, vLLM, SGLang, Dynamo, llama-server, Ollama, a hosted one.

    Sends some 150 short requests on the protocols that the endpoint has (Messages, Chat Completions, Responses), and
    prints a score card. Exits with 0 if no check failed, 1 if one failed, 2 if the endpoint cannot be reached.

    Parameters
    ----------
    url
        URL of the endpoint, with or without /v1.
    model
        Model to ask for; by default the first that the endpoint lists.
    api_key
        API key, or @FILE.
    second_key
        Another key, or @FILE, for the check that two tenants do not see each other.
    only
        Names of the checks to run, with commas between.
    skip
        Names of checks to leave out, with commas between.
    seconds
        No check begins later than this; those that are left are undecided.
    json_file
        File for the results as JSON.
    html_file
        File for the score card as one page.
    list_checks
        Print the checks with their references, and ask nothing of the endpoint.
    """
    from rich.console import Console

    from singletree.checking.endpoint import Endpoint, HttpConnector, Unreachable

    checks = choose(only, skip)
    console = Console(highlight=False)
    if list_checks:
        for each in checks:
            console.print(
                f"[bold]{each.name}[/]  {each.title}\n    {each.users}\n    {each.reference}", soft_wrap=True
            )
        return
    began = time.monotonic()
    try:
        endpoint = Endpoint(HttpConnector(url), api_key, second_key, model)
        endpoint.discover()
    except Unreachable as error:
        print(f"singletree: {url}: {error}", file=sys.stderr)
        sys.exit(2)
    for file in (json_file, html_file):
        if file is not None:
            file.open("ab").close()  # One that cannot be written is refused before two minutes of checks.
    results = []
    with console.status("checking") as status:
        for result in run_all(checks, endpoint, seconds):
            results.append(result)
            status.update(f"{result.check} ({result.protocol}): {result.verdict}")
    names = tuple(protocol.name for protocol in endpoint.protocols)
    card = ScoreCard(url, endpoint.model, names, endpoint.is_scripted, results, time.monotonic() - began)
    card.show(console)
    if json_file is not None:
        json_file.write_text(json.dumps(card.as_dict(), indent=1) + "\n", encoding="utf-8")
    if html_file is not None:
        html_file.write_bytes(card.html().encode(errors="replace"))
    if card.failed:
        sys.exit(1)


_MARKS = {"pass": "✓", "fail": "✗", "not applicable": "–", "undecided": "?"}
_WORST_FIRST = ("fail", "undecided", "not applicable", "pass")
_COLOURS = {"pass": "green", "fail": "red bold", "not applicable": "dim", "undecided": "yellow"}
_TABLE = {check.name: check for check in CHECKS}


@dataclass(frozen=True, slots=True)
class ScoreCard:
    """What came of all checks of one endpoint."""

    url: str
    model: str
    protocols: tuple[str, ...]
    scripted: bool
    results: Sequence[Result]
    seconds: float

    @property
    def failed(self) -> bool:
        return any(result.verdict == "fail" for result in self.results)

    @property
    def counts(self) -> Mapping[str, int]:
        found = Counter(result.verdict for result in self.results)
        return {verdict: found[verdict] for verdict in _MARKS}  # type: ignore[index]

    def as_dict(self) -> dict[str, Any]:
        from singletree import __version__

        return {
            "checked_by": f"singletree {__version__}",
            "url": self.url,
            "model": self.model,
            "protocols": list(self.protocols),
            "scripted": self.scripted,
            "seconds": round(self.seconds, 1),
            "counts": dict(self.counts),
            "results": [result.as_dict() for result in self.results],
        }

    def rows(self) -> list[tuple[str, dict[str, Result]]]:
        """Return (name, result by protocol) of each check that ran, in the order of the table."""
        found: dict[str, dict[str, Result]] = {}
        for result in self.results:
            found.setdefault(result.check, {})[result.protocol] = result
        return list(found.items())

    def show(self, console: Console) -> None:
        """Print a table of all checks, then each failure with what users see of it."""
        from rich.table import Table
        from rich.text import Text

        columns = [name for name in ALL if name in self.protocols]
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("check", no_wrap=True)
        for name in columns:
            table.add_column(name, justify="center")
        table.add_column("what was seen", overflow="fold")
        for name, by_protocol in self.rows():
            marks = [_mark(by_protocol.get(column)) for column in columns]
            worst = min(by_protocol.values(), key=lambda result: _WORST_FIRST.index(result.verdict))
            table.add_row(Text(name), *marks, Text(worst.reason, style="dim"))
        console.print(table)
        for result in self.results:
            if result.verdict == "fail":
                check = _TABLE[result.check]
                console.print(Text(f"\n{check.name} ({result.protocol}): {check.title}", style="red bold"))
                console.print(Text(f"  seen       {result.reason}"))
                console.print(Text(f"  users see  {check.users}"))
                console.print(Text(f"  reference  {check.reference}"))
        counted = ", ".join(f"{number} {verdict}" for verdict, number in self.counts.items())
        depth = (
            "scripted engine: deep checks ran"
            if self.scripted
            else "real model: what it did not do is undecided"
        )
        console.print(Text(f"\n{self.url}, model {self.model}: {counted} in {self.seconds:.0f} s ({depth})"))

    def html(self) -> str:
        """Return the card as one page without other files."""
        columns = [name for name in ALL if name in self.protocols]
        heads = "".join(f"<th>{name}</th>" for name in columns)
        rows = "".join(_html_row(name, by_protocol, columns) for name, by_protocol in self.rows())
        counted = ", ".join(f"{number} {verdict}" for verdict, number in self.counts.items())
        return _PAGE.format(
            title=escape(f"{self.model} at {self.url}"),
            counted=counted,
            heads=heads,
            rows=rows,
            seconds=self.seconds,
        )


def _mark(result: Result | None) -> Any:
    from rich.text import Text

    return Text(_MARKS[result.verdict], style=_COLOURS[result.verdict]) if result else Text("")


def _html_row(name: str, by_protocol: Mapping[str, Result], columns: Sequence[str]) -> str:
    check = _TABLE[name]
    cells = "".join(
        f'<td class="{each.verdict.split()[0]}">{_MARKS[each.verdict]}</td>' if each else "<td></td>"
        for each in map(by_protocol.get, columns)
    )
    seen = "".join(f"<li>{protocol}: {escape(each.reason)}</li>" for protocol, each in by_protocol.items())
    return (
        f"<tr><td><details><summary><b>{name}</b> {escape(check.title)}</summary><ul>{seen}</ul><p>When it fails: "
        f"{escape(check.users)}</p><p>Reference: {escape(check.reference)}</p></details></td>{cells}</tr>\n"
    )


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }} td, th {{ border-bottom: 1px solid #8884; padding: .3rem .6rem }}
td:not(:first-child), th {{ text-align: center; width: 6rem }} summary {{ cursor: pointer }}
.pass {{ color: #187a2f }} .fail {{ color: #fff; background: #b3261e }} .undecided {{ color: #8a6100 }}
</style>
<h1>{title}</h1><p>{counted}, in {seconds:.0f} s. A row opens.</p>
<table><tr><th>check</th>{heads}</tr>
{rows}</table></html>
"""
