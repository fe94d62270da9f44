"""Starts SGLang inside this process: its arguments, the steps in its log, and what to change when it does not start.

The names used here are those of SGLang 0.5.23: ``ServerArgs`` and ``Engine``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from singletree.engines.devices import ENGINE_PACKAGES
from singletree.errors import BadConfiguration
from singletree.in_process.startup import (
    EnginePackage,
    SavedCache,
    StartupLimit,
)

_FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"  # SGLang prefers it to what it is given.


def _saved(cache: SavedCache) -> tuple[tuple[str, ...], ...]:
    """Let pages go from the GPU to memory, and from there to files, which SGLang looks for when a prompt waits."""
    if os.environ.get(_FOLDER):
        raise BadConfiguration(f"--prefix-cache-path sets {_FOLDER} by itself: leave one of both out")
    files = {"file_storage_path": str(cache.folder), "max_size": cache.limit}
    return (
        ("--enable-hierarchical-cache",),
        ("--hicache-size", str(max(1, cache.memory // 10**9))),
        ("--hicache-write-policy", "write_through"),
        ("--hicache-storage-backend", "file"),
        ("--hicache-storage-backend-extra-config", json.dumps(files)),
    )


_STEPS = (
    (r"Load weight begin", "SGLang: reads the weights"),
    (r"Load weight end", "SGLang: has the weights, measures the memory that is left"),
    (r"KV Cache is allocated|Memory pool end", "SGLang: has the prefix cache, warms up"),
    (r"Capture cuda graph begin", "SGLang: captures CUDA graphs"),
)

_LIMITS = (
    StartupLimit(
        r"No module named 'xgrammar'",
        "XGrammar is missing, which holds forced and strict tool calls",
        "pip install xgrammar, or give `-- --grammar-backend none` and do without them",
    ),
    StartupLimit(
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "the weights leave no memory for the KV cache",
        "give `-- --mem-fraction-static 0.9`, a smaller or quantized model, or more GPUs with `-- --tp-size 2`",
    ),
    StartupLimit(
        r"Not enough host memory|cudaHostRegister failed",
        "a process of SGLang, one for each GPU, gets no memory for the saved KV cache on its way to the disk",
        "give a smaller --prefix-cache-limit",
    ),
    StartupLimit(
        r"[Oo]ut ?[Oo]f ?[Mm]emory",
        "the GPU's memory is too small for the model",
        "give `-- --mem-fraction-static 0.7`, a smaller or quantized model, or more GPUs with `-- --tp-size 2`",
    ),
    StartupLimit(
        r"context_length \((?P<wanted>\d+)\) is greater than the derived context_length \((?P<trained>\d+)\)",
        "a window of {wanted} tokens is more than the {trained} that the model was trained for",
        "give --context-window {trained} or less",
    ),
    StartupLimit(
        r"in _cuda_host_register",
        "SGLang saves the KV cache of a GPU only, and it runs on none",
        "leave --prefix-cache-path out, or give --engine llamacpp with a GGUF file",
    ),
    StartupLimit(
        r"No accelerator .* is available|Torch not compiled with CUDA enabled",
        "SGLang finds no device that it can use",
        "check `nvidia-smi`, or give --engine llamacpp",
    ),
    StartupLimit(
        r"Model architectures? (?P<names>\[.*?\]|\S+) (?:are|is) not supported",
        "this version of SGLang does not know the architecture {names}",
        "install a newer SGLang, or give --engine llamacpp with a GGUF file of the model",
    ),
)


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    """Restore the handlers and the level of the root logger, which SGLang sets up for itself."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@_root_logger_kept()
def _start(arguments: Sequence[str]) -> Any:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    parser = PACKAGE.parser(argparse.ArgumentParser, arguments)
    ServerArgs.add_cli_args(parser)
    return Engine(server_args=ServerArgs.from_cli_args(parser.parse_args(list(arguments))))


PACKAGE = EnginePackage(
    *ENGINE_PACKAGES["sglang"],
    oldest=(0, 5, 23),
    command="python -m sglang.launch_server --model-path MODEL",
    log_settings="SGLANG_LOGGING_CONFIG_PATH",
    model="--model-path",
    context_window="--context-length",
    slots="--max-running-requests",
    refused={
        "--model-path": "--model before the --",
        "--model": "--model before the --",
        "--served-model-name": "--model-name before the --",
        "--context-length": "--context-window before the --",
        "--max-running-requests": "--slots before the --",
        "--skip-tokenizer-init": "nothing: without its tokenizer SGLang has no constraints, so no forced tool calls",
    },
    agent=(
        (("--grammar-backend", "xgrammar"), "forced and strict tool calls"),
        (("--incremental-streaming-output",), "each step gives its new tokens only"),
        (("--enable-priority-scheduling",), "hints of harnesses: who waits for an answer goes first"),
        (("--schedule-low-priority-values-first",), "a lower number goes first, as in the hints"),
    ),
    saved=_saved,
    steps=_STEPS,
    limits=_LIMITS,
    start=_start,
)
