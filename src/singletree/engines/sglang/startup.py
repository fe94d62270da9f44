"""Starts SGLang inside this process: its arguments, its log, and what to change when it does not start.

The names used here are those of SGLang 0.5.23: ``ServerArgs`` and ``Engine``.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from singletree.engines.devices import installed_version
from singletree.engines.engine_arguments import ArgumentNames, EngineSettings, engine_arguments
from singletree.engines.startup_log import (
    StartupLimit,
    StartupStep,
    explain_failure,
    follow_steps,
    log_to_file,
    read_log,
)
from singletree.engines.weights.progress import Progress, no_progress
from singletree.errors import BadConfiguration, EngineFailed

OLDEST = (0, 5, 23)
"""The oldest version of SGLang that has the interface used here."""

_LOGGING = "SGLANG_LOGGING_CONFIG_PATH"
ARGUMENTS = ArgumentNames(
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
)
"""How SGLang names what singletree sets."""

STEPS = (
    StartupStep(r"Load weight begin", "SGLang: reads the weights"),
    StartupStep(r"Load weight end", "SGLang: has the weights, measures the memory that is left"),
    StartupStep(r"KV Cache is allocated|Memory pool end", "SGLang: has the prefix cache, warms up"),
    StartupStep(r"Capture cuda graph begin", "SGLang: captures CUDA graphs"),
)
"""What SGLang logs while it starts."""

LIMITS = (
    StartupLimit(
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "the weights leave no memory for the KV cache",
        "give `-- --mem-fraction-static 0.9`, a smaller or quantized model, or more GPUs with `-- --tp-size 2`",
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
"""Limits at which SGLang's start ends, by its own messages."""


def load_sglang(settings: EngineSettings, progress: Progress = no_progress) -> Any:
    """Start SGLang and return its ``Engine``. Blocks for as long as the model takes to load: call it in a thread.

    In a thread SGLang leaves the signal handlers of this process alone.

    Raises:
        BadConfiguration: SGLang is not installed or too old, or refuses an argument.
        EngineFailed: it did not start; the message has the limit and the cure.
    """
    sglang_version()
    log = log_to_file("sglang", _LOGGING)
    with contextlib.nullcontext() if log is None else follow_steps(log, STEPS, progress), _root_logger_kept():
        try:
            return _start(engine_arguments(settings, ARGUMENTS))
        except BadConfiguration:
            raise
        except Exception as error:
            text = "" if log is None else read_log(log)
            where = "" if log is None else f" (its log: {log})"
            reason = explain_failure(f"{text}\n{type(error).__name__}: {error}\n", LIMITS)
            raise EngineFailed(f"SGLang did not start: {reason}{where}") from error


def sglang_version() -> str:
    """Return the version of SGLang. Raises BadConfiguration when it is missing or too old."""
    cure = (
        "pip install 'singletree[sglang]', or run `python -m sglang.launch_server --model-path MODEL` elsewhere and "
        "give its address with --engine-url"
    )
    version = installed_version(("sglang",))
    if version is None:
        raise BadConfiguration(f"--engine sglang: SGLang is not installed here: {cure}")
    if tuple(int(part) for part in re.findall(r"\d+", version)[: len(OLDEST)]) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise BadConfiguration(
            f"--engine sglang: SGLang {version} is installed, {wanted} or newer is needed: {cure}"
        )
    return version


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


def _start(arguments: Sequence[str]) -> Any:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise BadConfiguration(f"SGLang refuses its arguments ({' '.join(arguments)}): {message}")

    parser = Parser(prog="sglang", add_help=False)
    ServerArgs.add_cli_args(parser)
    return Engine(server_args=ServerArgs.from_cli_args(parser.parse_args(list(arguments))))
