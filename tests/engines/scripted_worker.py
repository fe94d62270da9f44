"""A server that plays scripts over vLLM's wire, as a process of its own, to be killed and started again.

    python tests/engines/scripted_worker.py --port 8001 --model FOLDER --delay 0.02

It chooses its scripts as the scripted engine does. What it generates follows from the prompt alone: behind a prompt
that ends with the beginning of the script it goes on with the rest, as a model does with the turn of another engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engines.wire_servers import DIALECTS, Step
from singletree.prompts.tokenizer.tokenizer import Tokenizer, load_tokenizer
from singletree.testing.scripted_engine import PrefixMemory
from singletree.testing.scripts import Script, ScriptBook, ScriptChooser

DIALECT = DIALECTS["vllm-completions"]
_DEFAULT = "Hello there."
_CACHED_PROMPTS = 64


def common_end(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens at the end of the prompt are those that ``tokens`` begin with."""
    last = prompt[-1] if prompt else None
    sizes = (size for size in range(min(len(prompt), len(tokens)), 0, -1) if tokens[size - 1] == last)
    return next((size for size in sizes if tuple(prompt[-size:]) == tuple(tokens[:size])), 0)


class Worker:
    """The server.

    Args:
        tokenizer: of the model that it claims to serve.
        name: the name of that model.
        scripts: a folder of scripts; None for none.
        delay: seconds between two tokens.
        log: gets a line of JSON for each generation when it begins; None for no log.
    """

    def __init__(
        self, tokenizer: Tokenizer, name: str, scripts: Path | None, delay: float, log: Path | None
    ) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._delay = delay
        self._log = log
        book = ScriptBook(scripts, tokenizer.encode)
        self._chooser = ScriptChooser(book, Script(_DEFAULT), tokenizer.encode, tokenizer.decode)
        self._end = tokenizer.added_tokens.get(tokenizer.eos_token)
        self._memory = PrefixMemory(_CACHED_PROMPTS)

    def app(self) -> web.Application:
        """The application, to be run."""
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/version", self.version)
        app.router.add_get("/health", self.version)
        app.router.add_post(DIALECT.path, self.complete)
        return app

    async def models(self, request: web.Request) -> web.Response:
        """The one model."""
        model = {"id": self._name, "root": self._name, "max_model_len": 262_144, "owned_by": "vllm"}
        return web.json_response({"object": "list", "data": [model]})

    async def version(self, request: web.Request) -> web.Response:
        """That of the vLLM whose wire it has."""
        return web.json_response({"version": "0.32.0"})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Play the rest of the script that the prompt asks for."""
        body: dict[str, Any] = await request.json()
        asked = DIALECT.read(body)
        name, script = self._chooser.choose(asked.prompt)
        tokens = list(script.tokens) + ([] if self._end is None else [self._end])
        start = common_end(asked.prompt, tokens)
        cached = self._memory.recall(asked.prompt)
        if self._log is not None:
            record = {
                "script": name,
                "prompt_token_ids": asked.prompt,
                "start": start,
                "constrained": bool(body.get("structured_outputs") or body.get("guided_grammar")),
            }
            with self._log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        before: list[int] = []
        rest = tokens[start:] or tokens[-1:]
        if allowed := body.get("allowed_token_ids"):
            rest = [token for token in rest if token in allowed] or allowed[:1]
        delay = self._delay if script.delay is None else script.delay
        for token in rest[: asked.limit]:
            await asyncio.sleep(delay)
            last = len(before) + 1 == min(len(rest), asked.limit)
            finish = None if not last else "stop" if token == self._end or token in asked.stops else "length"
            await response.write(DIALECT.event(Step(asked, [token], before, finish)))
            before.append(token)
        await response.write(DIALECT.ending(cached))
        await response.write_eof()
        self._memory.remember([*asked.prompt, *before])
        return response


def main() -> None:
    """Serve until the process is killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--name", default="scripted-qwen3")
    parser.add_argument("--script-dir", type=Path)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    worker = Worker(tokenizer, options.name, options.script_dir, options.delay, options.log)
    web.run_app(worker.app(), host="127.0.0.1", port=options.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
