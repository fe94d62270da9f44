"""When a tool starts: from the last token of a call's arguments to the tool itself, in real harnesses, while the model
goes on writing. Singletree beside Dynamo, on the same script at the same pace.

    python -m benchmarks.dispatch [--quick] [--rounds N] [--write]

Needs the harnesses (``python tests/clients/install.py``). ``--write`` keeps the table in ``results/tables``, from which
``make docs`` makes docs/benchmarks.md and the README.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from benchmarks import documents, figures, peers, product_report, servers
from benchmarks.figures import Table
from benchmarks.processor import machine
from benchmarks.servers import Server
from clients import install
from clients.harness import CLAUDE, CODEX, OPENCODE, Harness, Task, run

HARNESSES = (CLAUDE, CODEX, *(OPENCODE._replace(api=api) for api in ("messages", "chat", "responses")))
"""Those that start a tool as soon as the stream has its whole call."""

_DELAY = 0.02
"""Seconds a token."""
_SECONDS = 120
_STAMP = "started"
# The tool's output makes the engine play what follows. The shell joins it, or the call itself would do so.
_COMMAND = f"date +%s.%N > {_STAMP}; printf '[[%s]%s' echo:Done. ]"
_AFTER = "Meanwhile I go on: the tests of this module say little about its border, and so does the text beside it. "


class Written(NamedTuple):
    """What the model writes: all of it, and the part up to the last token of the arguments."""

    text: str
    until_complete: str


class Started(NamedTuple):
    """Seconds from the last token of the arguments to the tool's start, and to the end of the generation."""

    tool: float
    end: float


def written(harness: Harness, sentences: int) -> Written:
    """A thought, a call, and ``sentences`` more."""
    name, arguments = harness.shell(_COMMAND)
    call = json.dumps({"name": name, "arguments": arguments})
    until = f"<think>\nI look first.\n</think>\n\n<tool_call>\n{call}"
    return Written(f"{until}\n</tool_call>\n{_AFTER * sentences}", until)


def measure(
    server: Server, folder: Path, harness: Harness, turn: Written, tokens: Callable[[str], int]
) -> Started | None:
    """One run; None where the harness did not get as far as its tool."""
    with tempfile.TemporaryDirectory(prefix="singletree-bench-") as name:
        home, workspace = Path(name, "home"), Path(name, "workspace")
        home.mkdir()
        workspace.mkdir()
        subprocess.run(["git", "init", "-q"], cwd=workspace, check=True)
        script = f"{harness.name}-{len(turn.text)}"
        (folder / f"{script}.txt").write_text(turn.text, encoding="utf-8")
        log = folder / f"{server.name}.jsonl"
        log.write_text("", encoding="utf-8")
        asked = f"Do as you think best. [[script:{script}]]"
        task = Task(server.url, servers.MODEL, asked, home, workspace)
        try:
            run(harness, task, _SECONDS)
        except subprocess.TimeoutExpired:
            return None
        stamp = workspace / _STAMP
        if not stamp.exists():
            return None
        at = float(stamp.read_text())
    end = _ended(log)
    complete = end - _DELAY * (tokens(turn.text) - tokens(turn.until_complete))
    return Started(at - complete, end - complete)


def _ended(log: Path) -> float:
    """When the first generation with tools ended: those without are for titles."""
    records = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return next(float(record["at"]) for record in records if "<tools>" in record["prompt"])


Measured = dict[tuple[str, str], list[Started | None]]
"""By harness and server."""


def measure_all(rounds: int, sentences: int) -> Measured:
    """Every harness on both servers, in turn. They play scripts, and write down when a generation ends."""
    tokenizer = Tokenizer.from_file(str(peers.QWEN3 / "tokenizer.json"))
    measured: Measured = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="singletree-bench-")))
        flags = ["--script-delay", str(_DELAY), "--script-dir", str(folder)]
        flags += ["--script-log", str(folder / "singletree.jsonl")]
        own = servers.singletree(flags=[*servers.SCRIPTED, *flags])
        settings = {"WORKER_DELAY": str(_DELAY), "WORKER_SCRIPTS": str(folder)}
        other = servers.dynamo("Dynamo", settings=settings | {"WORKER_END_LOG": str(folder / "Dynamo.jsonl")})
        running = [stack.enter_context(server) for server in (own, other)]
        for _, harness in product(range(rounds), HARNESSES):
            turn, title = written(harness, sentences), " ".join(filter(None, (harness.name, harness.api)))
            for server in running:
                started = measure(server, folder, harness, turn, lambda text: len(tokenizer.encode(text).ids))
                measured.setdefault((title, server.name), []).append(started)
                print(title, server.name, started, flush=True)
    return measured


def report(measured: Measured, rounds: int) -> Table:
    """The table."""
    rows = []
    for title in dict.fromkeys(title for title, _ in measured):
        cells: list[str] = []
        for server in ("singletree", "Dynamo"):
            cells += _cells([started for started in measured[title, server] if started is not None])
        rows.append([title, *cells])
    head = ["harness"]
    for server in ("singletree", f"Dynamo {peers.DYNAMO_VERSION}"):
        head += [f"{server}: ms", "before the end: ms"]
    conditions = (
        f"{documents.today()}; {machine()}. {rounds} round{'s' * (rounds > 1)}, the servers in turn; medians, and the "
        f"range in brackets. One token each {_DELAY * 1e3:g} ms."
    )
    return Table(conditions, head, rows)


def _cells(done: list[Started]) -> tuple[str, str]:
    if not done:
        return "no tool ran", "–"
    waits = sorted(started.tool * 1e3 for started in done)
    before = statistics.median((started.end - started.tool) * 1e3 for started in done)
    return f"{statistics.median(waits):,.0f} ({waits[0]:,.0f}–{waits[-1]:,.0f})", f"{before:,.0f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatch", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round with a short turn; figures are rough")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--write", action="store_true", help="keep the table")
    options = parser.parse_args()
    if not install.is_installed():
        raise SystemExit("the harnesses are not installed: python tests/clients/install.py")
    peers.ensure_tokenizer()
    peers.install_dynamo()
    rounds, sentences = (1, 3) if options.quick else (options.rounds, 10)
    table = report(measure_all(rounds, sentences), rounds)
    print(product_report.experiment(table))
    if options.write:
        figures.write_table("dispatch", table)


if __name__ == "__main__":
    main()
