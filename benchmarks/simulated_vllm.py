"""An engine without a model, in real time, with a prefix cache: behind vLLM's wire and behind Dynamo at once.

    python simulated_vllm.py PORT EVENTS BLOCKS [MODEL_DIR]

It runs in Dynamo's environment. It serves ``/v1/completions`` at PORT and publishes the events of its cache of BLOCKS
blocks at the ZMQ endpoint EVENTS, as vLLM does; with MODEL_DIR it is a worker of Dynamo, too, in the namespace
``admission``. ``GET /counted`` has the tokens of all prompts, and how many of them were cached.

It reads one prompt after the other, and all generations share the speed of decoding. Blocks in use are never evicted;
the others are, the one used longest ago first, as in vLLM. What it generates follows from the end of the prompt
(``turn_of``), so that a client knows what its next prompt has to begin with.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

BLOCK = 16
IDS = 150_000
"""Ids below this one are used: none of them is special in Qwen3's vocabulary."""
_PREFILL, _DECODE, _TOGETHER, _STEP = 8000.0, 60.0, 16.0, 0.02
_NAME = "simulated"


def turn_of(prompt: list[int], length: int) -> list[int]:
    """Return the ``length`` tokens that every engine generates for ``prompt``."""
    random = Random(str(prompt[-8:]))
    return [random.randrange(1, IDS) for _ in range(length)]


def chain(tokens: list[int]) -> list[int]:
    """Return a number for each whole block of ``tokens``, which depends on all tokens before it."""
    raw, names, parent = array("I", tokens).tobytes(), list[int](), b""
    for at in range(0, len(raw) - len(raw) % (4 * BLOCK), 4 * BLOCK):
        parent = hashlib.blake2b(parent + raw[at : at + 4 * BLOCK], digest_size=8).digest()
        names.append(int.from_bytes(parent, "big"))
    return names


@dataclass(slots=True, eq=False)
class Generation:
    tokens: list[int]
    prompt: int
    blocks: list[int]
    read: asyncio.Event
    cached: int = 0


