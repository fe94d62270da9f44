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
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions

import pytest

from singletree.errors import BadConfiguration
from singletree.server import doors
from singletree.server.doors import DOORS as DOORS_OF_THE_SERVER
from singletree.server.doors import open_door
from source import DOORS, PACKAGE, ROOT, SOURCE, Module, area, imports, modules, parsed, room, tracked_python

GROUND = {
    "conversation",
    "errors",
    "events",
    "gguf",
    "lru",
    "owners",
    "prefixes",
    "private_files",
    "request_limits",
    "request_options",
    "pictures",
}
CORE = GROUND | {"__version__", "parsing", "families", "protocols", "prompts", "engines", "server"}
"""What serves a model at --engine-url, and no more."""
EVERYTHING = {"*"}
LOADED_LATE = {
    *("protocols.messages", "protocols.chat", "protocols.responses", "protocols.responses.compact"),
    *("server.answers.dispatch", "server.http.response_requests"),
}
"""Of the core, but loaded when asked for: most servers have clients of one or two protocols, and few of side events."""
MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(GROUND, GROUND),
    "parsing": GROUND,
    "families": GROUND | {"parsing"},
    "protocols": GROUND,
    "prompts": GROUND,
    "engines": GROUND,
    "server": CORE,
    **dict.fromkeys(DOORS, CORE),
    "checking": GROUND | {"__version__"},
    "drafting": CORE | {"constraints"},
    "in_process": CORE | {"model_files", "remote"},
    "llamacpp": CORE | {"model_files", "remote"},
    "media": CORE | {"remote"},
    "key_files": CORE | {"budgets"},
    "routing": GROUND | {"engines"},
    "ray": CORE | {"cli"},
    "cli": EVERYTHING,
    "": GROUND | {"parsing", "families"},
    "__main__": {"cli"},
}
ROOMS: dict[str, list[set[str]]] = {
    "parsing": [
        {"parser", "render_turn"},
        {"emitter"},
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
        {"chat", "messages", "responses"},
        {"models", "openai"},
        {"client_tools", "content", "wire"},
        {"limits"},
        {"answer"},
    ],
    "engines": [
        {"lifetime", "sharing", "workers"},
        {"abilities", "token_json"},
        {"engine"},
        {"checkpoint", "devices"},
        {"progress"},
    ],
    "remote": [
        {"servers"},
        {"detection", "engine", "sglang", "tensorrt_llm", "vllm"},
        {"events", "pictures"},
        {"wire"},
        {"http_client"},
        {"http_connection"},
        {"transport"},
    ],
    "ray": [
        {"application"},
        {"replicas"},
    ],
    "server": [
        {"http"},
        {"answers"},
        {"telemetry"},
        {"sessions"},
        {"turn"},
        {"models"},
        {"capsules"},
        {"settings"},
        {"cross_origin", "doors", "ids", "sparse_log"},
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


def test_imports_follow_the_layers() -> None:
    broken = [
        f"{module.name}:{line} imports {name}; {module.area or 'singletree'} may import "
        f"{sorted(MAY_IMPORT[module.area])} only"
        for module in modules()
        for line, name in imports(module)
        if name.partition(".")[0] == "singletree" and not _is_allowed(module, name)
    ]
    assert broken == []


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


def test_no_modules_import_one_another_in_a_circle() -> None:
    names = {module.name for module in modules()}
    graph = {
        module.name: {name for _, name in imports(module)} & names - {module.name} for module in modules()
    }
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"{' -> '.join(reversed(error.args[1]))}: also an import for a type alone is one")


def test_the_core_loads_no_door_and_no_command_line_library() -> None:
    script = (
        "import sys, importlib, pkgutil, singletree.server\n"
        "for module in pkgutil.walk_packages(singletree.server.__path__, 'singletree.server.'):\n"
        "    if not module.name.endswith(('_worker', 'postgres')):\n"
        "        importlib.import_module(module.name)\n"
        "own = {name.split('.')[1] for name in sys.modules if name.startswith('singletree.')}\n"
        f"print({{'cyclopts'}} & sys.modules.keys(), own & {DOORS | {'cli'}!r})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "set() set()", done.stderr


def test_each_door_leads_to_a_package_behind_doors() -> None:
    for feature, door in DOORS_OF_THE_SERVER.items():
        path, _, value = door.entry.partition(":")
        module = next(each for each in modules() if each.name == f"singletree.{path}")
        assert area(module.name) in DOORS or path in LOADED_LATE, feature
        assert not value or value in {
            node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name)
        } | {
            node.name
            for node in module.tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }, feature
        name, _, kind = door.interface.rpartition(".")
        owner = importlib.import_module(f"singletree.{name}")
        assert hasattr(owner, kind), f"{feature}: nothing has a {door.interface}"
        assert area(owner.__name__) in CORE | {"remote"}, feature


def test_an_absent_door_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "singletree.routing.kv_policy", None)
    monkeypatch.delitem(doors._OPENED, "router kv", raising=False)
    with pytest.raises(BadConfiguration, match=re.escape("singletree[routing]")):
        open_door("router kv")


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
    imported = set(_third_party(modules())) - IN_PROCESS - LOADERS
    importable = _importable(declared)
    assert imported - importable == set(), "imported but not declared in pyproject.toml"
    unused = {d for d in declared if not _importable({d}) & imported}
    assert unused == set(), "declared in pyproject.toml but imported nowhere"


# pytest loads the plugin, so it is there.
LOADERS = {"pytest"}

# Run in the environments of another server, of a trainer and of a fuzzer.
FOREIGN = {"benchmarks.dynamo_worker", "docs.train_with_trl", "tests.fuzz.run"}


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
