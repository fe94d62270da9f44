"""All benchmarks in one run, beside Dynamo, which is installed first: ``make bench``.

    python -m benchmarks.product [--quick] [--alone] [--parts NAMES]

Looks first whether the machine is quiet. Writes ``benchmarks/results/<version>-<machine>.json``; ``make docs`` makes
the table of the README and the page of figures from it. A run takes ten minutes on two cores, a quick one two
minutes; quick figures are rough and make no document.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import date

from tokenizers import Tokenizer

from benchmarks import figures, peers, servers
from benchmarks.figures import DYNAMO, FAST_DYNAMO, Result
from benchmarks.processor import Watch, calibrate, machine
from benchmarks.product_parts import PARTS, Bench
from benchmarks.stream_reader import WrongAnswer
from benchmarks.targets import verdicts
from singletree import __version__

_ALONE = frozenset({"starts", "streams", "memory"})
"""Parts that start servers of their own: the others run no longer then."""


_LOOK_SECONDS = 3.0


def run(bench: Bench, names: list[str]) -> None:
    """Run the parts of those names; a part that fails is noted, and the others run."""
    for name in names:
        began = time.monotonic()
        print(f"{name}: {(PARTS[name].__doc__ or '').strip()}", flush=True)
        try:
            PARTS[name](bench)
        except (WrongAnswer, RuntimeError, OSError, SystemExit, ZeroDivisionError) as error:
            bench.result.failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"{name} failed: {bench.result.failed[name]}", file=sys.stderr, flush=True)
        bench.result.part_seconds[name] = round(time.monotonic() - began, 1)
        bench.result.others_meanwhile = round(statistics.median(bench.others or [0.0]), 3)
        figures.write(bench.result)  # A run that is cut keeps what it has.


def _measure(bench: Bench, names: list[str]) -> None:
    together = [name for name in names if name not in _ALONE]
    with ExitStack() as stack:
        if together:
            bench.running = [stack.enter_context(servers.singletree_before_vllm())]
            if bench.result.dynamo:
                bench.running.append(stack.enter_context(servers.dynamo(DYNAMO)))
                fast = servers.dynamo(FAST_DYNAMO, ("--tokenizer", "fastokens"))
                bench.running.append(stack.enter_context(fast))
        run(bench, together)
    run(bench, [name for name in names if name in _ALONE])


def _lines(result: Result) -> Iterator[str]:
    """Yield the medians of each figure, and which miss their targets."""
    for name, figure in result.figures.items():
        yield f"{name}, {figure.unit}: " + ", ".join(
            f"{figure.median(each):,.2f} {each}" for each in figure.values
        )
    for verdict in verdicts(result):
        if verdict.is_met is False:
            beside, most = (
                f" times {verdict.target.peer}'s" if verdict.target.peer else "",
                verdict.target.bound,
            )
            yield f"missed: {verdict.name} is {verdict.value:.2f}{beside}; the target is at most {most:g}"


def main() -> None:
    """Install, look, measure, write, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.product", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two minutes; figures are rough")
    parser.add_argument("--alone", action="store_true", help="measure singletree without Dynamo")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"only these of {', '.join(PARTS)}")
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    peers.ensure_tokenizer()
    watch = Watch(())
    time.sleep(_LOOK_SECONDS)
    others = round(watch.stop().others / _LOOK_SECONDS, 3)
    times = [calibrate() for _ in range(12)]
    spread = round(max(times) / min(times), 3)
    result = Result(__version__, date.today().isoformat(), machine(), options.quick, others, spread)
    if not result.is_quiet:
        print(
            f"The machine is not quiet: {others:.2f} cores are busy, a piece of work varies {spread:.2f} times"
        )
    try:
        if not options.alone:
            peers.install_dynamo()
            result.dynamo = peers.DYNAMO_VERSION
    except (SystemExit, OSError, subprocess.SubprocessError) as error:
        result.failed[DYNAMO] = f"it could not be installed: {error}"[:300]
    tokenizer = Tokenizer.from_file(str(peers.QWEN3 / "tokenizer.json"))
    _measure(Bench(result, (), tokenizer, 1 if options.quick else 3, options.quick), names)
    for line in _lines(result):
        print(line)
    print(f"\nwrote {figures.write(result)}; `make docs` makes the documents from it")
    raise SystemExit(int(bool(result.failed)))


if __name__ == "__main__":
    main()
