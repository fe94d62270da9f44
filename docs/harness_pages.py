"""The pages of the harnesses: what ``singletree launch`` sets for each is taken from the code."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from unittest import mock

import page_parts

FOLDER = Path(__file__).resolve().parent / "harnesses"
_WINDOW = 131_072


def names() -> list[str]:
    """Return the names of the harnesses, each of which has a page."""
    from singletree.cli.launch import HARNESSES

    return [each.program for each in HARNESSES]


def page(name: str) -> str:
    """Return the page of a harness, with its settings made anew."""
    return page_parts.with_parts(FOLDER / f"{name}.md", {"settings": _settings(name)})


def _settings(name: str) -> str:
    """Return the command, the variables and the files with which a harness is started."""
    from singletree.cli.harness_settings import Served
    from singletree.cli.launch import HARNESSES

    [harness] = [each for each in HARNESSES if each.program == name]
    served = Served("http://127.0.0.1:8000", "KEY", "MODEL", _WINDOW)
    with tempfile.TemporaryDirectory() as made:
        with mock.patch.dict(os.environ, {"SINGLETREE_CACHE": made}, clear=True):
            variables, arguments = harness.settings(served, harness.api)
        shown = {key: value.replace(made, "FOLDER") for key, value in variables.items()}
        written = sorted(Path(made).rglob("*.*"))
        files = {path.relative_to(made): path.read_text(encoding="utf-8") for path in written}
    del shown["SINGLETREE_CACHE"]
    need = f"{harness.preamble_tokens:,}", f"{2 * harness.preamble_tokens:,}"
    lines = [
        "Its first prompt has about {} tokens: take a model with a window of {} or more.".format(*need),
        "",
    ]
    lines += ["```sh", f"npm install -g {harness.package}", f"singletree launch {name}", "```", ""]
    lines += [f"Without `launch`, for a server with a window of {_WINDOW:,} tokens:", "", "```sh"]
    lines += [f"export {key}={json.dumps(value)}" for key, value in sorted(shown.items())]
    lines += [" ".join((name, *arguments)).replace(made, "FOLDER"), "```", ""]
    for file, content in files.items():
        lines += [f"`FOLDER/{file}`:", "", f"```{file.suffix[1:]}", content.rstrip("\n"), "```", ""]
    return "\n".join(lines)
