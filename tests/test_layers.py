"""Who may import whom; the dependencies of the library; no family named inside ``parsing``."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import packages_distributions

import pytest

from source import PACKAGE, ROOT, SOURCE, Module, area, imports, modules, parsed, room, tracked_python

GROUND = {
    "cache_diagnosis",
    "conversation",
    "errors",
    "events",
    "gguf",
    "lru",
    "prefixes",
    "request_options",
    "pictures",
}
EVERYTHING = {"*"}
MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(GROUND, GROUND),
    "parsing": GROUND,
    "families": GROUND | {"parsing"},
    "protocols": GROUND,
    "prompts": GROUND,
    "engines": GROUND,
    "server": EVERYTHING,
    "cli": EVERYTHING,
    "ray": EVERYTHING,
    "": GROUND | {"parsing", "families"},
    "__main__": {"cli"},
}
ROOMS: dict[str, list[set[str]]] = {
    "parsing": [
        {"constraints", "drafting"},
        {"parser", "render_turn"},
        {"emitter", "initial_state", "markdown_quotes"},
        {"compiled"},
        {"arguments"},
        {"family", "patterns"},
    ],
    "prompts": [
        {"prompt_writer"},
        {"history"},
        {"template"},
        {"replay"},
        {"tokenizer"},
        {"prompt_cache"},
    ],
    "protocols": [
        {"completions", "generate", "tokenize"},
        {"chat", "messages", "responses"},
        {"models", "openai"},
        {"client_json", "client_tools", "limits", "media", "sse", "wire"},
        {"answer"},
    ],
    "engines": [
        {"detection"},
        {"routing"},
        {"queueing", "unloading"},
        {"llamacpp", "scripted", "sglang", "tensorrt_llm", "vllm"},
        {"remote"},
        {"abilities", "handover", "in_flight", "startup_log"},
        {"engine", "reading_time"},
        {"devices", "engine_arguments", "restart_backoff", "weights"},
    ],
    "ray": [
        {"application"},
        {"server_replica"},
        {"engine_replica", "ray_engine"},
        {"kv_publishing"},
    ],
    "server": [
        {"http"},
        {"answers"},
        {"inspect"},
        {"sessions", "storage"},
        {"pictures", "turn"},
        {"models"},
        {"cross_origin", "peers"},
    ],
}
"""The rooms of an area, top to bottom. A room imports from itself and from rooms further down."""

STANDARD_LIBRARY_ONLY = GROUND | {"parsing", "families", ""}
LIBRARY = STANDARD_LIBRARY_ONLY | {"prompts", "protocols"}

# Families whose name is an ordinary word.
ENGLISH = {"basic", "plain"}


def _declared() -> dict[str, set[str]]:
    """Return distribution names by extra; the base dependencies have the empty name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named: dict[str, list[str]] = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: {_distribution(r) for r in requirements} for extra, requirements in named.items()}


def _distribution(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _third_party(chosen: Iterable[Module]) -> dict[str, set[str]]:
    """Return top-level names imported from outside the standard library, and the modules that import them."""
    found: dict[str, set[str]] = {}
    for module in chosen:
        for _, name in imports(module):
            top = name.partition(".")[0]
            if top != "singletree" and top not in sys.stdlib_module_names:
                found.setdefault(top, set()).add(module.name)
    return found


def _is_allowed(module: Module, name: str) -> bool:
    allowed = MAY_IMPORT[module.area]
    return "*" in allowed or area(name) in allowed | {module.area}


def test_every_part_has_a_place_in_the_layers() -> None:
    assert {m.area for m in modules()} <= set(MAY_IMPORT)


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_imports_follow_the_layers(module: Module) -> None:
    broken = [
        f"{module.path.name}:{line} imports {name}"
        for line, name in imports(module)
        if name.partition(".")[0] == "singletree" and not _is_allowed(module, name)
    ]
    assert not broken, f"{module.area or 'singletree'} may import {sorted(MAY_IMPORT[module.area])} only"


def test_every_room_has_a_place_in_its_area() -> None:
    rooms = {(m.area, room(m.name)) for m in modules() if m.area in ROOMS and room(m.name)}
    assert rooms == {(area, room) for area, floors in ROOMS.items() for floor in floors for room in floor}


def test_rooms_import_downwards() -> None:
    floor = {
        (area, room): n for area, floors in ROOMS.items() for n, rooms in enumerate(floors) for room in rooms
    }
    broken = [
        f"{module.name}:{line} imports {name}"
        for module in modules()
        if (own := (module.area, room(module.name))) in floor
        for line, name in imports(module)
        if name.startswith("singletree.") and (other := (area(name), room(name))) in floor
        if own[0] == other[0] and own != other and floor[other] <= floor[own]
    ]
    assert broken == []


def test_parsing_and_its_ground_need_nothing_but_python() -> None:
    outside = _third_party(m for m in modules() if m.area in STANDARD_LIBRARY_ONLY)
    assert outside == {}


def test_parsing_and_families_import_with_third_party_modules_out_of_reach() -> None:
    names = [m.name for m in modules() if m.area in STANDARD_LIBRARY_ONLY]
    script = (
        f"import sys, importlib; sys.path.insert(0, {str(SOURCE)!r})\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "known = sys.stdlib_module_names | {'singletree', '__main__'}\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} - known))\n"
    )
    # -I and -S leave the standard library alone on the path.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_pipeline_imports_no_command_line_library() -> None:
    script = "import sys, singletree.server.turn.pipeline; print('cyclopts' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@cache