class Engine:
    """One engine. ``send`` gets the events of its cache."""

    def __init__(self, blocks: int, send: Any) -> None:
        self._size, self._send = blocks, send
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._pinned: dict[int, int] = {}
        self._queue: deque[Generation] = deque()
        self._reading = False
        self.running = 0
        self.prompt_tokens = self.cached_tokens = 0

    async def generate(self, prompt: list[int], length: int) -> AsyncIterator[tuple[list[int], int]]:
        """Yield the first token, then the others when all are decoded, each with how many of the prompt were cached."""
        turn = turn_of(prompt, length)
        each = Generation(prompt + turn, len(prompt), chain(prompt + turn), asyncio.Event())
        self._queue.append(each)
        self._next()
        await each.read.wait()
        yield turn[:1], each.cached
        rate = _DECODE / (1 + (self.running - 1) / _TOGETHER)
        try:
            await asyncio.sleep(length / rate)
        finally:
            self._end(each)
        yield turn[1:], each.cached

    def _next(self) -> None:
        if self._reading or not self._queue:
            return
        each = self._queue[0]
        if self._pinned and len(self._pinned) + len(each.blocks) > self._size:
            return  # until a generation ends
        self._queue.popleft()
        self._reading = True
        own = each.blocks[: each.prompt // BLOCK]
        cached = 0
        for block in own[: (each.prompt - 1) // BLOCK]:  # the last token is always read
            if block not in self._blocks:
                break
            cached += 1
        each.cached = cached * BLOCK
        self.prompt_tokens += each.prompt
        self.cached_tokens += each.cached
        for block in own:
            self._pinned[block] = self._pinned.get(block, 0) + 1
            if block in self._blocks:
                self._blocks.move_to_end(block)
        self._add(each, cached, len(own))
        seconds = _STEP + (each.prompt - each.cached) / _PREFILL
        asyncio.get_running_loop().call_later(seconds, self._read, each)

    def _read(self, each: Generation) -> None:
        self._reading = False
        self.running += 1
        each.read.set()
        self._next()

    def _end(self, each: Generation) -> None:
        self.running -= 1
        for block in each.blocks[: each.prompt // BLOCK]:
            self._pinned[block] -= 1
            if not self._pinned[block]:
                del self._pinned[block]
        self._add(each, each.prompt // BLOCK, len(each.blocks))
        for block in reversed(each.blocks):  # the last block is the first to go
            if block in self._blocks:
                self._blocks.move_to_end(block)
        self._next()

    def _add(self, each: Generation, start: int, end: int) -> None:
        gone, runs = list[int](), list[list[int]]()
        for at in range(start, end):
            if each.blocks[at] in self._blocks:
                continue
            if len(self._blocks) >= self._size:
                victim = next((block for block in self._blocks if block not in self._pinned), None)
                if victim is None:
                    break
                del self._blocks[victim]
                gone.append(victim)
            self._blocks[each.blocks[at]] = None
            if runs and runs[-1][-1] == at - 1:
                runs[-1].append(at)
            else:
                runs.append([at])
        events: list[dict[str, Any]] = []
        if gone:
            events.append({"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"})
        events += [
            {
                "type": "BlockStored",
                "block_hashes": [each.blocks[at] for at in run],
                "parent_block_hash": each.blocks[run[0] - 1] if run[0] else None,
                "token_ids": each.tokens[run[0] * BLOCK : (run[-1] + 1) * BLOCK],
                "block_size": BLOCK,
                "medium": "GPU",
                "group_idx": 0,
            }
            for run in runs
        ]
        if events:
            self._send(events)


def publisher(endpoint: str) -> Any:
    """Return what publishes events at ``endpoint`` as vLLM does."""
    import msgspec
    import zmq

    socket: Any = zmq.Context.instance().socket(zmq.PUB)
    socket.set_hwm(0)
    socket.bind(endpoint)
    numbers = count()

    def send(events: list[dict[str, Any]]) -> None:
        payload = msgspec.msgpack.encode([0.0, events, 0])
        socket.send_multipart([b"", next(numbers).to_bytes(8, "big"), payload])

    return send


async def serve_http(engine: Engine, port: int, blocks: int) -> None:
    """Serve what singletree asks a vLLM for."""
    from aiohttp import web

    async def complete(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)

        async def event(content: dict[str, Any]) -> None:
            await answer.write(b"data: " + json.dumps(content).encode() + b"\n\n")

        done, found = 0, 0
        async for tokens, found in engine.generate(asked["prompt"], asked["max_tokens"]):  # noqa: B007
            done += len(tokens)
            reason = "length" if done == asked["max_tokens"] else None
            await event({"choices": [{"index": 0, "text": "", "token_ids": tokens, "finish_reason": reason}]})
        usage = {
            "prompt_tokens": len(asked["prompt"]),
            "completion_tokens": done,
            "prompt_tokens_details": {"cached_tokens": found},
        }
        await event({"choices": [], "usage": usage})
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def page(request: web.Request) -> web.Response:
        model = {"id": _NAME, "root": _NAME, "max_model_len": 1 << 18, "owned_by": "vllm"}
        pages: dict[str, Any] = {
            "/v1/models": {"object": "list", "data": [model]},
            "/version": {"version": "0.32.0"},
            "/health": {},
            "/counted": {"prompt": engine.prompt_tokens, "cached": engine.cached_tokens},
        }
        if request.path == "/metrics":
            cache = f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{blocks}"}} 1.0\n'
            running = f'vllm:num_requests_running{{engine="0",model_name="{_NAME}"}} {engine.running}\n'
            return web.Response(text=cache + running)
        known = pages.get(request.path)
        return web.json_response(known) if known is not None else web.Response(status=404)

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/{path:.*}", page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()


async def serve_dynamo(engine: Engine, events: str, blocks: int, folder: str) -> None:
    """Serve as a worker of Dynamo, which follows the same events."""
    from dynamo.llm import (  # type: ignore[import-not-found]
        KvEventPublisher,
        ModelInput,
        ModelRuntimeConfig,
        ModelType,
        WorkerType,
        register_model,
    )
    from dynamo.runtime import DistributedRuntime  # type: ignore[import-not-found]

    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("admission.backend.generate")
    config = ModelRuntimeConfig()
    config.context_length = config.max_num_batched_tokens = 1 << 18
    config.total_kv_blocks = blocks
    config.max_num_seqs = 256

    async def generate(request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        prompt, length = request["token_ids"], request["stop_conditions"]["max_tokens"]
        done = 0
        async for tokens, _ in engine.generate(prompt, length):
            done += len(tokens)
            yield {"token_ids": tokens, "index": 0, **({"finish_reason": "length"} if done == length else {})}

    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        folder,
        _NAME,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=BLOCK,
        runtime_config=config,
        ignore_weights=True,
    )
    keep = KvEventPublisher(endpoint, kv_block_size=BLOCK, zmq_endpoint=events, zmq_topic="")
    await endpoint.serve_endpoint(generate, graceful_shutdown=True)
    del keep


async def main(port: int, events: str, blocks: int, folder: str = "") -> None:
    """Serve until the process ends."""
    engine = Engine(blocks, publisher(events))
    await serve_http(engine, port, blocks)
    if folder:
        await serve_dynamo(engine, events, blocks, folder)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:]))
