"""Records the shapes of real harnesses' sessions: lengths of prompts and turns, and what each prompt begins with.

    python -m benchmarks.agent_shapes [--turns N] [--harnesses NAMES]

Each harness works through the scripted task of ``benchmarks.sessions`` twice, in two folders, with the scripted engine.
The shape is taken from the server's request records (``--trace-path``), which have no texts, and is written to
agent_shapes.json. ``routing_trace`` plays it. Needs the harnesses (``python tests/clients/install.py``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from singletree.prefixes import common_prefix

FILE = Path(__file__).with_suffix(".json")
_HARNESSES = ("claude-2.1.329", "codex", "openclaw-responses", "opencode-chat", "pi-messages", "qwen-chat")
_TURNS = 24


@dataclass(frozen=True, slots=True)
class RequestShape:
    """One request of a session.

    Attributes:
        prompt, generated: tokens.
        follows: the number of the earlier request with whose prompt and turn this prompt begins; None for none.
        matched: how many tokens of it they have in common.
        seconds: from the end of the last request to the arrival of this one: the harness and its tools.
    """

    prompt: int
    generated: int
    follows: int | None
    matched: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SessionShape:
    """One session of a harness; ``shared`` tokens of its first prompts are those of its other sessions, too."""

    harness: str
    shared: int
    requests: tuple[RequestShape, ...]


def shapes() -> tuple[SessionShape, ...]:
    """Return the recorded shapes."""
    recorded = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(
        SessionShape(
            each["harness"], each["shared"], tuple(RequestShape(**request) for request in each["requests"])
        )
        for each in recorded
    )


def session_shape(harness: str, records: Sequence[Mapping[str, Any]], other: Sequence[Any]) -> SessionShape:
    """Return the shape of a session.

    Args:
        records: its request records, in the order in which they were written.
        other: those of another session of the harness.
    """
    asked = sorted(_requests(records), key=lambda request: request["request_received_ms"])
    hashes = [request["replay"]["input_sequence_hashes"] for request in asked]
    block = asked[0]["replay"]["trace_block_size"]
    made, ended = [], asked[0]["request_received_ms"]
    for number, request in enumerate(asked):
        common = [common_prefix(hashes[number], earlier) for earlier in hashes[:number]]
        most = max(common, default=0)
        follows = max((at for at in range(number) if common[at] == most), default=None) if most else None
        matched = most * block
        if follows is not None and request["singletree"]["course"] == "appended":
            matched = max(matched, request["singletree"]["matched_tokens"])
            whole = asked[follows]["input_tokens"] + asked[follows]["output_tokens"]
            matched = min(matched, whole, request["input_tokens"])
        seconds = max(0, request["request_received_ms"] - ended) / 1000
        made.append(
            RequestShape(request["input_tokens"], request["output_tokens"], follows, matched, seconds)
        )
        ended = request["request_received_ms"] + request["total_time_ms"]
    longest = max(range(len(asked)), key=lambda at: len(hashes[at]))
    others = [request["replay"]["input_sequence_hashes"] for request in _requests(other)]
    shared = max((common_prefix(hashes[longest], each) for each in others), default=0) * block
    return SessionShape(harness, shared, tuple(made))


def _requests(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [record["request"] for record in records if record["event_type"] == "request_end"]


def _recorded(titles: Sequence[str], turns: int) -> list[SessionShape]:
    from benchmarks import session_models, sessions  # makes the package ``clients`` known

    from clients.harness import HARNESSES  # isort: skip

    made = []
    with tempfile.TemporaryDirectory(prefix="singletree-shapes-") as folder:
        root = Path(folder)
        template = session_models.TEMPLATES / f"{session_models.CHOSEN[0]}.jinja"
        model = session_models.scripted(template, root / "model")
        for harness in HARNESSES:
            if harness.title not in titles:
                continue
            both = []
            for number in range(2):
                path = root / f"{harness.title}-{number}.jsonl"
                at = root / f"{harness.title}-{number}"
                session = sessions.measure(harness, model, turns, at, ("--trace-path", str(path)))
                print(f"{harness.title}: {'; '.join(session.complaints) or 'recorded'}", flush=True)
                both.append([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
            made.append(session_shape(harness.title, *both))
    return made


def main() -> None:
    """Record and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agent_shapes", description=__doc__)
    parser.add_argument("--turns", type=int, default=_TURNS, help="turns with calls of a session")
    parser.add_argument("--harnesses", default=",".join(_HARNESSES))
    options = parser.parse_args()
    known = {each.harness: each for each in shapes()} if FILE.exists() else {}
    known |= {each.harness: each for each in _recorded(options.harnesses.split(","), options.turns)}
    made = [asdict(known[name]) for name in sorted(known)]
    lines = [
        f' {{"harness": {json.dumps(each["harness"])}, "shared": {each["shared"]}, "requests": [\n  '
        + ",\n  ".join(json.dumps(request) for request in each["requests"])
        + "]}"
        for each in made
    ]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
