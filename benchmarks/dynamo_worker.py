"""A worker without a model for Dynamo's frontend: it plays what singletree's scripted engine plays.

    python dynamo_worker.py MODEL_DIR NAME[,NAME]

Runs in Dynamo's environment, with this repository and its source on the path. Prompts choose what is played by the
markers of ``singletree.testing.scripts``; the pace is kept on average. With the URL of a vLLM in $WORKER_ENGINE, that
one generates instead.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
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

from benchmarks.vllm_stub import script_chooser

_WINDOW = 262_144
_CHUNKS_A_TURN = 16
_ENGINE = os.environ.get("WORKER_ENGINE", "")
_CALLS = os.environ.get("WORKER_CALLS", "hermes")
"""Dynamo's parser of calls."""


class Worker:
    """Plays what the scripted engine plays."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._end = tokenizer.token_to_id("<|im_end|>")
        self._chooser = script_chooser(tokenizer, "Hello there.")

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Dynamo's interface: a request with token ids in, dictionaries with token ids out."""
        prompt = request["token_ids"]
        _, script = self._chooser.choose(prompt)
        tokens, size, delay = script.tokens, script.chunk or 1, script.delay or 0.0
        now = asyncio.get_running_loop().time
        due = now()
        for turn, at in enumerate(range(0, len(tokens), size), 1):
            if (wait := due - now()) > 0:
                await asyncio.sleep(wait)
            elif turn % _CHUNKS_A_TURN == 0:
                await asyncio.sleep(0)
            if context.is_stopped():
                return
            due += delay
            yield {"token_ids": [*tokens[at : at + size]], "index": 0}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        usage["total_tokens"] = len(prompt) + len(tokens)
        ending = {"finish_reason": "stop", "completion_usage": usage}
        yield {"token_ids": [self._end], "index": 0, **ending}


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
                        reason = choice.get("finish_reason")
                        end = {"finish_reason": reason} if reason else {}
                        yield {"token_ids": choice.get("token_ids") or [], "index": 0, **end}


async def main(model_dir: str, names: list[str]) -> None:
    """Register with the discovery that the environment names, once for each name of the model, and serve."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    tokenizer = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))
    worker = Forwarder() if _ENGINE else Worker(tokenizer)
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
    folder, served = sys.argv[1:]
    asyncio.run(main(folder, served.split(",")))
