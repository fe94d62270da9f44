"""A worker without a model for Dynamo's frontend: it plays what singletree's scripted engine plays.

    python dynamo_worker.py MODEL_DIR MODEL_NAME FILLER.json

Runs in Dynamo's environment. FILLER.json is a list of token ids. The last ``[[gen:COUNT:CHUNK:DELAY]]`` in a
prompt asks for COUNT tokens of it, CHUNK at once, DELAY seconds apart; the pace is kept on average. The last
``[[echo:TEXT]]`` asks for TEXT, and where none stands near the end the last ``[[script:NAME]]`` for NAME.txt in
$WORKER_SCRIPTS; both at the pace of $WORKER_DELAY.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop  # type: ignore[import-not-found,unused-ignore]
from dynamo.llm import (  # type: ignore[import-not-found]
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime  # type: ignore[import-not-found]
from tokenizers import Tokenizer

_MARKER = re.compile(r"\[\[gen:(\d+):(\d+):([\d.]+)\]\]")
_ECHO = re.compile(r"\[\[echo:(.*?)\]\]", re.DOTALL)
_SCRIPT = re.compile(r"\[\[script:([\w-]+)\]\]")
_SCRIPTS = Path(os.environ.get("WORKER_SCRIPTS", ""))
_TAIL = 512  # tokens at the end of a prompt in which the marker stands
_WINDOW = 262_144
_PROMPT_LOG = os.environ.get("WORKER_PROMPT_LOG", "")
"""File to which the token ids of each prompt go, a line of JSON each."""
_END_LOG = os.environ.get("WORKER_END_LOG", "")
"""File to which each generation goes when it ends: a line of JSON with the Unix time and its prompt."""
_DELAY = float(os.environ.get("WORKER_DELAY", "0"))
"""Seconds between the tokens of an echo or a script."""
_CHUNKS_A_TURN = 16


class Worker:
    """Plays filler, or what ``[[echo:TEXT]]`` asks for."""

    def __init__(self, tokenizer: Any, filler: list[int], end: int | None) -> None:
        self._tokenizer, self._filler, self._end = tokenizer, filler, end

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Dynamo's interface: a request with token ids in, dictionaries with token ids out."""
        prompt = request["token_ids"]
        if _PROMPT_LOG:
            with Path(_PROMPT_LOG).open("a", encoding="utf-8") as log:  # noqa: ASYNC230 (one line a request)
                log.write(json.dumps(prompt) + "\n")
        tail = self._tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False)
        *_, (count, size, delay) = [(3, 1, 0.0), *_parsed(tail)]
        tokens = (self._filler * (count // len(self._filler) + 1))[:count]
        if text := self._text(prompt, tail):
            tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
            count, size, delay = len(tokens), 1, _DELAY
        now = asyncio.get_running_loop().time
        due = now()
        for turn, at in enumerate(range(0, count, size), 1):
            if (wait := due - now()) > 0:
                await asyncio.sleep(wait)
            elif turn % _CHUNKS_A_TURN == 0:
                await asyncio.sleep(0)
            if context.is_stopped():
                return
            due += delay
            yield {"token_ids": tokens[at : at + size], "index": 0}
        if _END_LOG:
            told = {"at": time.time(), "prompt": self._tokenizer.decode(prompt, skip_special_tokens=False)}
            with Path(_END_LOG).open("a", encoding="utf-8") as log:  # noqa: ASYNC230 (one line a request)
                log.write(json.dumps(told) + "\n")
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "total_tokens": len(prompt) + count,
        }
        yield {
            "token_ids": [self._end],
            "index": 0,
            "finish_reason": "stop",
            "completion_usage": usage,
        }

    def _text(self, prompt: list[int], tail: str) -> str:
        """What is to be said; empty for filler."""
        if echoes := _ECHO.findall(tail):
            return str(echoes[-1])
        if not _SCRIPTS.name:
            return ""
        names = _SCRIPT.findall(self._tokenizer.decode(prompt, skip_special_tokens=False))
        return (_SCRIPTS / f"{names[-1]}.txt").read_text(encoding="utf-8") if names else ""


def _parsed(text: str) -> list[tuple[int, int, float]]:
    return [(int(count), int(size), float(delay)) for count, size, delay in _MARKER.findall(text)]


async def main(model_dir: str, model_name: str, filler: list[int]) -> None:
    """Register with the discovery that the environment names, and serve."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    tokenizer = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))
    worker = Worker(tokenizer, filler, tokenizer.token_to_id("<|im_end|>"))
    endpoint = runtime.endpoint("bench.scripted.generate")
    config = ModelRuntimeConfig()
    config.context_length = config.max_num_batched_tokens = _WINDOW
    config.total_kv_blocks = 100_000
    config.max_num_seqs = 256
    config.tool_call_parser = os.environ.get("WORKER_TOOL_PARSER", "hermes")
    config.reasoning_parser = "qwen3"
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        model_dir,
        model_name,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=16,
        runtime_config=config,
        ignore_weights=True,
    )
    await endpoint.serve_endpoint(worker.generate, graceful_shutdown=True)


if __name__ == "__main__":
    uvloop.install()
    folder, name, played = sys.argv[1:]
    asyncio.run(main(folder, name, json.loads(Path(played).read_bytes())))
