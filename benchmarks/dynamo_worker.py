"""A worker without a model for Dynamo's frontend: it plays what singletree's scripted engine plays.

    python dynamo_worker.py MODEL_DIR NAME[,NAME] FILLER.json

Runs in Dynamo's environment. FILLER.json is a list of token ids. The last ``[[gen:COUNT:CHUNK:DELAY]]`` in a
prompt asks for COUNT tokens of it, CHUNK at once, DELAY seconds apart; the pace is kept on average. The last
``[[echo:TEXT]]``, or ``[[echo@DELAY:TEXT]]``, asks for TEXT, and where none stands near the end the last
``[[script:NAME]]`` for NAME.txt in $WORKER_SCRIPTS; both at the pace of $WORKER_DELAY unless they name one.
With the URL of a vLLM in $WORKER_ENGINE, that one generates instead.
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

import aiohttp
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
_ECHO = re.compile(r"\[\[echo(?:@([\d.]+))?:(.*?)\]\]", re.DOTALL)
_SCRIPT = re.compile(r"\[\[script:([\w-]+)\]\]")
_SCRIPTS = Path(os.environ.get("WORKER_SCRIPTS", ""))
_TAIL = 512  # tokens at the end of a prompt in which the marker stands
_WINDOW = 262_144
_END_LOG = os.environ.get("WORKER_END_LOG", "")
"""File to which each generation goes when it ends: a line of JSON with the Unix time and its prompt."""
_DELAY = float(os.environ.get("WORKER_DELAY", "0"))
"""Seconds between the tokens of an echo or a script."""
_CHUNKS_A_TURN = 16
_ENGINE = os.environ.get("WORKER_ENGINE", "")
_CALLS = os.environ.get("WORKER_CALLS", "hermes")
"""Dynamo's parser of calls."""


class Worker:
    """Plays filler, or what ``[[echo:TEXT]]`` asks for."""

    def __init__(self, tokenizer: Any, filler: list[int], end: int | None) -> None:
        self._tokenizer, self._filler, self._end = tokenizer, filler, end

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Dynamo's interface: a request with token ids in, dictionaries with token ids out."""
        prompt = request["token_ids"]
        tail = self._tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False)
        *_, (count, size, delay) = [(3, 1, 0.0), *_parsed(tail)]
        tokens = (self._filler * (count // len(self._filler) + 1))[:count]
        pace, text = self._text(prompt, tail)
        if text:
            tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
            count, size, delay = len(tokens), 1, pace
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
            record = {"at": time.time(), "prompt": self._tokenizer.decode(prompt, skip_special_tokens=False)}
            with Path(_END_LOG).open("a", encoding="utf-8") as log:  # noqa: ASYNC230 (one line a request)
                log.write(json.dumps(record) + "\n")
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

    def _text(self, prompt: list[int], tail: str) -> tuple[float, str]:
        """Seconds between the tokens, and the text to play; empty for filler."""
        if echoes := _ECHO.findall(tail):
            pace, text = echoes[-1]
            return float(pace or _DELAY), text
        if not _SCRIPTS.name:
            return _DELAY, ""
        names = _SCRIPT.findall(self._tokenizer.decode(prompt, skip_special_tokens=False))
        return _DELAY, (_SCRIPTS / f"{names[-1]}.txt").read_text(encoding="utf-8") if names else ""


class Forwarder:
    """Sends the token ids of each request to a vLLM, and passes on the ids that it generates."""

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Dynamo's interface, as ``Worker.generate``."""
        body = {
            "token_ids": request["token_ids"],
            "sampling_params": {"max_tokens": request["stop_conditions"].get("max_tokens") or 4096},
            "stream": True,
        }
        waits = aiohttp.ClientTimeout(None)
        async with (
            aiohttp.ClientSession(timeout=waits) as session,
            session.post(f"{_ENGINE}/inference/v1/generate", json=body) as answer,
        ):
            answer.raise_for_status()
            async for line in answer.content:
                if context.is_stopped():
                    return
                event = line.removeprefix(b"data: ").strip()
                if event.startswith(b"{"):
                    for choice in json.loads(event).get("choices", ()):
                        end = (
                            {"finish_reason": choice["finish_reason"]} if choice.get("finish_reason") else {}
                        )
                        yield {"token_ids": choice.get("token_ids") or [], "index": 0, **end}


def _parsed(text: str) -> list[tuple[int, int, float]]:
    return [(int(count), int(size), float(delay)) for count, size, delay in _MARKER.findall(text)]


async def main(model_dir: str, names: list[str], filler: list[int]) -> None:
    """Register with the discovery that the environment names, once for each name of the model, and serve."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    tokenizer = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))
    worker = Forwarder() if _ENGINE else Worker(tokenizer, filler, tokenizer.token_to_id("<|im_end|>"))
    config = ModelRuntimeConfig()
    config.context_length = config.max_num_batched_tokens = _WINDOW
    config.total_kv_blocks = 100_000
    config.max_num_seqs = 256
    config.tool_call_parser = _CALLS
    config.reasoning_parser = "qwen3"
    endpoints = [runtime.endpoint(f"bench.scripted{number or ''}.generate") for number in range(len(names))]
    for model_name, endpoint in zip(names, endpoints, strict=True):
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
    await asyncio.gather(
        *(each.serve_endpoint(worker.generate, graceful_shutdown=True) for each in endpoints)
    )


if __name__ == "__main__":
    uvloop.install()
    folder, served, played = sys.argv[1:]
    asyncio.run(main(folder, served.split(","), json.loads(Path(played).read_bytes())))
