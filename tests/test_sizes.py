"""Modules and functions stay small, and names have a meaning."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from statistics import quantiles

from loaded_modules import loaded, sizes
from source import PACKAGE, ROOT, Function, parsed, statements, tracked_python

MEDIAN_LINES = 200
PERCENTILE_95_LINES = 400
LONGEST_LINES = 500
"""Lines of a module: the median and the 95th percentile over all modules, and the limit for one not in ``EXCUSED``."""

EXCUSED: dict[str, str] = {}
"""Modules longer than ``LONGEST_LINES``, by path, and the reason why each stays whole."""

SOURCE = {
    "lines": 70_721,
    "modules": 320,
    "lines of the core": 35_217,
    "lines that --engine-url loads": 33_702,
}
"""The most that the source may have. A change that adds a feature names the lines that it removes, until there are
52,000 lines in 280 modules. The core is within its 36,000, and what --engine-url loads within its 34,000.
Since 67,367 lines in 429 modules, 5,000 were removed, and capture for training (2,020), checks of any endpoint
(2,400), the service and the first screen (190), the file of keys (360), receipts and budgets (1,020, with several
processes), forks (530), saved sessions (480), foresight (340), what trainers need (300) and grammars in Lark for
XGrammar (155) and saved caches of vLLM and SGLang (186) were added; the last two against 3,056 lines of benchmarks."""

BENCHMARKS = 4_997
"""The most lines that the benchmarks may have, as was the goal: a change that adds one names the lines that it removes.
Pages of their results are made in ``docs``, and what tests use of them is in ``tests``. What a finished comparison
measured stands in ``docs/decisions``, with the commit that has its program."""

FEWEST_LINES = 40
SMALL: dict[str, str] = {
    "owners.py": "part of the ground: every area names owners",
    "private_files.py": "part of the ground: stores, engines and commands write files",
    "server/sparse_log.py": "used by rooms that do not import one another",
}
"""Modules of the source with fewer lines than ``FEWEST_LINES``, and the reason why each is one of its own."""

FUNCTION_LINES = 80
MEANINGLESS = {"util", "common", "base", "manager", "handler", "helper"}

FILES = {path.relative_to(ROOT).as_posix(): path for path in tracked_python()}


def words(name: str) -> set[str]:
    """Split a snake_case or CamelCase name into words in the singular: ``ToolHelpers`` -> tool, helper."""
    found = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return {word.lower().removesuffix("s") for word in found}


@cache
def tree(path: Path) -> ast.Module:
    return parsed(path, ROOT).tree


def test_there_is_something_to_measure() -> None:
    assert any(PACKAGE in path.parents for path in FILES.values())


def test_words() -> None:
    assert words("ToolHelpers") == {"tool", "helper"}
    assert words("http_utils") == {"http", "util"}
    assert words("SSEManager") == {"sse", "manager"}


def test_modules_are_short() -> None:
    lines = {name: path.read_text(encoding="utf-8").count("\n") for name, path in FILES.items()}
    percentiles = quantiles(lines.values(), n=20)
    assert percentiles[9] <= MEDIAN_LINES
    assert percentiles[18] <= PERCENTILE_95_LINES
    assert {name for name, count in lines.items() if count > LONGEST_LINES} == set(EXCUSED)


def test_the_source_does_not_grow() -> None:
    files, lines, core = sizes()
    found = dict(zip(SOURCE, (lines, files, core, loaded()[1]), strict=True))
    assert {name: count for name, count in found.items() if count > SOURCE[name]} == {}
    # A limit far above what is there would let it grow again.
    assert {name: count for name, count in found.items() if count < 0.98 * SOURCE[name]} == {}


def test_the_benchmarks_do_not_grow() -> None:
    paths = [path for name, path in FILES.items() if name.startswith("benchmarks/")]
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in paths)
    assert 0.98 * BENCHMARKS <= lines <= BENCHMARKS


def test_modules_are_no_crumbs() -> None:
    names = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    small = {
        name
        for name, path in names.items()
        if path.read_text(encoding="utf-8").count("\n") < FEWEST_LINES
        and path.name not in ("__init__.py", "__main__.py")
    }
    assert small == set(SMALL)


def test_functions_are_short() -> None:
    lengths = {
        f"{name}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for name, path in FILES.items()
        for node in statements(tree(path))
        if isinstance(node, Function)
    }
    assert {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES} == {}


def test_names_have_a_meaning() -> None:
    found = {
        f"{name}: {word}"
        for name, path in FILES.items()
        for word in (
            *Path(name).with_suffix("").parts,
            *(node.name for node in statements(tree(path)) if isinstance(node, ast.ClassDef)),
        )
        if words(word) & MEANINGLESS
    }
    assert found == set()
