"""SGLang's own parsers on given pieces; run by ``parse.py`` in an environment that has SGLang, with orders on stdin.

As its chat serving does: the reasoning parser first, the tool parser on what it leaves.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from importlib import import_module
from typing import Any

logging.disable(logging.ERROR)


def parsers(job: dict[str, Any], tool: dict[str, Any], thinks: bool) -> tuple[Any, Any]:
    """Fresh parsers for one stream."""
    shape = import_module("sglang.srt.entrypoints.openai.protocol").Tool(type="function", function=tool)
    calls = import_module("sglang.srt.function_call.function_call_parser")
    reasoning = import_module("sglang.srt.parser.reasoning_parser").ReasoningParser
    named = job["reasoning"]
    first = (
        reasoning(named, True, thinks, None, tokenizer=None, tool_call_parser_active=True) if named else None
    )
    return first, calls.FunctionCallParser([shape], job["tools"], tokenizer=None)


def measure(job: dict[str, Any], kind: str, cut: list[str], order: dict[str, Any]) -> float | str:
    """CPU microseconds a piece; a string with ``>`` where the cap came first."""
    first, second = parsers(job, order["tool"], kind == "reasoning")
    begun = time.process_time()
    for i, piece in enumerate(cut):
        rest = first.parse_stream_chunk(piece)[1] if first else piece
        if rest:
            second.parse_stream_chunk(rest)
        if not i % 64 and time.process_time() - begun > order["cap"]:
            return f">{(time.process_time() - begun) / (i + 1) * 1e6:.0f}"
    return (time.process_time() - begun) / len(cut) * 1e6


def main() -> None:
    """Do all jobs; the last line of the output is their figures."""
    order = json.load(sys.stdin)
    rows = []
    for job in order["jobs"]:
        found: dict[str, Any] = {"family": job["family"]}
        for kind, cut in job["streams"].items():
            try:
                found[kind] = measure(job, kind, cut, order)
            except Exception as error:  # one family that does not run here must not hide the others
                found[kind] = type(error).__name__
            if str(found[kind]).startswith(">"):
                break  # the longer ones would take longer still
        rows.append(found)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
