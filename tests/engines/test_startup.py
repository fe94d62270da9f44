"""How the start of an engine is followed, and what is said when it fails; which GPUs and packages there are."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from singletree.engines.devices import Gpu, find_gpus, installed_version, processor_name
from singletree.errors import BadConfiguration
from singletree.in_process import sglang_startup, startup
from singletree.in_process.startup import (
    EnginePackage,
    EngineSettings,
    SavedCache,
    agent_arguments,
    engine_arguments,
    explain_failure,
    find_saved_cache,
    follow_steps,
    log_to_file,
    read_log,
)
from singletree.in_process.vllm_startup import PACKAGE

# As vLLM 0.32 writes them: vllm/v1/core/kv_cache_utils.py, v1/worker/utils.py, config/{model,parallel,device}.py.
MESSAGES = [
    (
        "ValueError: To serve at least one request with the model's max seq len (40960), (5.62 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (3.1 GiB). Based on the available memory, the estimated "
        "maximum model length is 22576. Try increasing `gpu_memory_utilization`",
        "--context-window 22576",
    ),
    (
        "ValueError: To serve at least one request with the model's max seq len (40960), (5.62 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (0.0 GiB). Try increasing",
        "smaller --context-window",
    ),
    ("ValueError: No available memory for the cache blocks. Try", "--tensor-parallel-size 2"),
    (
        "ValueError: Free memory on device cuda:0 (3.2/23.6 GiB) on startup is less than desired GPU memory "
        "utilization (0.92, 21.7 GiB). Decrease",
        "3.2 of the GPU's 23.6 GiB are free",
    ),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "quantized model"),
    (
        "Value error, World size (4) is larger than the number of available GPUs (2) in this node.",
        "--tensor-parallel-size 2",
    ),
    (
        "Value error, Total number of attention heads (14) must be divisible by tensor parallel size (4).",
        "divides 14",
    ),
    (
        "Value error, User-specified max_model_len (99999) is greater than the derived max_model_len "
        "(max_position_embeddings=8192.0 or model_max_length=None in model's config.json).",
        "--context-window 8192",
    ),
    ("RuntimeError: Failed to infer device type, please set", "nvidia-smi"),
    (
        "Exception: CPU Offloading is currently only supported on CUDA-alike and XPU GPUs",
        "leave --prefix-cache-path out",
    ),
    (
        "RuntimeError: Insufficient space in /dev/shm for CPU KV offload shared region in /dev/shm: 8192 MiB required, "
        "64 MiB free. Increase /dev/shm (e.g. --shm-size or --ipc=host).",
        "--shm-size",
    ),
    (
        "ValueError: Model architectures ['NewForCausalLM'] are not supported for now. Supported",
        "NewForCausalLM",
    ),
    ("RuntimeError: Cannot find any model weights with `/m`", "safetensors"),
    (
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0.",
        "--dtype half",
    ),
]


@pytest.mark.parametrize(("message", "cure"), MESSAGES, ids=[cure for _, cure in MESSAGES])
def test_a_limit_is_named_with_its_cure(message: str, cure: str) -> None:
    log = f"11-22 INFO 7 Starting to load model\n11-22 ERROR 7 EngineCore failed to start.\nTraceback\n{message}\n"
    assert cure in explain_failure(f"{log}RuntimeError: Engine core initialization failed.", PACKAGE.limits)


def test_an_unknown_failure_is_explained_by_the_last_errors() -> None:
    log = "INFO ok\nKeyError: 'a'\nmore\nsome.module.OddError: cannot do it\nOddError: cannot do it\n"
    explained = explain_failure(log, PACKAGE.limits)
    assert "cannot do it" in explained
    assert "KeyError: 'a'" in explained
    assert explain_failure("INFO nothing\n", PACKAGE.limits) == "its log names no cause"


def test_steps_are_reported_once_and_in_order(tmp_path: Path) -> None:
    log, explained = tmp_path / "log", list[str]()
    with follow_steps(log, PACKAGE.steps, lambda label, done, total: explained.append(label)):
        log.write_text(
            "INFO 1 Initializing a V1 LLM engine (v0.32)\nINFO 1 Starting to load model x\nINFO 1 Loading"
        )
        deadline = time.monotonic() + 10
        while len(explained) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        with log.open("a") as file:
            file.write(" weights took 2 s\nStarting to load model y\n")
    assert explained == [label for _, label in PACKAGE.steps[:3]]
    with follow_steps(tmp_path / "missing", [("x", "y")], lambda *_: None):
        pass
    assert read_log(tmp_path / "missing") == ""


def test_the_arguments_of_vllm() -> None:
    settings = EngineSettings("org/m", 1024, 3, ("--tensor-parallel-size", "4"))
    given = engine_arguments(settings, PACKAGE)
    assert given[:6] == ["--model", "org/m", "--max-model-len", "1024", "--max-num-seqs", "3"]
    assert given[-2:] == ["--tensor-parallel-size", "4"]
    assert "--enable-prefix-caching" in given
    assert given[given.index("--scheduling-policy") + 1] == "priority"


@pytest.mark.parametrize(
    ("argument", "left_out"),
    [
        ("--no-enable-prefix-caching", "--enable-prefix-caching"),
        ("--enable_prefix_caching", "--enable-prefix-caching"),
        ("--scheduling-policy=fcfs", "--scheduling-policy"),
        ('--structured-outputs-config={"backend": "guidance"}', "--structured-outputs-config.backend"),
        ("--structured-outputs-config.backend", "--structured-outputs-config.backend"),
    ],
)
def test_the_user_decides_against_a_default(argument: str, left_out: str) -> None:
    flags = [words[0] for words, _ in agent_arguments((argument,), PACKAGE.agent)]
    assert left_out not in flags
    assert len(flags) == len(agent_arguments((), PACKAGE.agent)) - 1


def test_what_singletree_sets_itself_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="--context-window"):
        engine_arguments(EngineSettings("m", arguments=("--max_model_len=7",)), PACKAGE)


def test_vllm_that_is_not_there_is_reported_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("singletree.in_process.startup.installed_version", lambda names: None)
    with pytest.raises(BadConfiguration, match=r"pip install 'singletree\[vllm\]'"):
        PACKAGE.load(EngineSettings("m"))
    monkeypatch.setattr("singletree.in_process.startup.installed_version", lambda names: "0.9.1")
    with pytest.raises(BadConfiguration, match=r"0\.9\.1 is installed, 0\.32 or newer"):
        PACKAGE.load(EngineSettings("m"))


def test_gpus(tmp_path: Path) -> None:
    def run(command: Sequence[str]) -> str:
        assert command[0] == "nvidia-smi"
        return "NVIDIA H100 80GB HBM3, 81559, 80994\nNVIDIA GB10, [N/A], [N/A]\n"

    device = tmp_path / "card0" / "device"
    device.mkdir(parents=True)
    (device / "mem_info_vram_total").write_text("1000\n")
    (device / "mem_info_vram_used").write_text("100\n")
    (tmp_path / "card0-DP-1").mkdir()
    assert find_gpus(run, tmp_path) == (
        Gpu("NVIDIA H100 80GB HBM3", 81559 * 2**20, 80994 * 2**20),
        Gpu("AMD GPU", 1000, 900),
    )
    assert find_gpus(lambda command: "", tmp_path / "none") == ()


def test_versions_and_the_processor() -> None:
    assert installed_version(("no-such-package", "pytest")) == pytest.__version__
    assert installed_version(("no-such-package",)) is None
    assert processor_name()


def test_what_an_engine_logs_in_this_process_goes_to_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("ENGINE_LOG", "")
    logger = logging.getLogger("engine_of_a_test")
    try:
        log = log_to_file("engine_of_a_test", "ENGINE_LOG")
        assert log is not None
        assert json.loads(Path(os.environ["ENGINE_LOG"]).read_text())["loggers"]
        logging.getLogger("engine_of_a_test.part").info("all arguments")
        assert "all arguments" in read_log(log)
        assert "all arguments" not in caplog.text
    finally:
        for handler in logger.handlers[:]:
            logger.removeHandler(handler)
            handler.close()


SAVED = SavedCache(Path("/kept/engine-1"), 5 * 10**9, 3 * 10**9)


@pytest.mark.parametrize(
    ("package", "flag", "parts"),
    [
        (PACKAGE, "--kv-transfer-config", ('"root_dir": "/kept/engine-1"', '"cpu_bytes_to_use": 3000000000')),
        (
            sglang_startup.PACKAGE,
            "--hicache-storage-backend-extra-config",
            ('"file_storage_path": "/kept/engine-1"', '"max_size": 5000000000'),
        ),
    ],
)
def test_an_engine_gets_the_folder_of_its_saved_cache(
    package: EnginePackage, flag: str, parts: tuple[str, ...]
) -> None:
    given = engine_arguments(EngineSettings("org/m", saved=SAVED), package)
    value = given[given.index(flag) + 1]
    assert all(each in value for each in parts)
    assert json.loads(value)
    assert flag not in engine_arguments(EngineSettings("org/m"), package)
    for word in (flag, f"{flag}.a"):
        with pytest.raises(BadConfiguration, match=f"{flag} by itself: leave one of both out"):
            engine_arguments(EngineSettings("org/m", arguments=(word, "{}"), saved=SAVED), package)


def test_no_variable_leads_sglang_to_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EngineSettings("org/m", saved=SAVED)
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "/elsewhere")
    engine_arguments(EngineSettings("org/m"), sglang_startup.PACKAGE)
    with pytest.raises(BadConfiguration, match="sets SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR by itself"):
        engine_arguments(settings, sglang_startup.PACKAGE)


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (
            "ValueError: Not enough host memory available. Requesting 64.00 GB but only have 27.50 GB free. Please",
            "smaller --prefix-cache-limit",
        ),
        ("RuntimeError: cudaHostRegister failed (rc=2, out of memory) at", "smaller --prefix-cache-limit"),
        ("AssertionError: Torch not compiled with CUDA enabled", "leave --prefix-cache-path out"),
    ],
)
def test_why_sglang_has_no_memory_on_the_way_to_the_disk(error: str, cure: str) -> None:
    log = f'  File "common.py", line 180, in _cuda_host_register\n{error}\n'
    assert cure in explain_failure(log, sglang_startup.PACKAGE.limits)


def test_whatever_changes_the_saved_cache_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Gpu("H100", 1)]
    monkeypatch.setattr(startup, "find_gpus", lambda: gpus)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "README.md").write_text("about it")
    root = tmp_path / "saved"

    def folder(engine: str = "vllm-1", *arguments: str, window: int | None = None) -> Path:
        return find_saved_cache(root, 10, model, engine, arguments, window).folder

    first = folder()
    assert first.stat().st_mode & 0o777 == root.stat().st_mode & 0o777 == 0o700
    (model / "README.md").write_text("about it, again")
    assert folder() == first
    (model / "model.safetensors").write_bytes(b"Weights")
    found = {first, folder(), folder("vllm-2"), folder("vllm-1", "--dtype", "half"), folder(window=4096)}
    gpus = [Gpu("B200", 1)]
    found.add(folder())
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    found.add(folder())
    assert len(found) == 7


def test_the_ports_of_kv_events_do_not_change_the_folder(tmp_path: Path) -> None:
    folders = {
        find_saved_cache(tmp_path / "saved", 10, tmp_path, "vllm-1", ("--dtype", "half", *events)).folder
        for events in ((), ("--kv-events-config", "1"), ("--kv-events-config", "2"))
    }
    assert len(folders) == 1


def test_the_oldest_files_of_a_saved_cache_go_first_whoever_wrote_them(tmp_path: Path) -> None:
    model, root = tmp_path / "model", tmp_path / "saved"
    model.mkdir()
    saved = find_saved_cache(root, 25, model, "vllm-1", ())
    other = root / "sglang-0.5+cu130-0123456789abcdef" / "abc"
    other.mkdir(parents=True)
    files = [other / "1.bin.tmp", saved.folder / "2.bin", saved.folder / "3.bin"]
    for age, file in enumerate(files):
        file.write_bytes(b"0123456789")
        os.utime(file, (age, age))
    config = saved.folder / "config.json"
    config.write_text("{}")
    saved.trim()
    assert [file.exists() for file in (*files, config)] == [False, True, True, True]
    saved.trim()
    assert all(file.exists() for file in files[1:])


def test_files_of_a_model_that_cannot_be_read(tmp_path: Path) -> None:
    model, root = tmp_path / "model", tmp_path / "saved"
    (model / "onnx.bin").mkdir(parents=True)
    (model / "gone.json").symlink_to(tmp_path / "nothing")
    find_saved_cache(root, 1, model, "vllm-1", ())  # Neither is a file of weights.
    with pytest.raises(BadConfiguration, match="/none: No such file or directory"):
        find_saved_cache(root, 1, model / "none", "vllm-1", ())


def test_files_of_others_in_the_folder_of_saved_caches_stay(tmp_path: Path) -> None:
    model, root = tmp_path / "model", tmp_path / "saved"
    model.mkdir()
    own = find_saved_cache(root, 5, model, "vllm-1", ())
    files = [root / "pytorch_model.bin", root / "vllm-1" / "1.bin", root / "models" / "a" / "model.bin"]
    for file in (*files, own.folder / "1.bin"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"0123456789")
    own.trim()
    assert [file.exists() for file in files] == [True, True, True]
    assert not (own.folder / "1.bin").exists()


def test_a_folder_that_others_may_write_into_holds_no_cache(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(BadConfiguration, match="chmod 700"):
        find_saved_cache(tmp_path, 1, tmp_path, "vllm-1", ())
