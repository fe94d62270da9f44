"""docs/library.md: its code runs, with nothing but the standard library."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

import singletree
from source import ROOT, SOURCE

PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
TEMPLATE = '<tool_call>{"name": ..., "arguments": ...}</tool_call> <think></think>'
WRITTEN = 'hm\n</think>\n\nI look.\n<tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>'
OPENED = "<|im_start|>assistant\n<think>\n"


def block(word: str) -> dict[str, Any]:
    """Return the names that the block with ``word`` in it defines."""
    (source,) = (source for source in BLOCKS if word in source)
    defined: dict[str, Any] = {}
    exec(compile(source, "docs/library.md", "exec"), defined)
    return defined


async def given(things: Iterable[Any]) -> AsyncIterator[Any]:
    for thing in things:
        yield thing


@pytest.mark.parametrize("source", BLOCKS, ids=range(len(BLOCKS)))
def test_each_block_prints_what_it_says(source: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "docs/library.md", "exec"), {})
    expected = re.findall(r"^print\(.*\)  # (.+)$", source, re.MULTILINE)
    assert printed.getvalue().splitlines() == expected


def test_the_page_runs_with_nothing_but_the_standard_library() -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"
        f"for source in {BLOCKS!r}: exec(source, {{}})\n"
        "known = sys.stdlib_module_names | {'singletree', '__main__'}\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} - known), file=sys.stderr)\n"
        "light = {'conversation', 'errors', 'events', 'families', 'parsing', 'pictures', 'request_options'}\n"
        "own = {name.split('.')[1] for name in sys.modules if name.startswith('singletree.')}\n"
        "print(sorted(own - light), file=sys.stderr)\n"
    )
    # -I and -S leave the standard library alone on the path.
    run = [sys.executable, "-I", "-S", "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["[]", "[]"]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_server_of_the_page_streams_chat_completions(size: int) -> None:  # C9 C17
    chunks = block("async def chunks")["chunks"]
    request = {"tools": [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]}
    pieces = [WRITTEN[at : at + size] for at in range(0, len(WRITTEN), size)]

    async def run() -> bytes:
        return b"".join([part async for part in chunks(given(pieces), TEMPLATE, request, OPENED)])

    *lines, done = asyncio.run(run()).decode().split("\n\n")[:-1]
    assert done == "data: [DONE]"
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm"
    assert "".join(d.get("content", "") for d in deltas).strip() == "I look."
    assert [call["name"] for call in calls if "name" in call] == ["ls"]
    assert "".join(call["arguments"] for call in calls) == '{"path": "."}'


class Vocabulary:
    """A tokenizer with the interface of Hugging Face's: bytes, and two special tokens."""

    def __init__(self) -> None:
        self._added = {"<|tool_call>": 300, "<tool_call|>": 301, "<|x|>": 302}
        self.all_special_ids = [300, 301]

    def get_added_vocab(self) -> dict[str, int]:
        return self._added

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def encode(self, *texts: str) -> list[int]:
        """Encode ``texts``, alternately as bytes and as a special token."""
        ids: list[int] = []
        for i, text in enumerate(texts):
            ids += [self._added[text]] if i % 2 else list(text.encode())
        return ids


class Llm:
    """An engine with the interface of ``AsyncLLM``."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    async def generate(self, *_: object) -> AsyncIterator[Any]:
        """Yield two tokens a step."""
        for at in range(0, len(self._ids), 2):
            completion = type("Completion", (), {"token_ids": self._ids[at : at + 2]})
            yield type("Output", (), {"outputs": [completion]})


def test_the_engine_loop_of_the_page_distinguishes_tokens_from_their_spelling() -> None:  # C18
    page, vocabulary = block("async def events"), Vocabulary()
    ids = vocabulary.encode("<|tool_call> é: ", "<|tool_call>", "call:ls{n:1}", "<tool_call|>")

    async def run() -> Any:
        stream = page["events"](Llm(ids), vocabulary, "", None, "1", "gemma4")
        return await page["turn"](stream)

    turn = asyncio.run(run())
    assert turn.text == "<|tool_call> é: "
    assert [(call.name, call.arguments, call.complete) for call in turn.tool_calls] == [
        ("ls", '{"n": 1}', True)
    ]


def test_what_the_page_lists_can_be_imported_from_the_top() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"\w+", row)]
    assert names
    assert {*names} <= {*singletree.__all__}
    assert all(hasattr(singletree, name) for name in singletree.__all__)
