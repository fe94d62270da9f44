"""Reads the sampling that a checkpoint's authors recommend: ``generation_config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

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
