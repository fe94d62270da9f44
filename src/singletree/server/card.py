"""Model cards: what an operator says of a served model to its clients, beyond what the checkpoint tells.

A card is a TOML file (``--model-card``). What Codex should do with a model it does not know may also be inherited: from
an entry of a catalog of its own kind (``--codex-catalog``; ``singletree catalog --bundled`` writes the one that comes
with Codex), by name (``--codex-profile``).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from singletree.errors import BadConfiguration

_OWN_TRUTHS = frozenset(
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
"""What an entry says of its own model or of OpenAI's service, and no other model inherits."""


class Card(Struct, frozen=True, forbid_unknown_fields=True):
    """What a card may say.

    Attributes:
        reasoning_efforts: those that a request may name; by default those that the template knows.
        instructions: Codex's base instructions; ``instructions_file`` is read beside the card.
        tool_output_tokens: how much of a tool's output Codex keeps.
        codex: more fields of Codex's ``ModelInfo``, as they are.
    """

    display_name: str = ""
    description: str | None = None
    reasoning_efforts: tuple[str, ...] | None = None
    default_effort: str | None = None
    input_modalities: tuple[str, ...] = ("text",)
    instructions: str = ""
    instructions_file: str = ""
    tool_output_tokens: int = 10_000
    codex: dict[str, Any] = {}


class _Catalog(Struct):
    models: list[dict[str, Any]]


def read_card(path: Path | None) -> Card:
    """The card at ``path``; one that says nothing without a path.

    Raises:
        BadConfiguration: it cannot be read, or says what no card may.
    """
    if path is None:
        return Card()
    try:
        card = msgspec.convert(tomllib.loads(_text(path)), Card)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BadConfiguration(f"--model-card {path.name}: {error}") from None
    if card.instructions_file:
        text = _text(path.parent / card.instructions_file)
        return msgspec.structs.replace(card, instructions=text, instructions_file="")
    return card


def read_profiles(
    catalog: Path | None, wanted: Sequence[str], names: Sequence[str]
) -> dict[str, Mapping[str, Any]]:
    """What each name of the model inherits.

    Args:
        catalog: a file in the form of Codex's catalog.
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
                f"--codex-profile names {name!r}, which is no name of this model: {', '.join(names)}"
            )
        inherited[name] = {key: value for key, value in entries[slug].items() if key not in _OWN_TRUTHS}
    return inherited


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    try:
        found = msgspec.json.decode(_text(path), type=_Catalog).models
    except msgspec.DecodeError as error:
        raise BadConfiguration(f"--codex-catalog {path.name}: {error}") from None
    return {str(entry.get("slug")): entry for entry in found}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise BadConfiguration(f"cannot read {path}: {reason}") from None
