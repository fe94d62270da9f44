"""``singletree check``: check any endpoint that serves agents."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from singletree.cli.flag_values import Secret, read_secret, split_entries

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

    from singletree.checking.card import ScoreCard
    from singletree.checking.contract import choose
    from singletree.checking.endpoint import Endpoint, HttpConnector, Unreachable
    from singletree.checking.verdicts import run_all

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
