"""Run an agent's task on the embedded engine, and write ``embedded-task.md``.

This is the loop of a harness, as small as possible: it sends the conversation to ``/v1/messages``, streaming, runs the
tool that the model calls, sends the result back, and ends with the model's answer. Qwen2.5-Coder-1.5B knows what to
call but seldom writes a call by itself, so ``tool_choice`` names the tool for each turn.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from anthropic import Anthropic, APIConnectionError
from anthropic.types import (
    Message,
    MessageParam,
    TextBlockParam,
    ToolChoiceParam,
    ToolParam,
    ToolResultBlockParam,
)

DOCUMENT = Path(__file__).with_name("embedded-task.md")
MODEL = "qwen2.5-coder-1.5b-instruct"
TASK = (
    "Run the shell command `echo hi-$((6*7))`, then read the file notes.txt, and then tell me what the "
    "command printed and which secret word the file holds."
)
TOOLS: list[ToolParam] = [
    {
        "name": "shell",
        "description": "Run a shell command and return what it prints.",
        "input_schema": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
    {
        "name": "read_file",
        "description": "Return the text of a file.",
        "input_schema": {
            "type": "object",
            "properties": {"path": {"type": "string", "description": "The file's path."}},
            "required": ["path"],
        },
    },
]
QUESTION = "What did the command print, and what is the secret word? Answer in one sentence."
# What the user adds before each turn, and the tool choice of the turn. Given only results, the model calls again.
STEPS: list[tuple[str, ToolChoiceParam]] = [
    (TASK, {"type": "tool", "name": "shell", "disable_parallel_tool_use": True}),
    ("", {"type": "tool", "name": "read_file", "disable_parallel_tool_use": True}),
    (QUESTION, {"type": "none"}),
]


def run_tool(name: str, arguments: dict[str, Any], folder: Path) -> str:
    """Return the output of the tool; the model sees the output of a failure, too."""
    command = arguments.get("command", "") if name == "shell" else f"cat {arguments.get('path', '')}"
    done = subprocess.run(
        command, shell=True, cwd=folder, capture_output=True, text=True, check=False, timeout=30
    )
    return done.stdout + done.stderr


def run_calls(message: Message, folder: Path) -> list[ToolResultBlockParam]:
    """Return the results of the calls in ``message``, in their order."""
    return [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": run_tool(block.name, dict(block.input), folder),
        }
        for block in message.content
        if block.type == "tool_use"
    ]


def transcript(message: Message) -> list[str]:
    """Return the model's blocks as lines of the transcript."""
    lines = []
    for block in message.content:
        if block.type == "text":
            lines.append(block.text)
        elif block.type == "thinking":
            lines.append(f"*{block.thinking}*")
        elif block.type == "tool_use":
            lines.append(f"    {block.name} {json.dumps(block.input)}")
    return lines


def ask(client: Anthropic, messages: list[MessageParam], choice: ToolChoiceParam) -> tuple[Message, str]:
    """Return the model's next turn, and a text of its tokens and seconds."""
    began = time.monotonic()
    with client.messages.stream(
        model=MODEL,
        max_tokens=200,
        messages=messages,
        tools=TOOLS,
        tool_choice=choice,
        extra_body={"temperature": 0},
    ) as stream:
        message = stream.get_final_message()
    seconds, usage = time.monotonic() - began, message.usage
    cached = usage.cache_read_input_tokens or 0
    prompt = f"{usage.input_tokens + cached} tokens in, {cached} of them cached"
    return message, f"{prompt}, {usage.output_tokens} out; {seconds:.1f} s"


def drive(client: Anthropic, folder: Path) -> tuple[list[str], str]:
    """Do the task; return the lines of the transcript and the final answer."""
    messages: list[MessageParam] = []
    given: list[ToolResultBlockParam] = []
    lines, answer = [], ""
    for words, choice in STEPS:
        added: list[TextBlockParam] = [{"type": "text", "text": words}] if words else []
        messages.append({"role": "user", "content": [*given, *added]})
        message, cost = ask(client, messages, choice)
        messages.append({"role": "assistant", "content": message.content})
        answer = "".join(block.text for block in message.content if block.type == "text")
        given = run_calls(message, folder)
        shown = (line for result in given for line in str(result.get("content", "")).splitlines())
        wanted = choice.get("name", choice["type"])
        lines += ["**User**", "", words, ""] if words else []
        lines += [f"**Model** (`tool_choice`: {wanted}; {cost})", "", *transcript(message), ""]
        lines += ["**Tool**", "", *(f"    {line}" for line in shown), ""] if given else []
    return lines, answer


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        description="Do an agent's task on a running server and keep the transcript."
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    base_url = parser.parse_args().base_url
    client = Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=600)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "notes.txt").write_text("The secret word is PELICAN.\n", encoding="utf-8")
        try:
            lines, answer = drive(client, Path(folder))
        except APIConnectionError:
            print(f"no server at {base_url}: start one with `singletree serve --model {MODEL}`")
            return 1
    head = [
        "# An agent's task on the embedded engine",
        "",
        f"Written by `docs/embedded_task.py` against `singletree serve --model {MODEL}`:",
        "llama.cpp on two cores, no GPU. The answers and figures are those of one run.",
        "",
    ]
    DOCUMENT.write_text("\n".join(head + lines).rstrip() + "\n", encoding="utf-8")
    done = "hi-42" in answer and "PELICAN" in answer
    print(f"{'done' if done else 'NOT done'}: {answer}")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
