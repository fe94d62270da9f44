"""What the parser costs a token, by family and by the length of what it reads.

Text, reasoning and one call whose argument is a file of 1k to 64k tokens go through a parser piece by piece, a piece
being about a token. Prints CPU microseconds a piece (best of three), megabytes a second at the longest argument, and
the cost of a calibration loop before and after, since machines differ and others use them too.

    python benchmarks/parse.py [--families a,b] [--sizes 1000,4000,16000,64000] [--json FILE] [--peers DIR]

``--peers`` names a Python environment in which vLLM is installed: its own parsers then read the same pieces in the
same run, for the families that both have, each size under a cap of seconds (a parser whose cost grows with the length
would take minutes).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from singletree import families
from singletree.conversation import Reasoning, Tool, ToolCall
from singletree.parsing.draw import draw
from singletree.parsing.family import Family
from singletree.parsing.parser import Parser

PIECE = re.compile(r"<[|/]?[\w:▁｜|]+>|\s?\w{1,6}|\s+|[^\w\s]{1,2}")
PROSE = 'The quick <b>brown</b> fox said "no", jumped\nover `x < y` the lazy dog (see step_12): a[i] = {"k": 1}.\n'
CODE = 'def f(path: str) -> dict:\n    """Read `path`."""\n'
CODE += "    if a < b and x[\"k\"] != 'v\\n': # naïve 数据\n        return {}\n"
TOOL = Tool(
    "write_file", parameters={"properties": {"path": {"type": "string"}, "content": {"type": "string"}}}
)
SIZES = (1_000, 4_000, 16_000, 64_000)
ROUNDS = 3
# Ours -> vLLM's tool and reasoning parser.
IN_VLLM = {
    "qwen3": ("hermes", "qwen3"),
    "qwen3_coder": ("qwen3_coder", "qwen3"),
    "kimi_k2": ("kimi_k2", "kimi_k2"),
    "glm47": ("glm47", "glm47"),
    "minimax_m2": ("minimax_m2", "minimax_m2"),
    "deepseek_v4": ("deepseek_v4", "deepseek_v4"),
    "gemma4": ("gemma4", "gemma4"),
    "llama3_json": ("llama3_json", None),
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
    return draw(family, [ToolCall(TOOL.name, arguments, "abcdefghi")])


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


def row(family: Family, sizes: Sequence[int]) -> dict[str, Any]:
    """All figures of one family."""
    closed = family.turn or " "
    found: dict[str, Any] = {"family": family.name, "text": measure(family, pieces(PROSE * 200), closed)}
    if family.reasoning:
        thought = draw(family, [Reasoning(PROSE * 200)])
        found["reasoning"] = measure(family, pieces(thought), closed)
    for size in sizes if family.forms else ():
        cut = pieces(call(family, size))
        found[str(size)] = measure(family, cut, closed)
        found["MB/s"] = len("".join(cut).encode()) / (found[str(size)] * len(cut))
    return found


def peer_rows(python: Path, names: Sequence[str], sizes: Sequence[int], cap: float) -> list[dict[str, Any]]:
    """The same pieces through vLLM's parsers, in its own environment; empty where it does not run."""
    jobs = []
    for name in (n for n in names if n in IN_VLLM):
        family, (tools, reasoning) = families.get(name), IN_VLLM[name]
        streams = {"text": pieces(PROSE * 200), **{str(s): pieces(call(family, s)) for s in sizes}}
        jobs.append({"family": name, "tools": tools, "reasoning": reasoning, "streams": streams})
    order = json.dumps({"jobs": jobs, "cap": cap, "tool": {"name": TOOL.name, "parameters": TOOL.parameters}})
    script = Path(__file__).with_name("parse_vllm.py")
    done = subprocess.run([python, script], input=order, capture_output=True, text=True, check=False)
    if done.returncode:
        print("vLLM's parsers did not run:", done.stderr.strip().splitlines()[-1:])
        return []
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """The figures for the eye."""
    lines = ["| " + " | ".join(["family", *columns]) + " |", "|---|" + "---:|" * len(columns)]
    for found in rows:
        cells = (
            f"{found[c]:.2f}" if isinstance(found.get(c), float) else str(found.get(c, "")) for c in columns
        )
        lines.append("| " + " | ".join([found["family"], *cells]) + " |")
    return "\n".join(lines)


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
    parser.add_argument("--peers", type=Path, help="a Python environment with vLLM")
    parser.add_argument("--cap", type=float, default=20.0, help="seconds a peer may take for one stream")
    options = parser.parse_args()
    sizes = [int(s) for s in options.sizes.split(",")]
    names = options.families.split(",") if options.families else [f.name for f in families.table()]
    before = calibrate()
    rows = [row(families.get(name), sizes) for name in names]
    after = calibrate()
    columns = ["text", "reasoning", *map(str, sizes)]
    print(table(rows, [*columns, "MB/s"]))
    print(f"\nµs of CPU a piece; calibration loop {before:.1f} ns before, {after:.1f} ns after")
    peers: list[dict[str, Any]] = []
    if options.peers:
        peers = peer_rows(options.peers / "bin" / "python", names, sizes, options.cap)
        print("\nvLLM's parsers on the same pieces ('>' where the cap came first):\n")
        print(table(peers, columns))
    if options.json:
        figures = {"calibration_ns": [before, after], "rows": rows, "vllm": peers}
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
