"""``singletree catalog``: write the served models as a model catalog file that the installed Codex accepts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from singletree.cli.launch import Target, fetch_served
from singletree.errors import BadConfiguration

_SECONDS = 60


def catalog(
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    bundled: Annotated[bool, Parameter(negative="")] = False,
    codex: str = "codex",
    target: Target = Target(),  # noqa: B008 (frozen)
) -> None:
    """Write a running server's model catalog for Codex (`model_catalog_json`), after Codex has accepted it.

    Parameters
    ----------
    output
        File to write; standard output by default.
    bundled
        Write the catalog that comes with Codex, for `serve --codex-catalog`.
    codex
        Codex executable that checks the catalog.
    """
    program = shutil.which(codex)
    if program is None:
        raise BadConfiguration(f"{codex} is not on the PATH; install it with: npm install -g @openai/codex")
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
    """Return the catalog that the server sends to Codex. Raises BadConfiguration when it does not answer."""
    fetch_served(target)
    entries = target.server.fetch("/v1/models?client_version=0", seconds=_SECONDS)["models"]
    return msgspec.json.format(msgspec.json.encode({"models": entries}), indent=2).decode() + "\n"


def _check(program: str, text: str) -> None:
    """Raise BadConfiguration with Codex's own message when Codex does not accept the catalog."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        accepted = _codex(program, "-c", f"model_catalog_json={msgspec.json.encode(file.name).decode()}")
    missing = set(_slugs(text)) - set(_slugs(accepted))
    if missing:
        raise BadConfiguration(f"Codex accepted the catalog without {', '.join(sorted(missing))}")


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
        reason = next(
            (line for line in done.stderr.splitlines() if line.startswith("Error")), done.stderr.strip()
        )
        raise BadConfiguration(f"Codex does not accept the catalog: {reason}")
    return done.stdout


def _slugs(text: str) -> list[str]:
    return [entry["slug"] for entry in msgspec.json.decode(text)["models"]]
