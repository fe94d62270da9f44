"""The transcripts in the pages: what is typed there prints what stands below it, on the scripted engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from source import ROOT

EXCUSED = {
    "singletree doctor chat_template.jinja": "a template of Qwen's, which is not in the repository",
    "singletree render --protocol messages --model scripted --chat-template": "as above",
    "singletree explain work": "a session whose harness changed its system prompt",
    "singletree serve --model SmolLM2-135M-Instruct": "weights, and minutes",
}
"""What some commands need that is not here, by their beginning."""

FILES = {
    "turn.txt": "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\n"
    'print("not fini',
    "orphan.json": '{"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": '
    '[{"type": "tool_result", "tool_use_id": "x", "content": "a.py"}]}]}',
}

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def _typed(page: Path) -> list[tuple[str, list[str]]]:
    """Return the commands of a page's transcripts, each with the lines below it."""
    found = list[tuple[str, list[str]]]()
    for block in re.findall(
        r"^```text\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            while lines and (command.count("'") % 2 or command.endswith("\\")):
                command += "\n" + lines.pop(0)
            found.append((found[-1][0] if command == "# the same command again" else command, lines))
    return found


PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if _typed(page)]


@contextmanager
def _serving(programs: Path, flags: list[str], folder: Path) -> Iterator[str]:
    command = [str(programs / "singletree"), "serve", "--port", "0", *flags]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.match(r"ready +http://(\S+)", line):
                break
        else:
            pytest.fail("the server did not start")
        try:
            yield found[1]
        finally:
            server.terminate()


def _lines(text: str) -> set[str]:
    """Return the lines without what a terminal's width changes."""
    return {" ".join(line.split()) for line in text.splitlines()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_transcript_is_true(page: Path, tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "200"}
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with ExitStack() as servers:
        addresses = dict[str, str]()
        for command, below in _typed(page):
            if command.startswith(tuple(EXCUSED)):
                continue
            wanted = re.search(r"# serve (.*)", command)
            flags = wanted[1] if wanted else "--engine scripted"
            if flags not in addresses and "127.0.0.1:8000" in command:
                addresses[flags] = servers.enter_context(_serving(programs, flags.split(), tmp_path))
            typed = command.replace("127.0.0.1:8000", addresses.get(flags, ""))
            done = subprocess.run(
                ["bash", "-c", typed],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            printed = _lines(done.stdout)
            for line in _lines("\n".join(below)) - {""}:
                # "…" stands for what was left out.
                pattern = re.compile(".*".join(map(re.escape, line.split("…"))))
                assert any(map(pattern.fullmatch, printed)), f"{command}\n{line}\n{done.stdout}{done.stderr}"
