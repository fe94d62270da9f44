"""Model metadata in the shape that each client reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from singletree.protocols import models
from singletree.protocols.models import ModelInfo, Style

SMALL = ModelInfo("HuggingFaceTB/SmolLM2-135M-Instruct", 1_763_700_000, 8192, owned_by="local")
LARGE = ModelInfo(
    "qwen3",
    0,
    131_072,
    max_output_tokens=32_768,
    display_name="Qwen 3",
    description="Thinks.",
    input_modalities=("text", "image"),
    reasoning_efforts=("low", "high"),
    default_effort="high",
    instructions="Be brief.",
    tool_output_tokens=5000,
)
BOTH = [SMALL, LARGE]
IDS = [model.id for model in BOTH]


def encoded(style: Style, **query: str) -> dict[str, Any]:
    return json.loads(models.encode_models(BOTH, style, query))  # type: ignore[no-any-return]


def answering(data: bytes) -> httpx2.Client:
    headers = {"content-type": "application/json"}
    return httpx2.Client(
        transport=httpx2.MockTransport(lambda _: httpx2.Response(200, content=data, headers=headers))
    )


@pytest.mark.parametrize("style", ["openai", "anthropic", "codex"])
def test_golden(style: Style, golden: Callable[[str, bytes], None]) -> None:
    golden(f"models/{style}.json", models.encode_models(BOTH, style))
    golden(f"models/{style}_one.json", models.encode_model(LARGE, style))


@pytest.mark.parametrize(
    ("headers", "query", "style"),
    [
        ({}, {}, "openai"),
        ({"anthropic-version": "2023-06-01"}, {"limit": "1000"}, "anthropic"),
        ({}, {"client_version": "0.169.0"}, "codex"),
        ({"anthropic-version": "2023-06-01"}, {"client_version": "0.169.0"}, "codex"),
    ],
)
def test_the_style_follows_from_what_only_that_client_sends(
    headers: dict[str, str], query: dict[str, str], style: Style
) -> None:
    assert models.style(headers, query) == style


def test_openais_sdk_reads_the_list_and_one() -> None:
    sdk = openai.OpenAI(api_key="k", http_client=answering(models.encode_models(BOTH, "openai")))
    [small, large] = sdk.models.list().data
    assert (small.id, small.owned_by, small.object) == (SMALL.id, "local", "model")
    assert small.model_extra is not None
    window = ("context_window", "context_length", "max_model_len", "max_output_tokens")
    assert [small.model_extra[name] for name in window] == [8192] * 4
    assert large.model_extra is not None
    assert large.model_extra["max_output_tokens"] == 32_768
    sdk = openai.OpenAI(api_key="k", http_client=answering(models.encode_model(SMALL, "openai")))
    assert sdk.models.retrieve(SMALL.id) == small


def test_anthropics_sdk_reads_the_list_and_one() -> None:
    sdk = anthropic.Anthropic(api_key="k", http_client=answering(models.encode_models(BOTH, "anthropic")))
    page = sdk.models.list()
    assert [(m.id, m.type, m.display_name) for m in page.data] == [
        (SMALL.id, "model", SMALL.id),
        ("qwen3", "model", "Qwen 3"),
    ]
    assert f"{page.data[0].created_at:%Y-%m-%d %H:%M:%S %Z}" == "2025-11-21 04:40:00 UTC"
    assert (page.data[1].max_input_tokens, page.data[1].max_tokens) == (131_072, 32_768)
    assert (page.has_more, page.first_id, page.last_id) == (False, SMALL.id, "qwen3")
    sdk = anthropic.Anthropic(api_key="k", http_client=answering(models.encode_model(LARGE, "anthropic")))
    assert sdk.models.retrieve("qwen3") == page.data[1]


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ({"limit": "1000"}, IDS, False),
        ({"limit": "1"}, IDS[:1], True),
        ({"limit": "1", "after_id": IDS[0]}, IDS[1:], False),
        ({"after_id": IDS[1]}, [], False),
        ({"before_id": IDS[1]}, IDS[:1], False),
        ({"after_id": "gone"}, IDS, False),
        ({"limit": "0"}, IDS[:1], True),
        ({"limit": "x"}, IDS, False),
        ({"limit": "9" * 5000}, IDS, False),
        ({"limit": "²"}, IDS, False),
    ],
)
def test_anthropics_list_has_pages(query: dict[str, str], ids: list[str], has_more: bool) -> None:
    page = encoded("anthropic", **query)
    assert [m["id"] for m in page["data"]] == ids
    assert page["has_more"] is has_more
    assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


def test_an_auto_paging_client_sees_every_model_once() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        body = models.encode_models(BOTH, "anthropic", dict(request.url.params))
        return httpx2.Response(200, content=body, headers={"content-type": "application/json"})

    transport = httpx2.MockTransport(answer)
    sdk = anthropic.Anthropic(api_key="k", http_client=httpx2.Client(transport=transport))
    assert [m.id for m in sdk.models.list(limit=1)] == IDS


REQUIRED_BY_CODEX = {  # Found by deleting one field after the other.
    "slug": str,
    "display_name": str,
    "supported_reasoning_levels": list,
    "shell_type": str,
    "visibility": str,
    "supported_in_api": bool,
    "priority": int,
    "base_instructions": str,
    "support_verbosity": bool,
    "truncation_policy": dict,
    "experimental_supported_tools": list,
}


def test_codexs_catalog_has_every_field_that_codex_requires() -> None:  # C29
    catalog = encoded("codex")
    assert catalog["data"] == encoded("openai")["data"]
    for entry in catalog["models"]:
        assert {name: type(entry.get(name)) for name in REQUIRED_BY_CODEX} == REQUIRED_BY_CODEX
        assert entry["apply_patch_tool_type"] == "freeform"
        assert entry["base_instructions"]
    small, large = catalog["models"]
    assert (small["slug"], small["context_window"], small["priority"]) == (SMALL.id, 8192, 1)
    assert large["truncation_policy"] == {"mode": "tokens", "limit": 5000}
    assert [level["effort"] for level in large["supported_reasoning_levels"]] == ["low", "high"]
    assert (large["default_reasoning_level"], large["base_instructions"]) == ("high", "Be brief.")
    assert large["input_modalities"] == ["text", "image"]
