"""How much of each prompt of a real harness is the last prompt and the turn that was generated on it, token by token.

    python -m benchmarks.sessions [--quick] [--turns N] [--harnesses NAMES] [--templates FOLDER] [--write]

Every harness on every API that it supports works through 40 turns with tool calls while the scripted engine writes what
a model would. What came to the engine is counted from the engine's own log; what is lost is explained by the server
(``singletree explain``). Needs the harnesses (``python tests/clients/install.py``). ``--write`` puts the tables into
docs/prefix.md, ``--record`` every turn into a file of JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchmarks import documents, peers
from benchmarks.session_report import Session, conversation, follow, percent, report, share, share_but_edits
from benchmarks.template_models import SESSION_TEMPLATES, TEMPLATES, Scripted, scripted
from clients import install, session_script
from clients.harness import HARNESSES, Harness, Outcome, Task, run
from clients.served import MODEL, Server, serving

_QUICK = ("claude-2.1.329", "codex", "opencode-chat", "pi-responses")
_SECONDS = 900.0
_SESSIONS = "/v1/singletree/sessions"


def measure(
    harness: Harness, model: Scripted, count: int, folder: Path, flags: Sequence[str] = ()
) -> Session:
    """One session of ``count`` turns with calls and one that answers; ``flags`` are the server's."""
    workspace, home = folder / "workspace", folder / "home"
    session_script.make_workspace(workspace)
    home.mkdir()
    texts = [model.writes(parts) for parts in session_script.turns(harness, workspace, count)]
    names = [f"t{number}" for number in range(len(texts))]
    with serving(model.folder, folder / "server", ("--default-thinking", "on", *flags)) as server:
        for name, text in zip(names, texts, strict=True):
            (server.scripts / f"{name}.txt").write_bytes(text.encode())
        prompt = f"Look after the modules here, one after another. [[script:{','.join(names)}]]"
        try:
            outcome = run(harness, Task(server.url, MODEL, prompt, home, workspace), _SECONDS)
        except subprocess.TimeoutExpired:
            outcome = Outcome("", [f"it did not end in {_SECONDS:.0f} s"], "")
        return _counted(harness, model, outcome, server, names)


def _counted(
    harness: Harness, model: Scripted, outcome: Outcome, server: Server, names: Sequence[str]
) -> Session:
    plays = server.plays(["", *names])
    complaints = list(outcome.complaints)
    if outcome.answer != session_script.answer(len(names) - 1):
        complaints.append(f"its answer is {outcome.answer!r}")
    try:
        main = conversation(plays, names)
    except ValueError as error:
        return Session(
            harness.title, model.name, (), complaints=(*complaints, str(error), outcome.output[-800:])
        )
    steps = _steps(server.url)
    in_main = {len(play.prompt_token_ids) for play in main}
    beside = [play for play in plays if not any(play is one for one in main)]
    broken = [step for step in steps if step["break"] is not None]
    return Session(
        harness.title,
        model.name,
        tuple(follow(main, steps)),
        tuple(len(play.prompt_token_ids) for play in beside),
        tuple(
            f"{step['break']['cause']} in {step['break']['place']}, {step['lost_tokens']:,} tokens"
            for step in broken
            if step["prompt_tokens"] not in in_main
        ),
        sum(step["lost_tokens"] for step in broken if step["prompt_tokens"] in in_main),
        tuple(complaints),
    )


def _steps(url: str) -> list[dict[str, Any]]:
    """The steps of all sessions that the server knows."""
    sessions = _fetch(f"{url}{_SESSIONS}")["data"]
    return [step for each in sessions for step in _fetch(f"{url}{_SESSIONS}/{quote(each['id'])}")["steps"]]


def _fetch(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        body: dict[str, Any] = json.load(answer)
        return body


def _record(sessions: Sequence[Session], file: Path | None) -> None:
    if file is not None:
        records = [dataclasses.asdict(session) for session in sessions]
        file.write_text(json.dumps(records, indent=1), encoding="utf-8")


def _options() -> argparse.Namespace:
    titles = [harness.title for harness in HARNESSES]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sessions", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 turns, one model, four harnesses")
    parser.add_argument("--turns", type=int, help="turns with calls of a session (40)")
    parser.add_argument("--harnesses", help=f"of {', '.join(titles)}")
    parser.add_argument("--models", help=f"chat templates, FOLDER/NAME ({','.join(SESSION_TEMPLATES)})")
    parser.add_argument("--templates", type=Path, default=TEMPLATES, help="a folder of folders")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write every turn as JSON")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/prefix.md")
    options = parser.parse_args()
    wanted = options.harnesses.split(",") if options.harnesses else _QUICK if options.quick else titles
    if unknown := set(wanted) - set(titles):
        parser.error(f"no harness is called {', '.join(sorted(unknown))}; there are {', '.join(titles)}")
    options.harnesses = [harness for harness in HARNESSES if harness.title in wanted]
    chosen = SESSION_TEMPLATES[:1] if options.quick else SESSION_TEMPLATES
    options.models = options.models.split(",") if options.models else chosen
    options.turns = options.turns or (10 if options.quick else 40)
    return options


def main() -> None:
    """Measure and print."""
    options = _options()
    missing = [name for name in options.models if not (options.templates / f"{name}.jinja").is_file()]
    if missing:
        print(f"There is no {', '.join(missing)} in {options.templates}: name a folder with --templates")
        return
    if not install.is_installed():
        print("The harnesses are not installed: python tests/clients/install.py")
        return
    peers.ensure_tokenizer()
    sessions: list[Session] = []
    root = Path(tempfile.mkdtemp(prefix="singletree-sessions-"))
    try:
        for name in options.models:
            model = scripted(options.templates / f"{name}.jinja", root / name / "model")
            for harness in options.harnesses:
                began = time.monotonic()
                session = measure(harness, model, options.turns, root / name / harness.title)
                sessions.append(session)
                took, shares = (
                    time.monotonic() - began,
                    (share(session.turns), share_but_edits(session.turns)),
                )
                result = f"{percent(shares[0])}, {percent(shares[1])} but edits, {took:.0f} s"
                print(f"{harness.title}, {model.name}: {result} {'; '.join(session.complaints)}", flush=True)
                _record(sessions, options.record)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    text = report(sessions)
    print(text)
    if options.write:
        documents.replace_in_prefix("sessions", text)


if __name__ == "__main__":
    main()
