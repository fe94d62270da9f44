"""The real harnesses: how each is run headless, what it calls its tools, and where its last word stands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 180
SINGLETREE = Path(sys.executable).with_name("singletree")


class Task(NamedTuple):
    """What one run is given. ``home`` and ``workspace`` are the run's own."""

    base_url: str
    model: str
    prompt: str
    home: Path
    workspace: Path


class Outcome(NamedTuple):
    """What one run came to.

    Attributes:
        answer: the harness's own final answer, nothing else of its output.
        complaints: what it said about the server's answers; empty when all went well.
        output: all it printed, for a failing test to show.
    """

    answer: str
    complaints: list[str]
    output: str


Call = tuple[str, Mapping[str, Any]]
Events = list[dict[str, Any]]


class Harness(NamedTuple):
    """One harness.

    Attributes:
        name: what ``singletree launch`` calls it.
        arguments: its own command line for a prompt: no question asked, events as JSON lines.
        shell, read: its tools, as (name, arguments), for a shell command and for a file of the workspace.
        answer, complaints: read from its events.
    """

    name: str
    arguments: Callable[[str], list[str]]
    shell: Callable[[str], Call]
    read: Callable[[Path], Call]
    answer: Callable[[Events], str]
    complaints: Callable[[Events], list[str]]


def _claude_arguments(prompt: str) -> list[str]:
    return ["-p", prompt, "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]


def _claude_results(events: Events) -> Iterator[dict[str, Any]]:
    return (event for event in events if event.get("type") == "result")


def _claude_answer(events: Events) -> str:
    return next((str(event.get("result", "")) for event in _claude_results(events)), "")


def _claude_complaints(events: Events) -> list[str]:
    failed = [event for event in _claude_results(events) if event.get("is_error")]
    retried = [event for event in events if event.get("subtype") == "api_retry"]
    return [json.dumps(event) for event in failed + retried]


def _codex_arguments(prompt: str) -> list[str]:
    return ["exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt]


def _codex_items(events: Events) -> Iterator[dict[str, Any]]:
    return (event["item"] for event in events if event.get("type") == "item.completed")


def _codex_answer(events: Events) -> str:
    said = [str(item["text"]) for item in _codex_items(events) if item.get("type") == "agent_message"]
    return said[-1] if said else ""


def _codex_complaints(events: Events) -> list[str]:
    """Errors and retries; among its items also that it knows nothing about the model."""
    failed = [event for event in events if event.get("type") in ("error", "turn.failed")]
    remarks = [item for item in _codex_items(events) if item.get("type") == "error"]
    return [json.dumps(complaint) for complaint in failed + remarks]


CLAUDE = Harness(
    "claude",
    _claude_arguments,
    lambda command: ("Bash", {"command": command, "description": "Run a command"}),
    lambda path: ("Read", {"file_path": str(path)}),
    _claude_answer,
    _claude_complaints,
)

CODEX = Harness(
    "codex",
    _codex_arguments,
    lambda command: ("exec_command", {"cmd": command}),
    lambda path: ("exec_command", {"cmd": f"cat {path.name}"}),
    _codex_answer,
    _codex_complaints,
)

HARNESSES = (CLAUDE, CODEX)


def run(harness: Harness, task: Task, binaries: Path) -> Outcome:
    """Runs the harness on the task to its end, the way a person would: with ``singletree launch``.

    It sees nothing of the caller's environment but the PATH, so no account and no setting of the person who
    runs the tests can take part. Raises subprocess.TimeoutExpired after ``SECONDS``.
    """
    environment = {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(task.home),
        "SINGLETREE_CACHE": str(task.home / "cache"),
        "IS_SANDBOX": "1",  # Without it, Claude Code refuses to skip permissions as root.
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }
    target = ["--base-url", task.base_url, "--model", task.model]
    command = [str(SINGLETREE), "launch", harness.name, *target, "--", *harness.arguments(task.prompt)]
    output, remarks, status = _run(command, task.workspace, environment)
    events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    complaints = harness.complaints(events)
    if status:
        complaints.append(f"exit status {status}")
    return Outcome(harness.answer(events), complaints, f"{output}\n{remarks}")


def _run(command: list[str], folder: Path, environment: Mapping[str, str]) -> tuple[str, str, int]:
    """Standard output, standard error and exit status. Whatever the command started ends with it."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, remarks = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return output, remarks, process.returncode
