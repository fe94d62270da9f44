"""Model cards: an operator's description of a served model for its clients, beyond what the checkpoint contains.

A card is a TOML file (``--model-card``). How Codex treats a model that it does not know can also be inherited from an
entry of a catalog in Codex's format (``--codex-catalog``; ``singletree catalog --bundled`` writes the catalog that
comes with Codex), by name (``--codex-profile``).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from singletree.errors import BadConfiguration
from singletree.protocols.models import ModelInfo

_NOT_INHERITED = frozenset(
    {
        "slug",
        "display_name",
        "description",
        "visibility",
        "supported_in_api",
        "priority",
        "context_window",
        "max_context_window",
        "auto_compact_token_limit",
        "additional_speed_tiers",
        "service_tiers",
        "availability_nux",
        "upgrade",
        "comp_hash",
        "tool_mode",
        "use_responses_lite",
        "multi_agent_version",
        "multi_agent_reasoning_effort",
        "supports_reasoning_effort_updates",
        "node_repl_auto_review_required",
        "node_repl_disabled",
    }
)
"""Fields that describe the entry's own model or OpenAI's service; no other model inherits them."""


class Card(Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a card.

    Attributes:
        reasoning_efforts: the efforts that a request may name; by default those that the template knows.
        input_modalities: by default text, and image where the model gets pictures.
        instructions: Codex's base instructions; ``instructions_file`` is a path relative to the card.
        tool_output_tokens: how many tokens of a tool's output Codex keeps.
        codex: more fields of Codex's ``ModelInfo``, unchanged.
    """

    display_name: str = ""
    description: str | None = None
    reasoning_efforts: tuple[str, ...] | None = None
    default_effort: str | None = None
    input_modalities: tuple[str, ...] | None = None
    instructions: str = ""
    instructions_file: str = ""
    tool_output_tokens: int = 10_000
    codex: dict[str, Any] = {}

    def info(self, own: ModelInfo, profile: Mapping[str, Any]) -> ModelInfo:
        """Return ``own``, what the checkpoint and the settings give, with the fields of the card and of ``profile``."""
        efforts = self.reasoning_efforts
        return replace(
            own,
            display_name=self.display_name,
            description=self.description,
            input_modalities=self.input_modalities or own.input_modalities,
            reasoning_efforts=own.reasoning_efforts if efforts is None else efforts,
            default_effort=self.default_effort,
            instructions=self.instructions,
            tool_output_tokens=self.tool_output_tokens,
            codex={**profile, **self.codex},
        )


class _Catalog(Struct):
    models: list[dict[str, Any]]


def read_card(path: Path | None) -> Card:
    """Read the card at ``path``; without a path, return an empty one. Raises BadConfiguration."""
    if path is None:
        return Card()
    try:
        card = msgspec.convert(tomllib.loads(_read_text(path)), Card)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BadConfiguration(f"--model-card {path.name}: {error}") from None
    if card.instructions_file:
        text = _read_text(path.parent / card.instructions_file)
        return msgspec.structs.replace(card, instructions=text, instructions_file="")
    return card


def read_profiles(
    catalog: Path | None, wanted: Sequence[str], names: Sequence[str]
) -> dict[str, Mapping[str, Any]]:
    """Return the fields that each of ``names`` inherits from ``catalog``, a file in the format of Codex's.

    Args:
        wanted: ``NAME=SLUG``, or ``SLUG`` for the first of ``names``.

    Raises:
        BadConfiguration: the file cannot be read, has no such entry, or the model has no such name.
    """
    if not wanted:
        return {}
    if catalog is None:
        raise BadConfiguration(
            "--codex-profile needs --codex-catalog: write one with `singletree catalog --bundled`"
        )
    entries = _entries(catalog)
    inherited: dict[str, Mapping[str, Any]] = {}
    for each in wanted:
        name, slug = each.rsplit("=", 1) if "=" in each else (names[0], each)
        if slug not in entries:
            raise BadConfiguration(f"{catalog.name} has no {slug!r}; it has {', '.join(sorted(entries))}")
        if name not in names:
            raise BadConfiguration(
                f"--codex-profile names {name!r}, which is not a name of this model; its names are {', '.join(names)}"
            )
        inherited[name] = {key: value for key, value in entries[slug].items() if key not in _NOT_INHERITED}
    return inherited


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    try:
        found = msgspec.json.decode(_read_text(path), type=_Catalog).models
    except msgspec.DecodeError as error:
        raise BadConfiguration(f"--codex-catalog {path.name}: {error}") from None
    return {str(entry.get("slug")): entry for entry in found}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise BadConfiguration(f"cannot read {path}: {reason}") from None
