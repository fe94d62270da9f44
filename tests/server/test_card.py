"""Model cards, and what a model inherits from an entry of Codex's catalog."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from singletree.errors import BadConfiguration
from singletree.server.models.model import Card, read_card, read_profiles

from .serving import MODEL, serving

PROFILE = {
    "slug": "gpt-x",
    "display_name": "GPT-X",
    "priority": 9,
    "context_window": 1,
    "tool_mode": "code_mode_only",
    "base_instructions": "You are GPT-X.",
    "truncation_policy": {"mode": "tokens", "limit": 77},
    "support_verbosity": True,
}


def catalog(folder: Path) -> Path:
    path = folder / "catalog.json"
    path.write_text(json.dumps({"models": [PROFILE]}))
    return path


def test_a_card_is_read_with_the_instructions_beside_it(tmp_path: Path) -> None:
    (tmp_path / "base.md").write_text("Be brief.")
    path = tmp_path / "card.toml"
    lines = (
        'instructions_file = "base.md"',
        'reasoning_efforts = ["low", "high"]',
        "[codex]",
        "support_verbosity = true",
    )
    path.write_text("\n".join(lines))
    card = read_card(path)
    assert card.instructions == "Be brief."
    assert card.reasoning_efforts == ("low", "high")
    assert card.codex == {"support_verbosity": True}
    assert read_card(None) == Card()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a = ", "card.toml"), ("colour = 3", "colour"), ("tool_output_tokens = 'many'", "tool_output_tokens")],
)
def test_a_card_that_is_none_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "card.toml"
    path.write_text(text)
    with pytest.raises(BadConfiguration, match=expected):
        read_card(path)
    with pytest.raises(BadConfiguration, match="cannot read"):
        read_card(tmp_path / "none.toml")


def test_policy_is_inherited_and_what_is_the_others_own_is_not(tmp_path: Path) -> None:
    path = catalog(tmp_path)
    inherited = {key: PROFILE[key] for key in ("base_instructions", "truncation_policy", "support_verbosity")}
    assert read_profiles(path, ["gpt-x"], ["m", "n"]) == {"m": inherited}
    assert read_profiles(path, ["n=gpt-x"], ["m", "n"]) == {"n": inherited}
    assert read_profiles(path, [], ["m"]) == {}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [("gpt-y", "has no 'gpt-y'; it has gpt-x"), ("z=gpt-x", "not a name of this model; its names are m")],
)
def test_a_profile_that_is_none_is_refused(tmp_path: Path, wanted: str, expected: str) -> None:
    with pytest.raises(BadConfiguration, match=expected):
        read_profiles(catalog(tmp_path), [wanted], ["m"])
    with pytest.raises(BadConfiguration, match="needs --codex-catalog"):
        read_profiles(None, [wanted], ["m"])


async def test_codex_finds_every_name_of_the_model_and_others_the_first() -> None:  # C29
    card = Card(description="Local.", tool_output_tokens=500, codex={"apply_patch_tool_type": None})
    profiles = {"alias": {"truncation_policy": {"mode": "tokens", "limit": 77}, "priority_hint": 1}}
    async with serving(card=card, profiles=profiles) as served:
        entries = (await served.client.get("/v1/models?client_version=0.169.0")).json["models"]
        own, alias = entries
        assert (own["slug"], alias["slug"]) == (MODEL, "alias")
        assert own["truncation_policy"]["limit"] == 500
        assert alias["truncation_policy"]["limit"] == 77
        assert own["apply_patch_tool_type"] is alias["apply_patch_tool_type"] is None
        assert own["description"] == "Local."
        listed = (await served.client.get("/v1/models")).json["data"]
        assert [model["id"] for model in listed] == [MODEL]


async def test_efforts_are_those_of_the_template_unless_the_card_says_others() -> None:
    async with serving() as served:
        assert served.model.info().reasoning_efforts == ()
        with_efforts = replace(served.model, card=Card(reasoning_efforts=("low",), default_effort="low"))
        assert with_efforts.info().reasoning_efforts == ("low",)
        assert with_efforts.info().default_effort == "low"