def _owners() -> dict[str, set[str]]:
    """Return the distributions that provide each importable top-level name."""
    return {top: {_distribution(o) for o in owners} for top, owners in packages_distributions().items()}


def _importable(declared: set[str]) -> set[str]:
    """Return the top-level names that the declared distributions provide."""
    return {top for top, owners in _owners().items() if owners & declared}


def test_the_library_imports_only_the_base_dependencies() -> None:
    outside = _third_party(m for m in modules() if m.area in LIBRARY)
    importable = _importable(_declared()[""])
    assert {top: who for top, who in outside.items() if top not in importable} == {}


# Packages with an extra of their own, which the lock file leaves out: engines bring a GPU's libraries, gigabytes of
# them, and Ray is that of the cluster.
IN_PROCESS = {"vllm", "sglang", "ray"}


def test_engines_in_process_are_an_extra_each() -> None:
    assert {extra: names for extra, names in _declared().items() if names & IN_PROCESS} == {
        name: {name} for name in IN_PROCESS
    }
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert not re.search(rf"^(?:{'|'.join(IN_PROCESS)})==", lock, re.MULTILINE)


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    extras = {extra: names for extra, names in _declared().items() if extra not in ("dev", "all")}
    declared = {name for names in extras.values() for name in names} - IN_PROCESS
    imported = set(_third_party(modules())) - IN_PROCESS
    importable = _importable(declared)
    assert imported - importable == set(), "imported but not declared in pyproject.toml"
    unused = {d for d in declared if not _importable({d}) & imported}
    assert unused == set(), "declared in pyproject.toml but imported nowhere"


# Runs in the environment of another server.
FOREIGN = {"benchmarks.dynamo_worker"}


def test_what_tests_and_benchmarks_import_is_declared() -> None:
    declared = {name for names in _declared().values() for name in names}
    called = {path.stem for folder in ("tests", "docs") for path in (ROOT / folder).iterdir()}
    own = {"singletree", "tests", "benchmarks"} | IN_PROCESS
    known = _importable(declared) | sys.stdlib_module_names | called | own
    outside = [path for path in tracked_python() if PACKAGE not in path.parents]
    undeclared = {
        f"{module.name}: {name}"
        for module in (parsed(path, ROOT) for path in outside)
        if module.name not in FOREIGN
        for _, name in imports(module)
        if name.partition(".")[0] not in known
    }
    assert undeclared == set()


def _words_of_code(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each identifier and string; comments and docstrings may name a family."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(module.tree) if isinstance(node, documented) and node.body]
    docstrings = {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value
        for field in ("id", "attr", "arg", "name"):
            if isinstance(word := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), word


def test_parsing_names_no_family() -> None:
    names = {family.name for family in importlib.import_module("singletree.families").table()}
    assert len(names) > 5
    any_name = "|".join(re.escape(name).replace("_", "[-_ ]?") for name in sorted(names - ENGLISH))
    named = re.compile(rf"(?<![A-Za-z0-9])(?:{any_name})(?![A-Za-z0-9])", re.IGNORECASE)
    found = [
        f"{module.path.name}:{line}: {word}"
        for module in modules()
        if module.area == "parsing"
        for line, word in _words_of_code(module)
        if named.search(word)
    ]
    assert not found, "a quirk is a field that any family can set; the family says so in its own entry"
