"""``VllmEngine`` finds out what a server serves, or says what is wrong with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.vllm_memory import LOST, URL, MemoryTransport, started
from engines.vllm_recording import WINDOW, Exchange
from singletree.engines.vllm import VllmEngine
from singletree.engines.vllm_http import ConnectionLost
from singletree.errors import (
    BadConfiguration,
    EngineFailed,
    SingletreeError,
)


def with_page(path: str, status: int, body: bytes) -> MemoryTransport:
    transport = MemoryTransport()
    transport.pages[path] = Exchange("", b"", status, body)
    return transport


def models(*cards: dict[str, Any]) -> bytes:
    return json.dumps({"object": "list", "data": cards}).encode()


async def test_start_reads_what_the_server_serves() -> None:
    engine = await started(MemoryTransport(), slots=8)
    info = engine.info()
    assert (info.name, info.context_window, info.slots) == ("smollm2", WINDOW, 8)
    assert info.details == {"version": "0.32.0", "root": "smollm2-135m-hf", "tells_cached_tokens": None}


async def test_start_takes_the_model_that_is_named() -> None:
    cards = models({"id": "a", "max_model_len": 10}, {"id": "b", "max_model_len": 20})
    engine = await started(with_page("/v1/models", 200, cards), model="b")
    assert (engine.info().name, engine.info().context_window) == ("b", 20)


async def test_an_adapter_has_its_parents_window() -> None:
    cards = models({"id": "a", "max_model_len": 10}, {"id": "lora", "parent": "a", "max_model_len": None})
    engine = await started(with_page("/v1/models", 200, cards), model="lora")
    assert (engine.info().name, engine.info().context_window) == ("lora", 10)


@pytest.mark.parametrize(("status", "body"), [(404, b"no"), (200, b"<html>"), (200, b'{"version": 3}')])
async def test_a_hidden_version_is_no_reason_not_to_start(status: int, body: bytes) -> None:
    engine = await started(with_page("/version", status, body))
    assert (engine.info().details or {})["version"] is None


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        (401, Exchange.load("unauthorized").answer, BadConfiguration, "API key"),
        (403, b"", BadConfiguration, "API key"),
        (503, b"loading", EngineFailed, "not ready"),
        (404, b"<html>", BadConfiguration, "no vLLM server"),
        (200, b"<html>", BadConfiguration, "no vLLM server"),
        (200, models(), BadConfiguration, "no vLLM server"),
        (200, models({"id": "gpt-5"}), BadConfiguration, "max_model_len"),
        (200, models({"id": "other", "max_model_len": 5}), BadConfiguration, "it serves: other"),
    ],
)
async def test_start_says_what_is_wrong(
    status: int, body: bytes, kind: type[SingletreeError], says: str
) -> None:
    transport = with_page("/v1/models", status, body)
    wanted = "smollm2" if b"other" in body else None
    with pytest.raises(kind, match=says) as caught:
        await started(transport, model=wanted)
    assert URL in caught.value.message
    assert transport.closed == 1


async def test_start_without_a_server() -> None:
    transport = MemoryTransport()
    transport.lost = ConnectionLost("it cannot be reached")
    with pytest.raises(EngineFailed, match=r"http://vllm.test:8000.*cannot be reached.*vllm serve"):
        await started(transport)
    assert transport.closed == 1


@pytest.mark.parametrize("url", [URL, URL + "/", URL + "/v1", URL + "/v1/"])
async def test_forms_of_the_url(url: str) -> None:
    transport = MemoryTransport()
    transport.lost = LOST
    with pytest.raises(EngineFailed, match=rf"{URL}:"):
        await VllmEngine(url, transport=transport).start()


@pytest.mark.parametrize(
    "url", ["", "vllm", "127.0.0.1:8000", "ftp://h", "http://", "/v1", "http://h:99999", "http://[::1"]
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(BadConfiguration, match="http://HOST:PORT"):
        VllmEngine(url)


@pytest.mark.parametrize("key", ["k\n", "schlüssel", "a\x00b"])
def test_a_key_that_no_header_can_hold(key: str) -> None:
    with pytest.raises(BadConfiguration, match="API key") as caught:
        VllmEngine(URL, api_key=key)
    assert key not in caught.value.message
