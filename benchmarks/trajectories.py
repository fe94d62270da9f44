"""How much of an agent session can be trained on as one piece, behind several servers, on one real vLLM.

    python -m benchmarks.trajectories [--turns N] [--servers A,B] [--sessions A,B] [--model NAME]

A real harness works through a session behind each server, as in ``make compare``. What the engine was given and what it
sampled is its own log. A *piece* is a run of turns of which each prompt begins with the last prompt and the turn that
was sampled for it: whoever joins captured calls keeps the longest one. *Roots* and *leaves* are what the graph of
OpenEnv 0.10.0 has for the calls of that one conversation: where it begins anew, and how many sequences come of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from benchmarks import peers
from benchmarks.compare import MODELS, Bench
from benchmarks.compare_servers import ROWS, cpu, engine
from benchmarks.compare_sessions import SESSIONS
from benchmarks.session_report import Play, conversation
from benchmarks.template_models import TEMPLATES, scripted
from clients import install
from judges import install as judges

_ROOTS = """\
import json, sys
from openenv.core.harness.capture.graph import RolloutGraph, TurnNode
graph = RolloutGraph()
for number, (prompt, sampled) in enumerate(json.load(sys.stdin)):
    graph.add_turn(TurnNode(str(number), prompt, sampled, [-1.0] * len(sampled)))
print(json.dumps(graph.stats()))
"""


def pieces(plays: Sequence[Play]) -> list[int]:
    """Return how many sampled tokens each unbroken piece of a conversation has."""
    found = [len(plays[0].token_ids)]
    for last, play in pairwise(plays):
        # The token that ends a turn may be one that the template does not print.
        before = [*last.prompt_token_ids, *last.token_ids[:-1]]
        if list(play.prompt_token_ids[: len(before)]) == before:
            found[-1] += len(play.token_ids)
        else:
            found.append(len(play.token_ids))
    return found


def judged(plays: Sequence[Play]) -> str:
    """Return how many roots and leaves OpenEnv's graph has for these calls."""
    calls = json.dumps([(list(play.prompt_token_ids), list(play.token_ids)) for play in plays])
    command = [str(judges.training()), "-c", _ROOTS]
    done = subprocess.run(command, input=calls, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return f"{found['n_roots']} roots, {found['n_leaves']} leaves"


def main() -> None:
    """Measure and print a row for each session and server."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trajectories", description=__doc__)
    parser.add_argument("--turns", type=int, default=40, help="turns with calls of a session")
    parser.add_argument("--servers", default="vLLM,singletree", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--sessions", default=",".join(SESSIONS), help=f"of {', '.join(SESSIONS)}")
    parser.add_argument("--model", default=MODELS[0], help="a chat template, FOLDER/NAME")
    options = parser.parse_args()
    if not install.is_installed():
        install.install()
    peers.ensure_tokenizer()
    root = Path(tempfile.mkdtemp(prefix="singletree-trajectories-"))
    try:
        model = scripted(TEMPLATES / f"{options.model}.jinja", root / "model")
        (root / "scripts").mkdir()
        with engine(model, cpu(), root / "scripts") as real, ExitStack() as stack:
            bench = Bench(model, real, options.turns, root)
            urls = {name: stack.enter_context(ROWS[name].front(real)) for name in options.servers.split(",")}
            for session in options.sessions.split(","):
                for server, url in urls.items():
                    cell = bench.live(session, server, url)
                    plays = real.plays()
                    try:
                        calls = conversation(plays, bench.scripts)
                    except ValueError:  # It ended early: what there is of it counts.
                        calls = [play for play in plays if play.script in bench.scripts]
                    found = pieces(calls)
                    print(
                        f"{model.name}, {SESSIONS[session].title}, {server}: {len(calls)} turns, "
                        f"{sum(found)} tokens sampled, longest piece {max(found) / sum(found):.1%} of "
                        f"{len(found)} pieces, {judged(calls)} {cell.complaints}",
                        flush=True,
                    )
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
