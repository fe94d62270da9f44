"""``singletree trace``: use the records of requests that ``serve --trace-path`` writes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from singletree.cli.perfetto import timeline
from singletree.cli.running_server import DEFAULT_URL
from singletree.cli.trace_records import read_records
from singletree.errors import BadConfiguration

app = App(name="trace", help="Turn recorded requests into a timeline, or send them again as a load test.")


@app.command
def perfetto(*files: Path, output: Path = Path("trace.perfetto.json")) -> None:
    """Write a timeline for https://ui.perfetto.dev: sessions, turns, tools, and what was read and cached.

    Parameters
    ----------
    files
        Files of --trace-path, also compressed with gzip.
    output
        The file to write.
    """
    value = timeline(read_records(files))
    try:
        output.write_text(json.dumps(value), encoding="utf-8")
    except OSError as error:
        raise BadConfiguration(
            f"--output {output}: {error.strerror}; give a file that can be written"
        ) from None
    print(f"wrote {output}: open it at https://ui.perfetto.dev")


@app.command
def replay(
    *files: Path,
    base_url: Annotated[
        str, Parameter(name=["--base-url", "--url"], env_var="SINGLETREE_BASE_URL")
    ] = DEFAULT_URL,
    model: str = "",
    api_key: Annotated[str, Parameter(env_var="SINGLETREE_API_KEY")] = "",
    speed: float = 1.0,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Send requests of the recorded shape to a server with Chat Completions, and report latencies and cached share.

    Lengths, gaps, shared prefixes and parallel sessions are as recorded. The texts are words that mean nothing.

    Parameters
    ----------
    files
        Files of --trace-path, also compressed with gzip.
    base_url
        URL of the server.
    model
        Name of the model; by default the first that the server lists.
    api_key
        API key for the server.
    speed
        Factor by which the gaps are shorter than recorded.
    json_
        Print JSON.
    """
    from singletree.cli.trace_replay import Replayer, has_shape, summary
    from singletree.engines.weights.progress import CountedProgress, TerminalProgress

    if speed <= 0:
        raise BadConfiguration(f"--speed is {speed}; give a number above 0")
    records = read_records(files)
    with TerminalProgress(is_bytes=False) as progress:
        count = CountedProgress("requests", progress, sum(map(has_shape, records)))
        replayer = Replayer(base_url.rstrip("/").removesuffix("/v1"), model, api_key, speed, count)
        found = summary(asyncio.run(replayer.run(records)), records)
    print(json.dumps(found) if json_ else "\n".join(_lines(found)))


def _lines(found: dict[str, Any]) -> list[str]:
    recorded = found["recorded"]
    return [
        f"requests         {found['requests']}, of which failed {sum(found['errors'].values())}",
        *(f"                 {count} times {error}" for error, count in found["errors"].items()),
        f"first token      {_seconds(found['first_token_seconds'])}",
        f"  as recorded    {_seconds(recorded['first_token_seconds'])}",
        f"between tokens   {_seconds(found['between_tokens_seconds'])}",
        f"prompt tokens    {found['prompt_tokens']:,} (recorded {recorded['prompt_tokens']:,})",
        f"cached           {_percent(found['cached_share'])} (recorded {_percent(recorded['cached_share'])})",
        f"generated        {found['completion_tokens']:,}",
    ]


def _seconds(quantiles: dict[str, float] | None) -> str:
    if quantiles is None:
        return "-"
    return ", ".join(f"{name} {value:.3f} s" for name, value in quantiles.items())


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
