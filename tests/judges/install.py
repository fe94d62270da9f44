"""Installs the judges: test suites and load generators that other projects publish on the package indexes.

They go to ``$SINGLETREE_CACHE/judges`` (by default ``~/.cache/singletree/judges``). Nothing of them is copied into this
repository.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LLAMA, OPENAI, ANTHROPIC = "llama_cpp_python-0.3.36", "openai-3.52.0", "anthropic-2.11.0"
"""The source packages whose tests are run, by file name."""

SUITES = ("pytest", "pytest-asyncio", "pytest-xdist", "pytest-timeout", "filelock", "requests", "wget",
          "prometheus-client", "numpy", "inline-snapshot", "http-snapshot", "respx")  # fmt: skip
ABENCH = "agentic-bench==0.2.0"
GUIDELLM = "guidellm==0.8.1"
TORCH = "torch==2.13.0"
SCHEMATHESIS = "schemathesis==4.32.5"
CACHE_PRESSURE = "cache-pressure==0.6.3"
KVPROF = "kvprof==0.2.0"
TRAINING = ("rllm-model-gateway==0.1.0", "atif==1.8.0", "openenv==0.10.0", "renderers==0.1.12",
            "tokenizers==0.23.3", "numpy", "loguru")  # fmt: skip
TRAINERS = (TORCH, "trl==1.16.0", "transformers==5.8.0", "verl==0.9.1", "cachetools", "fastapi", "uvicorn")
SKYRL = "skyrl==0.3.0"


def folder() -> Path:
    """Return the folder of the judges."""
    cache = os.environ.get("SINGLETREE_CACHE") or Path.home() / ".cache" / "singletree"
    return Path(cache) / "judges"


def suites() -> Path:
    """Return the Python that runs the test suites and abench. It is installed when it is missing.

    Raises:
        CalledProcessError: pip failed.
    """
    pins = [name.replace("_", "-").replace("-", "==", 1) for name in (OPENAI, ANTHROPIC)]
    return _environment("suites", [*SUITES, *pins, ABENCH])


def guidellm() -> Path:
    """Return the Python that has guidellm and PyTorch. It is installed when it is missing (1.5 GB).

    Raises:
        CalledProcessError: pip failed.
    """
    return _environment("guidellm", [TORCH, GUIDELLM])


def schemathesis() -> Path:
    """Return the Python that has Schemathesis. It is installed when it is missing.

    Raises:
        CalledProcessError: pip failed.
    """
    return _environment("schemathesis", [SCHEMATHESIS])


def cache_pressure() -> Path:
    """Return the Python that has cache-pressure, which needs 3.12 or newer. It is installed when it is missing.

    Raises:
        CalledProcessError, FileNotFoundError: pip failed, or there is no python3.12.
    """
    made_by = sys.executable if sys.version_info >= (3, 12) else "python3.12"
    return _environment("cache-pressure", [CACHE_PRESSURE], made_by)


def kvprof() -> Path:
    """Return the Python that has kvprof. It is installed when it is missing.

    Raises:
        CalledProcessError: pip failed.
    """
    return _environment("kvprof", [KVPROF])


def training() -> Path:
    """Return the Python with the small judges of captured sessions. It is installed when it is missing.

    Raises:
        CalledProcessError: pip failed.
    """
    return _environment("training", [*TRAINING])


def trainers() -> Path:
    """Return the Python that has TRL and verl, with PyTorch. It is installed when it is missing (2 GB).

    Raises:
        CalledProcessError: pip failed.
    """
    return _environment("trainers", [*TRAINERS])


def skyrl() -> Path:
    """Return the folder of SkyRL's package, unpacked. It is fetched when it is missing.

    Raises:
        CalledProcessError: pip failed.
    """
    target = folder() / "skyrl"
    if not target.exists():
        _pip(training(), "install", "--no-deps", "--target", str(target), SKYRL)
    return target


def source(name: str) -> Path:
    """Return the folder of an unpacked source package, such as `LLAMA`. It is fetched when it is missing.

    Raises:
        CalledProcessError: pip failed.
    """
    target = folder() / name
    if not target.exists():
        package, _, version = name.rpartition("-")
        package = package.replace("_", "-")
        only = ["--no-deps", "--no-binary", package, "--dest", str(folder())]
        _pip(suites(), "download", *only, f"{package}=={version}")
        unpacked = folder() / "unpacked"
        unpacked.mkdir(exist_ok=True)
        subprocess.run(["tar", "-xzf", folder() / f"{name}.tar.gz", "-C", unpacked], check=True)
        (unpacked / name).rename(target)
    return target


def _environment(name: str, packages: list[str], made_by: str = sys.executable) -> Path:
    environment = folder() / name
    python = environment / "bin" / "python"
    ready = environment / ".packages"
    wanted = "\n".join(packages)
    if not ready.exists() or ready.read_text(encoding="utf-8") != wanted:
        print(f"Installing {', '.join(packages[-3:])} into {environment} ...", flush=True)
        folder().mkdir(parents=True, exist_ok=True)
        subprocess.run([made_by, "-m", "venv", environment], check=True)
        _pip(python, "install", *packages)
        ready.write_text(wanted, encoding="utf-8")
    return python


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
