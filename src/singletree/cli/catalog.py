"""``singletree catalog``: what Codex is told of the served models, as a file that the installed Codex has taken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from singletree.cli.launch import Target, ask
from singletree.errors import BadConfiguration

_SECONDS = 60


def catalog(
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    bundled: Annotated[bool, Parameter(negative="")] = False,
    codex: str = "codex",
    target: Target = Target(),  # noqa: B008 (frozen)
) -> None:
    """Write a running server's catalog for Codex (its `model_catalog_json`), once Codex has taken it.

    Parameters
    ----------
    output
        File to write; standard output by default.
    bundled
        Write the catalog that comes with Codex, for `serve --codex-catalog`.
    codex
        The Codex to check it with.
    """
    program = shutil.which(codex)
    if program is None:
        raise BadConfiguration(
            f"there is no {codex} on the PATH; install it with: npm install -g @openai/codex"
        )
    if bundled:
        text = _codex(program, "--bundled")
    else:
        text = _served(target)
        _check(program, text)
    if output is None:
        sys.stdout.write(text)
        return
    output.write_text(text, encoding="utf-8")
    print(f"{output}: {', '.join(_slugs(text))}")


def _served(target: Target) -> str:
    """What the server tells Codex. Raises BadConfiguration when it does not answer."""
    served = ask(target)
    request = urllib.request.Request(
        f"{served.base_url}/v1/models?client_version=0", headers={"Authorization": f"Bearer {served.key}"}
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        entries = msgspec.json.decode(answer.read())["models"]
    return msgspec.json.format(msgspec.json.encode({"models": entries}), indent=2).decode() + "\n"


def _check(program: str, text: str) -> None:
    """Raises BadConfiguration, with Codex's own words, when it does not take the catalog."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        taken = _codex(program, "-c", f"model_catalog_json={msgspec.json.encode(file.name).decode()}")
    missing = set(_slugs(text)) - set(_slugs(taken))
    if missing:
        raise BadConfiguration(f"Codex took the catalog without {', '.join(sorted(missing))}")


def _codex(program: str, *arguments: str) -> str:
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [program, "debug", "models", *arguments],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env={**os.environ, "CODEX_HOME": home},
            check=False,
        )
    if done.returncode:
        told = next(
            (line for line in done.stderr.splitlines() if line.startswith("Error")), done.stderr.strip()
        )
        raise BadConfiguration(f"Codex does not take the catalog: {told}")
    return done.stdout


def _slugs(text: str) -> list[str]:
    return [entry["slug"] for entry in msgspec.json.decode(text)["models"]]
