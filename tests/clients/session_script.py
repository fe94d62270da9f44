"""What the model writes in a recorded session: turns of a coding agent that looks after modules of Python's library,
one after another. It greps, reads, edits, looks at the difference, and runs two commands at once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from singletree.conversation import Part, Reasoning, Text, ToolCall

MODULES = ("bisect", "colorsys", "fnmatch", "genericpath", "linecache", "getpass", "shlex", "textwrap")
"""Small modules of the library, each of which has a function that is edited."""

TURNS_OF_A_MODULE = 5
Call = tuple[str, Mapping[str, Any]]


class Hands(Protocol):
    """What a harness calls its tools."""

    @property
    def name(self) -> str:
        """The harness's."""
        ...

    @property
    def shell(self) -> Callable[[str], Call]:
        """The call that runs a command."""
        ...

    @property
    def read(self) -> Callable[[Path], Call]:
        """The call that reads a file."""
        ...


def _replaced(path: str, old: str, new: str) -> Callable[[Path, str, str], Mapping[str, str]]:
    return lambda file, before, after: {path: str(file), old: before, new: after}


def _edits(file: Path, before: str, after: str) -> Mapping[str, Any]:
    return {"path": str(file), "edits": [{"oldText": before, "newText": after}]}


def _patch(file: Path, before: str, after: str) -> Mapping[str, str]:
    lines = ["*** Begin Patch", f"*** Update File: {file.name}", "@@", f"-{before}"]
    lines += [f"+{line}" for line in after.split("\n")]
    return {"input": "\n".join([*lines, "*** End Patch", ""])}


def _written(file: Path, before: str, after: str) -> Mapping[str, str]:
    lines = ["from pathlib import Path", f"file = Path({file.name!r})"]
    lines += [f"file.write_text(file.read_text().replace({before!r}, {after!r}))"]
    return {"cmd": "\n".join(["python3 - <<'END'", *lines, "END"])}


EDITS: Mapping[str, tuple[str, Callable[[Path, str, str], Mapping[str, Any]]]] = {
    "claude": ("Edit", _replaced("file_path", "old_string", "new_string")),
    "codex": ("apply_patch", _patch),
    "codex-shell": ("exec_command", _written),
    "openclaw": ("edit", _edits),
    "opencode": ("edit", _replaced("filePath", "oldString", "newString")),
    "pi": ("edit", _edits),
    "qwen": ("edit", _replaced("file_path", "old_string", "new_string")),
}
"""By harness, and for Codex without its own tool: the tool that edits a file, and the arguments for putting one text in
the place of another.
"""


def make_workspace(folder: Path) -> None:
    """A git repository of the modules."""
    folder.mkdir(parents=True)
    library = Path(sysconfig.get_path("stdlib"))
    for module in MODULES:
        shutil.copy(library / f"{module}.py", folder)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    # Harnesses put the name of the last commit into their prompts, and it depends on its date.
    dated = os.environ | dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "2026-01-01T00:00:00Z")
    for arguments in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "start"]):
        subprocess.run([*git, *arguments], cwd=folder, env=dated, check=True)


def turns(hands: Hands, workspace: Path, count: int) -> list[tuple[Part, ...]]:
    """``count`` turns with calls and one that answers."""
    texts: list[tuple[Part, ...]] = []
    calls = 0
    for number in range(count):
        module = MODULES[number // TURNS_OF_A_MODULE % len(MODULES)]
        kind = number % TURNS_OF_A_MODULE
        made = list(_calls(hands, workspace / f"{module}.py", kind, number))
        thought, words = _thought(module, kind, number), _words(module, kind)
        texts.append((Reasoning(thought), *((Text(words),) if words else ()), *_numbered(made, calls)))
        calls += len(made)
    return [*texts, (Reasoning("All of them are done — I sum it up."), Text(answer(count)))]


def answer(count: int) -> str:
    """The model's last word."""
    return f"I have looked after the modules in {count} steps; `git diff` shows what changed."


def _numbered(calls: list[Call], first: int) -> Iterator[ToolCall]:
    """With ids as the families write them that write any: counted through the conversation."""
    for index, (name, arguments) in enumerate(calls, first):
        yield ToolCall(name, json.dumps(arguments, ensure_ascii=False), f"functions.{name}:{index}")


def _calls(hands: Hands, file: Path, kind: int, number: int) -> Iterator[Call]:
    if kind == 0:
        yield hands.shell(f"grep -nE '^(def|class|import|from) ' {file.name} && wc -l \"{file.name}\"")
    elif kind == 1:
        yield hands.read(file)
    elif kind == 2:
        before = edited_line(file)
        tool, arguments = EDITS[hands.name]
        yield (
            tool,
            arguments(file, before, f"# Step {number}: checked — `{file.stem}` ≤ 600 lines.\n{before}"),
        )
    elif kind == 3:
        yield hands.shell(f"git diff -U3 -- {file.name} | tail -n 20")
    else:
        yield hands.shell(f"sed -n '20,60p' {file.name}")
        yield hands.shell(
            f"python3 -c \"import ast; print(len(ast.parse(open('{file.name}').read()).body))\""
        )


def edited_line(file: Path) -> str:
    """The first line of a function of the module, which stands there once."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("def ") and lines.count(line) == 1)


_THOUGHTS = (
    "Next is {m}.py. I don't know yet how it is laid out, so I list its definitions and imports before I read "
    "anything in full; that keeps the context small.\n\nThings to look for:\n1. functions without a docstring,\n"
    "2. names that shadow a builtin,\n3. whether `__all__` agrees with what is defined.\n",
    "The list is short enough to read {m}.py whole. I want to see the bodies, not only the heads: the naïve "
    "reading of the grep output would miss conditional imports. After that I decide what to change.",
    "I have seen {m}.py now. Nothing is wrong with its logic — the loops end, indices stay < len(a) — so the only "
    "edit is a remark above the first function.  It has to match the file exactly, including the parentheses, or "
    'the edit fails.\n\nOld: the `def` line.\nNew: the remark, a line break, and the same line ("unchanged").',
    "Let me check that the edit of {m}.py did what I meant and nothing else.",
    "The difference is as it should be. Two things are left for {m}.py: a look at its middle, where most of the "
    "work is done, and a check that it still parses. They don't depend on each other, so I run both at once.\n"
    "\n```python\nast.parse(source).body  # one entry for each statement at the top\n```\nThat is enough.",
)
_WORDS = (
    "",
    "I read `{m}.py` in full.",
    "The module is sound. I add a remark above its first function:\n\n- file: `{m}.py`\n- change: one line",
    "",
    "The edit is in place. Now its middle, and whether it still parses.",
)


def _thought(module: str, kind: int, number: int) -> str:
    return f"Step {number + 1}. {_THOUGHTS[kind].format(m=module)}"


def _words(module: str, kind: int) -> str:
    return _WORDS[kind].format(m=module)
