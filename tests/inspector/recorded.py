"""What the scripted engine writes in the sessions of the real harnesses: the turns of ``clients.session_script``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clients import session_script
from clients.harness import Harness
from clients.scripts import think
from clients.served import Server
from singletree.conversation import Part, Reasoning, Text, ToolCall

PACE = '#opts {"delay": 0.004, "prefill": 0.03}\n'


def write_scripts(server: Server, harness: Harness, workspace: Path, turns: int) -> list[str]:
    """Write ``turns`` turns with calls and an answer as scripts of the server; return their names in order."""
    names = []
    for number, parts in enumerate(session_script.turns(harness, workspace, turns)):
        names.append(f"{harness.title}-{number}".replace(".", "_"))
        (server.scripts / f"{names[-1]}.txt").write_text(f"{PACE}{written(parts)}", encoding="utf-8")
    return names


def written(parts: Sequence[Part]) -> str:
    """Return a turn as the model of the server (Qwen3) writes it."""
    pieces = []
    for part in parts:
        if isinstance(part, Reasoning):
            pieces.append(think(part.text))
        elif isinstance(part, Text):
            pieces.append(f"{part.text}\n")
        elif isinstance(part, ToolCall):
            call = f'{{"name": "{part.name}", "arguments": {part.arguments}}}'
            pieces.append(f"<tool_call>\n{call}\n</tool_call>\n")
    return "".join(pieces).rstrip("\n")
