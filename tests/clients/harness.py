"""The real harnesses: how each is run headless, what it calls its tools, and where its last word stands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from clients import install

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
    """One harness, on one of the three APIs.

    Attributes:
        name: what ``singletree launch`` calls it.
        api: which it speaks, as ``singletree launch --api``; empty where it speaks but one.
        arguments: its own command line for a prompt: no question asked, events as JSON lines.
        shell, read, write: its tools, as (name, arguments), for a shell command, for a file of the workspace and
            for a new one.
        answer, complaints: read from its events.
        prepare: puts what it asks at a first start into its home, and returns more of its environment.
        version: of Claude Code and pi, of which there are two.
        appends: whether the next prompt is the last one and more. OpenClaw keeps a message about running
            commands at the very end of every prompt on two of the APIs, so the last turn stands before it.
    """

    name: str
    api: str
    arguments: Callable[[str], list[str]]
    shell: Callable[[str], Call]
    read: Callable[[Path], Call]
    write: Callable[[Path, str], Call]
    answer: Callable[[Events], str]
    complaints: Callable[[Events], list[str]]
    prepare: Callable[[Path], Mapping[str, str]] = lambda home: {}
    version: str = ""
    appends: bool = True

    @property
    def speaks(self) -> str:
        """Which API it speaks."""
        return self.api or {"claude": "messages", "codex": "responses"}[self.name]

    @property
    def title(self) -> str:
        """How a test calls it."""
        version = self.version if self.version != install.PI else ""
        return "-".join(filter(None, (self.name, self.api, version)))


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


def _cline_arguments(prompt: str) -> list[str]:
    return ["--json", prompt]


def _cline_answer(events: Events) -> str:
    return next((str(event["text"]) for event in events if event.get("type") == "run_result"), "")


def _cline_complaints(events: Events) -> list[str]:
    return [json.dumps(event) for event in events if event.get("type") == "error"]


def _codex_arguments(prompt: str) -> list[str]:
    return ["exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt]


def _codex_items(events: Events) -> Iterator[dict[str, Any]]:
    return (event["item"] for event in events if event.get("type") == "item.completed")


def _codex_answer(events: Events) -> str:
    output = [str(item["text"]) for item in _codex_items(events) if item.get("type") == "agent_message"]
    return output[-1] if output else ""


def _codex_complaints(events: Events) -> list[str]:
    """Errors and retries; among its items also that it knows nothing about the model."""
    failed = [event for event in events if event.get("type") in ("error", "turn.failed")]
    remarks = [item for item in _codex_items(events) if item.get("type") == "error"]
    return [json.dumps(complaint) for complaint in failed + remarks]


def _copilot_arguments(prompt: str) -> list[str]:
    return ["--allow-all-tools", "--output-format", "json", "-p", prompt]


def _copilot_answer(events: Events) -> str:
    output = [str(event["data"]["content"]) for event in events if event.get("type") == "assistant.message"]
    return output[-1].strip() if output else ""


def _copilot_complaints(events: Events) -> list[str]:
    return [json.dumps(event) for event in events if event.get("type") == "session.error"]


def _kimi_arguments(prompt: str) -> list[str]:
    return ["--output-format", "stream-json", "-p", prompt]


def _kimi_answer(events: Events) -> str:
    output = [str(event.get("content") or "") for event in events if event.get("role") == "assistant"]
    return output[-1].strip() if output else ""


def _kimi_complaints(events: Events) -> list[str]:
    return [json.dumps(event) for event in events if "error" in str(event.get("type"))]


def _openclaw_arguments(prompt: str) -> list[str]:
    return ["agent", "exec", "--cwd", ".", "--thinking", "medium", "--json", prompt]


def _openclaw_answer(events: Events) -> str:
    for event in events:
        written = event.get("final") or "".join(p.get("text") or "" for p in event.get("payloads") or [])
        if written:
            return str(written)
    return ""


def _openclaw_complaints(events: Events) -> list[str]:
    return [json.dumps(event["error"]) for event in events if event.get("error")]


def _opencode_arguments(prompt: str) -> list[str]:
    return ["run", "--format", "json", "--thinking", "--auto", prompt]


def _opencode_answer(events: Events) -> str:
    output = [str(event["part"].get("text", "")) for event in events if event.get("type") == "text"]
    return output[-1].strip() if output else ""


def _opencode_complaints(events: Events) -> list[str]:
    return [json.dumps(event) for event in events if event.get("type") == "error"]


def _opencode_prepare(home: Path) -> Mapping[str, str]:
    off = ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    return {f"OPENCODE_DISABLE_{name}": "1" for name in off}


def _pi_arguments(prompt: str) -> list[str]:
    return ["-p", "--mode", "json", "--thinking", "medium", prompt]


def _pi_answers(events: Events) -> Iterator[dict[str, Any]]:
    ends = (event for event in events if event.get("type") == "agent_end")
    return (turn for end in ends for turn in end.get("messages", []) if turn.get("role") == "assistant")


def _pi_answer(events: Events) -> str:
    texts = (
        "".join(part["text"] for part in turn["content"] if part.get("type") == "text")
        for turn in _pi_answers(events)
    )
    return next((text for text in reversed(list(texts)) if text), "").strip()


def _pi_complaints(events: Events) -> list[str]:
    failed = [turn for turn in _pi_answers(events) if turn.get("stopReason") == "error"]
    return [json.dumps(event) for event in events if event.get("type") == "auto_retry_start"] + [
        str(turn.get("errorMessage")) for turn in failed
    ]


def _pi_prepare(home: Path) -> Mapping[str, str]:
    return {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"}


def _qwen_arguments(prompt: str) -> list[str]:
    return ["--approval-mode", "yolo", "--output-format", "stream-json", "-p", prompt]


_QWEN_SETTINGS = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False, "disableAutoUpdate": True, "disableUpdateNag": True},
}


def _qwen_prepare(home: Path) -> Mapping[str, str]:
    file = home / ".qwen" / "settings.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(_QWEN_SETTINGS), encoding="utf-8")
    return {}


def _qwen_shell(command: str) -> Call:
    # It sometimes loses the output of a command that ends at once.
    lasting = {"command": f"{command} && sleep 0.3", "is_background": False, "description": "Run a command"}
    return "run_shell_command", lasting


def _shell(name: str) -> Callable[[str], Call]:
    return lambda command: (name, {"command": command})


def _read(name: str, key: str) -> Callable[[Path], Call]:
    return lambda path: (name, {key: str(path)})


def _write(name: str, key: str) -> Callable[[Path, str], Call]:
    return lambda path, text: (name, {key: str(path), "content": text})


def _patch(path: Path, text: str) -> Call:
    return "apply_patch", {"input": f"*** Begin Patch\n*** Add File: {path.name}\n+{text}\n*** End Patch\n"}


def _described_shell(name: str) -> Callable[[str], Call]:
    return lambda command: (name, {"command": command, "description": "Run a command"})


CLAUDE = Harness(
    "claude",
    "",
    _claude_arguments,
    _described_shell("Bash"),
    _read("Read", "file_path"),
    _write("Write", "file_path"),
    _claude_answer,
    _claude_complaints,
    version=install.CLAUDE,
)

CLINE = Harness(
    "cline",
    "chat",
    _cline_arguments,
    lambda command: ("run_commands", {"commands": [command]}),
    lambda path: ("read_files", {"files": [{"path": str(path)}]}),
    lambda path, text: ("editor", {"path": str(path), "new_text": text}),
    _cline_answer,
    _cline_complaints,
)

CODEX = Harness(
    "codex",
    "",
    _codex_arguments,
    lambda command: ("exec_command", {"cmd": command}),
    lambda path: ("exec_command", {"cmd": f"cat {path.name}"}),
    _patch,
    _codex_answer,
    _codex_complaints,
)

COPILOT = Harness(
    "copilot",
    "messages",
    _copilot_arguments,
    _described_shell("bash"),
    _read("view", "path"),
    lambda path, text: ("create", {"path": str(path), "file_text": text}),
    _copilot_answer,
    _copilot_complaints,
    lambda home: {"COPILOT_OFFLINE": "true"},
)

KIMI = Harness(
    "kimi",
    "messages",
    _kimi_arguments,
    _shell("Bash"),
    _read("Read", "path"),
    _write("Write", "path"),
    _kimi_answer,
    _kimi_complaints,
    lambda home: {"KIMI_CODE_NO_AUTO_UPDATE": "1"},
)

OPENCLAW = Harness(
    "openclaw",
    "responses",
    _openclaw_arguments,
    _shell("exec"),
    _read("read", "path"),
    _patch,
    _openclaw_answer,
    _openclaw_complaints,
    lambda home: {"OPENCLAW_NO_UPDATE_CHECK": "1", "OPENCLAW_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"},
)

OPENCODE = Harness(
    "opencode",
    "messages",
    _opencode_arguments,
    _described_shell("bash"),
    _read("read", "filePath"),
    _write("write", "filePath"),
    _opencode_answer,
    _opencode_complaints,
    _opencode_prepare,
)

PI = Harness(
    "pi",
    "messages",
    _pi_arguments,
    _shell("bash"),
    _read("read", "path"),
    _write("write", "path"),
    _pi_answer,
    _pi_complaints,
    _pi_prepare,
    install.PI,
)

QWEN = Harness(
    "qwen",
    "chat",
    _qwen_arguments,
    _qwen_shell,
    _read("read_file", "file_path"),
    _write("write_file", "file_path"),
    _claude_answer,
    _claude_complaints,
    _qwen_prepare,
)

APIS = ("messages", "chat", "responses")

HARNESSES = (
    CLAUDE,
    CLAUDE._replace(version="2.1.197"),
    CODEX,
    OPENCLAW,
    *(OPENCLAW._replace(api=api, appends=False) for api in ("messages", "chat")),
    *(harness._replace(api=api) for harness in (OPENCODE, PI, CLINE, COPILOT, KIMI) for api in APIS),
    PI._replace(version="0.74.2"),
    *(QWEN._replace(api=api) for api in ("messages", "chat")),
)

ON_ONE_API = {"openclaw": "responses", "cline": "chat", "copilot": "responses", "kimi": "messages"}
FEWER = tuple(harness for harness in HARNESSES if harness.api == ON_ONE_API.get(harness.name, harness.api))
"""Each harness; of those that take long to start, or do the same on each API, one."""


def run(
    harness: Harness, task: Task, seconds: float = SECONDS, *, settings: Mapping[str, str] | None = None
) -> Outcome:
    """Runs the harness on the task to its end, the way a person would: with ``singletree launch``.

    It sees nothing of the caller's environment but the PATH, so no account and no setting of the person who
    runs the tests can take part; ``settings`` are further variables.

    Raises subprocess.TimeoutExpired after ``seconds``.
    """
    environment = {
        "PATH": os.pathsep.join((install.path(harness.name, harness.version), os.environ["PATH"])),
        "HOME": str(task.home),
        "SINGLETREE_CACHE": str(task.home / "cache"),
        "IS_SANDBOX": "1",  # Without it, Claude Code refuses to skip permissions as root.
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        **harness.prepare(task.home),
        **(settings or {}),
    }
    target = ["--base-url", task.base_url, "--model", task.model]
    if harness.api:
        target += ["--api", harness.api]
    command = [str(SINGLETREE), "launch", harness.name, *target, "--", *harness.arguments(task.prompt)]
    output, remarks, status = _run(command, task.workspace, environment, seconds)
    events = _events(output)
    complaints = harness.complaints(events)
    if status:
        complaints.append(f"exit status {status}")
    return Outcome(harness.answer(events), complaints, f"{output}\n{remarks}")


def _events(output: str) -> Events:
    """What it printed: one JSON object, or one a line."""
    try:
        return [json.loads(output)]
    except ValueError:
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def _run(
    command: list[str], folder: Path, environment: Mapping[str, str], seconds: float
) -> tuple[str, str, int]:
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
        output, remarks = process.communicate(timeout=seconds)
    except BaseException:  # the limit of time, or a signal to the tests
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    return output, remarks, process.returncode
