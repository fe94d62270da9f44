"""Servers as of ``served`` on real engines whose samplers play the scripts; their models have made-up weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from clients.served import SAMPLER, Server, played_from, playing
from engines import real_sglang, real_vllm, scripted_llama
from engines.scripted_llama import ScriptedLlama
from engines.scripted_turns import ScriptedTurns
from engines.tiny_checkpoint import WINDOW, make_tiny_checkpoint

_MADE_UP = ("--load-format", "dummy")
SGLANG_PLAYER = {
    "PYTHONPATH": real_vllm.PYTHONPATH,
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "engines.sglang_models",
}
"""The variables with which SGLang plays scripts, if its model has the architecture of Qwen2."""


@contextmanager
def serving_scripted_llamacpp(tokenizer: Path, folder: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    """A server with llama.cpp embedded."""
    turns = ScriptedTurns(tokenizer, _scripts(folder), folder / "plays.jsonl")
    model = folder / "model.gguf"
    scripted_llama.write_model(tokenizer, turns.tokenizer, "dense", WINDOW, model)
    environment = os.environ | scripted_llama.Player(folder, turns).variables
    arguments = ["--engine", "llamacpp", "--model", str(model), *flags]
    with playing(folder, arguments, environment=environment) as server:
        yield server


@contextmanager
def serving_before_llama_server(tokenizer: Path, folder: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    """A server in front of llama.cpp's own."""
    running = ScriptedLlama(tokenizer, "dense", WINDOW, {}, _scripts(folder), folder)
    try:
        running.start("local-model")
        behind = ["--engine-url", running.url, "--model", str(tokenizer)]
        with playing(folder, [*behind, *flags]) as server:
            yield server
    finally:
        running.stop()


@contextmanager
def serving_before_sglang(tokenizer: Path, folder: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    """A server in front of SGLang's own."""
    model = make_tiny_checkpoint(folder / "tiny-qwen2", tokenizer)
    _scripts(folder)
    real_sglang.sglang_program()  # with what singletree needs, of which the sampler is a part
    limits = ["--context-length", str(WINDOW), "--max-total-tokens", str(2 * WINDOW)]
    with real_sglang.running_sglang(
        *_MADE_UP, *limits, folder=model, variables={**SGLANG_PLAYER, **played_from(folder)}
    ) as engine:
        behind = ["--engine-url", engine.url, "--model", str(model)]
        with playing(folder, [*behind, *flags]) as server:
            yield server


@contextmanager
def serving_scripted_sglang(tokenizer: Path, folder: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    """A server with SGLang inside."""
    python, environment = real_sglang.sglang_program()
    model = make_tiny_checkpoint(folder / "tiny-qwen2", tokenizer)
    own = [*real_sglang.IN_PROCESS, *_MADE_UP, "--max-total-tokens", str(2 * WINDOW)]
    arguments = ["--engine", "sglang", "--model", str(model), "--slots", "8", *flags, "--", *own]
    with playing(
        folder,
        arguments,
        program=(str(python), "-m", "singletree"),
        environment=environment | SGLANG_PLAYER | played_from(folder),
    ) as server:
        yield server


@contextmanager
def serving_before_vllm(tokenizer: Path, folder: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    """A server in front of vLLM's own."""
    _, variables = real_vllm.program()
    model = make_tiny_checkpoint(folder / "tiny-qwen2", tokenizer)
    _scripts(folder)
    with real_vllm.running(
        *_MADE_UP,
        *("--logits-processors", SAMPLER),
        max_model_len=WINDOW,
        folder=model,
        variables={"PYTHONPATH": variables["PYTHONPATH"], **played_from(folder)},
    ) as engine:
        behind = ["--engine-url", engine.url, "--model", str(model)]
        with playing(folder, [*behind, *flags]) as server:
            yield server


def _scripts(folder: Path) -> Path:
    scripts = folder / "scripts"
    scripts.mkdir(exist_ok=True)
    return scripts
