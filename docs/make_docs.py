"""Writes the documents that are made from the code: ``python docs/make_docs.py`` (``make docs``).

A test compares each with what is committed, so a flag, family or public name cannot change unseen.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from stability_promises import PROMISES

DOCS = Path(__file__).resolve().parent
SOURCE = DOCS.parent / "src"
PROGRAMS = ("singletree.cli", "singletree.server")

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public_modules() -> Iterator[tuple[str, ast.Module]]:
    """(dotted name, syntax tree) of every module, but for those whose name begins with an underscore."""
    for path in sorted((SOURCE / "singletree").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        dotted = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in dotted):
            yield ".".join(dotted), ast.parse(path.read_text(encoding="utf-8"), path.name)


def definitions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Definition]]:
    """(dotted name, node) of each public class and function below ``body``, methods included."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            name = f"{prefix}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, name)


def _assigned(node: ast.stmt) -> list[str]:
    """Names that one statement binds, other than by ``def`` and ``class``."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.ImportFrom):  # `from x import y as y` gives y on to others.
        return [name.name for name in node.names if name.asname == name.name]
    return []


def _given_on(tree: ast.Module) -> list[str]:
    """What ``__all__`` lists."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and _assigned(node) == ["__all__"]:
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def public_names() -> str:
    """Every name that a program may rely on, a line each: modules, classes with their members, functions,
    constants. Server and command line are programs themselves: what they offer are routes and flags.
    """
    names: set[str] = set()
    for module, tree in public_modules():
        if module.startswith(PROGRAMS):
            continue
        names.add(module)
        names.update(f"{module}.{name}" for name in _given_on(tree))
        bodies = [(module, tree.body)]
        for name, node in definitions(tree.body, module):
            names.add(name)
            if isinstance(node, ast.ClassDef):
                bodies.append((name, node.body))
        for prefix, body in bodies:
            bound = (name for node in body for name in _assigned(node))
            names.update(f"{prefix}.{name}" for name in bound if not name.startswith("_"))
    return "\n".join(sorted(names)) + "\n"


def _printed(program: str) -> str:
    """What a Python program prints, in a process of its own: the command line looks at how it was started."""
    run = [sys.executable, "-c", program]
    return subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8").stdout


def flags() -> str:
    """Every command with its flags."""
    text = _printed("from singletree.cli import app; print(app().generate_docs(output_format='markdown'))")
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n"


def families() -> str:
    """The table of model families."""
    return _printed("from singletree.cli import main; main(['families', '--markdown'])")


def stability() -> str:
    """What is made the same before a prompt is rendered, and what can never differ."""
    from singletree.prompts.stability import NAMED

    rules = "\n".join(f"- `{rule.name}`: {rule.reason}" for rule in NAMED)
    promises = "\n".join(
        f"- {promise.says} {promise.reason} Tests: {', '.join(f'`{name}`' for name in promise.tests)}."
        for promise in PROMISES
    )
    return _STABILITY.format(rules=rules, promises=promises)


_STABILITY = """\
# What changes no prompt

A prompt that differs in its first lines from the last one of its session costs the whole prefill again.
[How a prompt goes on](prefix.md) says how to find out where a prefix broke; this page says what cannot break it. It is
made from the code.

## Rules

Each acts on a request as it comes. `--stability-off NAME` switches one off;
`singletree_stability_rules_total{{rule="NAME"}}` in `/metrics` counts the prompts that it changed.

{rules}

## By construction

Here nothing acts, so there is nothing to switch off or to count: no part that makes a prompt gets to see what varies,
or it has only one way to say it. What holds each promise is its tests.

{promises}
"""


DOCUMENTS: dict[str, Callable[[], str]] = {
    "families.md": families,
    "flags.md": flags,
    "public-names.txt": public_names,
    "stability.md": stability,
}


def write() -> None:
    """Writes every document that differs from what it should say, and names it."""
    for name, make in DOCUMENTS.items():
        path, text = DOCS / name, make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote docs/{name}")


if __name__ == "__main__":
    write()
