"""Write the documents that are generated from the code: ``python docs/make_docs.py`` (``make docs``).

A test compares each with the committed file, so a reviewer sees every change of a flag, family or public name.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from stability_promises import PROMISES

DOCS = Path(__file__).resolve().parent
sys.path.append(str(DOCS.parent))
SOURCE = DOCS.parent / "src"
PROMISED = (
    "singletree",
    "singletree.conversation",
    "singletree.engines.engine",
    "singletree.errors",
    "singletree.families",
    "singletree.prompts.template.chat_template",
    "singletree.prompts.tokenizer.tokenizer",
    "singletree.server.turn.complete_calls",
)
"""The modules whose ``__all__`` stays the same between releases. Everything else may change without notice."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def public_modules() -> tuple[tuple[str, ast.Module], ...]:
    """Return (dotted name, syntax tree) of every module whose name does not begin with an underscore."""
    modules = []
    for path in sorted((SOURCE / "singletree").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        dotted = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in dotted):
            modules.append((".".join(dotted), ast.parse(path.read_text(encoding="utf-8"), path.name)))
    return tuple(modules)


def definitions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Definition]]:
    """Yield (dotted name, node) of each public class and function in ``body``, methods included."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            name = f"{prefix}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, name)


def exported(tree: ast.Module) -> list[str]:
    """Return the names in ``__all__`` of a module; none if it has no ``__all__``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def public_names() -> str:
    """Return the names that a program may rely on, one a line: ``__all__`` of each of ``PROMISED``."""
    trees = dict(public_modules())
    names = {f"{module}.{name}" for module in PROMISED for name in exported(trees[module])}
    return "\n".join(sorted(names)) + "\n"


def _printed(program: str) -> str:
    """Return what a Python program prints, run in a process of its own because the CLI reads how it was started."""
    run = [sys.executable, "-c", program]
    return subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8").stdout


def flags() -> str:
    """Return the page of all commands and flags."""
    text = _printed("from singletree.cli import app; print(app().generate_docs(output_format='markdown'))")
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n"


def families() -> str:
    """Return the table of model families."""
    from family_table import markdown_table

    return markdown_table()


def stability() -> str:
    """Return the page of what is made equal before a prompt is rendered, and of what can never differ."""
    from singletree.prompts.history.canonicalization import NAMED

    rules = "\n".join(f"- `{rule.name}`: {rule.reason}" for rule in NAMED)
    promises = "\n".join(
        f"- {promise.statement} {promise.reason} Tests: {', '.join(f'`{name}`' for name in promise.tests)}."
        for promise in PROMISES
    )
    return _STABILITY.format(rules=rules, promises=promises)


_STABILITY = """\
# What changes no prompt

If a prompt differs from the last one of its session in its first lines, the engine must read all of it again.
[Prefix reuse](prefix.md) shows how to find where a prefix broke; this page lists what cannot break it. It is generated
from the code.

## Rules

Each rule acts on the request before the prompt is rendered. `--stability-off NAME` switches a rule off.
`singletree_stability_rules_total{{rule="NAME"}}` in `/metrics` counts the prompts that it changed.

{rules}

## By construction

Nothing acts on a request for these promises, so there is nothing to switch off or to count. The code that makes a
prompt either never sees the difference, or has only one way to write it. Each promise names its tests.

{promises}
"""


def family_cases() -> str:
    """Return the table of families and cases."""
    from family_cases import page

    return page()


def architecture() -> str:
    """Return the architecture page with its picture and its sizes made anew."""
    import loaded_modules
    import page_parts
    from architecture_picture import picture

    parts = {"loaded": loaded_modules.sentence(), "picture": f"```mermaid\n{picture()}```"}
    return page_parts.with_parts(DOCS / "architecture.md", parts)


def check() -> str:
    """Return the page of the checks of an endpoint, with the measured cards."""
    from check_page import page

    return page()


def engines() -> str:
    """Return the page of engines and what each can do."""
    from engine_table import page

    return page()


def dashboard() -> str:
    """Return the Grafana dashboard."""
    from dashboard import page

    return page()


def benchmarks() -> str:
    """Return the page of benchmarks, with the figures of the newest run."""
    from benchmark_figures import page

    return page()


def comparison() -> str:
    """Return the page of one session behind several servers, with the tables of the kept run."""
    from benchmark_figures import comparison

    return comparison()


def charts() -> dict[str, Callable[[], str]]:
    """Return what makes each chart of that page, by file name."""
    from benchmark_figures import charts

    return {f"pictures/{name}": functools.partial(str, text) for name, text in charts().items()}


def metrics() -> str:
    """Return the page of metrics with its table made anew."""
    from metrics_page import page

    return page()


def serving() -> str:
    """Return the page of what a server does, with the table of limits made anew."""
    from limits_table import page

    return page()


def routes() -> str:
    """Return the page of routes."""
    from route_page import page

    return page()


def harness_pages() -> dict[str, Callable[[], str]]:
    """Return what makes each page of a harness, by file name."""
    import harness_pages

    return {
        f"harnesses/{name}.md": functools.partial(harness_pages.page, name) for name in harness_pages.names()
    }


def readme() -> str:
    """Return the README, with the figures of the newest run."""
    from benchmark_figures import readme

    return readme()


DOCUMENTS: dict[str, Callable[[], str]] = {
    "../README.md": readme,
    "architecture.md": architecture,
    "benchmarks.md": benchmarks,
    "check.md": check,
    "comparison.md": comparison,
    "engines.md": engines,
    "family-cases.md": family_cases,
    "families.md": families,
    "flags.md": flags,
    "metrics.md": metrics,
    "public-names.txt": public_names,
    "routes.md": routes,
    "serving.md": serving,
    "stability.md": stability,
    "../deploy/helm/singletree/files/dashboard.json": dashboard,
    **harness_pages(),
    **charts(),
}


def write() -> None:
    """Write every document that is not current, and print its name."""
    for name, make in DOCUMENTS.items():
        path, text = DOCS / name, make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote docs/{name}")


if __name__ == "__main__":
    write()
