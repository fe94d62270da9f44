"""What the parser costs a token, by family and by the length of what it reads.

Text, reasoning and one call whose argument is a file of 1k to 64k tokens go through a parser piece by piece, a piece
being about a token. Prints CPU microseconds a piece (best of three), megabytes a second at the longest argument, how
many times what 256 KB cost 1 MB of arguments costs (both in pieces of four characters: four times, if the cost is
linear), and the cost of a calibration loop before and after, since machines differ and others use them too.

    python -m benchmarks.parse [--families a,b] [--sizes 1000,4000,16000,64000] [--json FILE] [--write]

vLLM's and SGLang's own parsers read the same pieces in the same run, where ~/.cache/singletree-peers (or
$SINGLETREE_PEERS) holds environments ``vllm`` and ``sglang`` with them. SGLang's parsers need little of what it
declares: an environment that sees vLLM's packages, and ``pip install --no-deps sglang orjson xxhash pybase64
partial_json_parser openai-harmony IPython traitlets zstandard datasets triton``. Each of their streams has a cap of
seconds: a parser whose cost grows with the length would take minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import documents
from singletree import families
from singletree.conversation import Reasoning, Tool, ToolCall
from singletree.parsing.family import Family
from singletree.parsing.parser import Parser
from singletree.parsing.render_turn import render_turn

PIECE = re.compile(r"<[|/]?[\w:▁｜|]+>|\s?\w{1,6}|\s+|[^\w\s]{1,2}")
PROSE = 'The quick <b>brown</b> fox said "no", jumped\nover `x < y` the lazy dog (see step_12): a[i] = {"k": 1}.\n'
CODE = 'def f(path: str) -> dict:\n    """Read `path`."""\n'
CODE += "    if a < b and x[\"k\"] != 'v\\n': # naïve 数据\n        return {}\n"
TOOL = Tool(
    "write_file", parameters={"properties": {"path": {"type": "string"}, "content": {"type": "string"}}}
)
SIZES = (1_000, 4_000, 16_000, 64_000)
ROUNDS = 3
KILOBYTES = (256, 1024)
HOME = Path(os.environ.get("SINGLETREE_PEERS", "~/.cache/singletree-peers")).expanduser()
# Ours -> the tool and the reasoning parser of each peer.
PEERS: dict[str, dict[str, tuple[str, str | None]]] = {
    "vllm": {
        "qwen3": ("hermes", "qwen3"),
        "qwen3_coder": ("qwen3_coder", "qwen3"),
        "kimi_k2": ("kimi_k2", "kimi_k2"),
        "deepseek_v3_1": ("deepseek_v31", "deepseek_v3"),
        "deepseek_v4": ("deepseek_v4", "deepseek_v4"),
        "glm47": ("glm47", "glm47"),
        "minimax_m2": ("minimax_m2", "minimax_m2"),
        "gemma4": ("gemma4", "gemma4"),
        "mistral": ("mistral", "mistral"),
        "seed_oss": ("seed_oss", "seed_oss"),
        "llama3_json": ("llama3_json", None),
        "pythonic": ("pythonic", None),
    },
    "sglang": {
        "qwen3": ("qwen25", "qwen3"),
        "qwen3_coder": ("qwen3_coder", "qwen3"),
        "kimi_k2": ("kimi_k2", "kimi_k2"),
        "deepseek_v3_1": ("deepseekv31", "deepseek-v3"),
        "deepseek_v4": ("deepseekv4", "deepseek-v4"),
        "glm47": ("glm47", "glm45"),
        "minimax_m2": ("minimax-m2", "minimax"),
        "gemma4": ("gemma4", "gemma4"),
        "mistral": ("mistral", "mistral"),
        "llama3_json": ("llama3", None),
        "pythonic": ("pythonic", None),
    },
}


def pieces(text: str) -> list[str]:
    """``text`` in pieces of about a token, its tags whole."""
    cut = PIECE.findall(text)
    assert "".join(cut) == text
    return cut


def body(tokens: int) -> str:
    """A file of about ``tokens`` pieces."""
    return CODE * max(1, tokens // len(pieces(CODE)))


def call(family: Family, tokens: int) -> str:
    """A call that writes such a file, as the family writes it."""
    arguments = json.dumps({"path": "a.py", "content": body(tokens)}, ensure_ascii=False)
    return render_turn(family, [ToolCall(TOOL.name, arguments, "abcdefghi")])


def measure(family: Family, cut: Sequence[str], tail: str) -> float:
    """CPU microseconds a piece."""
    best = float("inf")
    for _ in range(ROUNDS):
        parser = Parser(family, [TOOL], tail)
        feed = parser.feed
        begun = time.process_time()
        for piece in cut:
            feed(piece)
        parser.close()
        best = min(best, time.process_time() - begun)
    return best / len(cut) * 1e6


def calibrate() -> float:
    """CPU nanoseconds of one turn of a fixed loop: compare figures of two runs by it."""
    begun = time.process_time()
    total = 0
    for i in range(2_000_000):
        total += i & 7
    return (time.process_time() - begun) / 2_000_000 * 1e9


def growth(family: Family) -> float:
    """How many times what 256 KB of arguments cost 1 MB costs, in pieces of four characters."""
    costs = []
    for kilobytes in KILOBYTES:
        arguments = json.dumps({"path": "a.py", "content": CODE * (kilobytes * 1024 // len(CODE))})
        text = render_turn(family, [ToolCall(TOOL.name, arguments, "abcdefghi")])
        cut = [text[at : at + 4] for at in range(0, len(text), 4)]
        costs.append(measure(family, cut, family.message_header or " ") * len(cut))
    return costs[1] / costs[0]


def row(family: Family, sizes: Sequence[int]) -> dict[str, Any]:
    """All figures of one family."""
    closed = family.message_header or " "
    found: dict[str, Any] = {"family": family.name}
    for name, cut in streams(family, sizes).items():
        found[name] = measure(family, cut, closed)
        if name.isdigit():
            found["MB/s"] = len("".join(cut).encode()) / (found[name] * len(cut))
    if family.forms:
        found["1 MB : 256 KB"] = growth(family)
    return found


def streams(family: Family, sizes: Sequence[int]) -> dict[str, list[str]]:
    """What is read of one family, in pieces: text, reasoning, and calls by the length of their argument."""
    found = {"text": pieces(PROSE * 200)}
    if family.reasoning:
        found["reasoning"] = pieces(render_turn(family, [Reasoning(PROSE * 200)]))
    return found | ({str(size): pieces(call(family, size)) for size in sizes} if family.forms else {})


def peer_rows(peer: str, names: Sequence[str], sizes: Sequence[int], cap: float) -> list[dict[str, Any]]:
    """The same pieces through a peer's parsers, in its own environment; empty where it does not run."""
    jobs = []
    for name in (n for n in names if n in PEERS[peer]):
        family, (tools, reasoning) = families.get(name), PEERS[peer][name]
        job = {"family": name, "tools": tools, "reasoning": reasoning, "streams": streams(family, sizes)}
        jobs.append(job)
    tool = {"name": TOOL.name, "parameters": TOOL.parameters}
    order = json.dumps({"jobs": jobs, "cap": cap, "tool": tool})
    python, script = HOME / peer / "bin" / "python", Path(__file__).with_name(f"parse_{peer}.py")
    if not python.exists():
        print(f"{peer}: no environment in {python.parent.parent}")
        return []
    done = subprocess.run([python, script], input=order, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{peer}'s parsers did not run:", done.stderr.strip().splitlines()[-1:])
        return []
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def version(peer: str) -> str:
    """Which version of a peer is there; empty where none is."""
    distribution = "sglang" if peer == "sglang" else "vllm*"
    found = sorted((HOME / peer).glob(f"lib/python3*/site-packages/{distribution}-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").replace("_", "-").replace("-", " ", 1) if found else ""


def cell(found: dict[str, Any], column: str) -> str:
    """One figure for the eye."""
    value = found.get(column, "")
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """The figures of one parser library."""
    return documents.table(
        ["family", *columns], [[r["family"], *(cell(r, c) for c in columns)] for r in rows]
    )


def side_by_side(
    rows: Sequence[dict[str, Any]], peers: dict[str, list[dict[str, Any]]], columns: Sequence[str]
) -> str:
    """One line for each family that somebody else reads as well: ours, then theirs, for each stream."""
    theirs = {peer: {r["family"]: r for r in found} for peer, found in peers.items()}
    shared = [r for r in rows if any(r["family"] in found for found in theirs.values())]
    lines = [
        [
            r["family"],
            *(" / ".join([cell(r, c), *(cell(f.get(r["family"], {}), c) or "–" for f in theirs.values())])
              for c in columns),
        ]
        for r in shared
    ]  # fmt: skip
    return documents.table(["family", *columns], lines)


def report(figures: dict[str, Any], sizes: Sequence[int]) -> str:
    """All of it as Markdown."""
    streams_of = ["text", "reasoning", *map(str, sizes)]
    before, after = figures["calibration_ns"]
    parts = [
        f"{documents.today()}; one turn of a fixed loop took {before:.1f} ns before and {after:.1f} ns after. "
        "CPU µs a token, by family and by the tokens of the argument:",
        table(figures["rows"], [*streams_of, "MB/s", "1 MB : 256 KB"]),
    ]
    peers = {peer: rows for peer, rows in figures["peers"].items() if rows}
    if peers:
        names = " / ".join(["singletree", *(version(peer) for peer in peers)])
        parts += [
            f"The same pieces, {names} (>: {figures['cap']:.0f} s of CPU were not enough, nothing longer was tried):",
            side_by_side(figures["rows"], peers, streams_of),
        ]
    return "\n\n".join(parts)


def main() -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default="", help="only these, separated by commas")
    parser.add_argument(
        "--sizes", default=",".join(map(str, SIZES)), help="lengths of the argument in tokens"
    )
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--alone", action="store_true", help="without vLLM and SGLang")
    parser.add_argument("--cap", type=float, default=15.0, help="CPU seconds a peer may take for one stream")
    parser.add_argument("--write", action="store_true", help="write the results into docs/benchmarks.md")
    options = parser.parse_args()
    sizes = [int(s) for s in options.sizes.split(",")]
    names = options.families.split(",") if options.families else [f.name for f in families.table()]
    before = calibrate()
    rows = [row(families.get(name), sizes) for name in names]
    after = calibrate()
    peers = {} if options.alone else {peer: peer_rows(peer, names, sizes, options.cap) for peer in PEERS}
    figures = {"calibration_ns": [before, after], "rows": rows, "peers": peers, "cap": options.cap}
    text = report(figures, sizes)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    if options.write:
        documents.replace("parse", text)


if __name__ == "__main__":
    main()
