"""``RemoteEngine`` on vLLM finds out what a server serves, or says what is wrong with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.vllm_memory import LOST, MemoryAnswer, MemoryTransport, event, started
from engines.vllm_recording import URL, WINDOW, Exchange, vllm_engine
from singletree.errors import (
    BadConfiguration,
    EngineFailed,
    SingletreeError,
)
from singletree.remote.transport import ConnectionLost


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
    assert info.details == {
        "version": "0.32.0",
        "server": "vLLM",
        "endpoint": "/v1/completions",
        "reports_cached_tokens": None,
    }
    assert info.checkpoint == "smollm2-135m-hf"


async def test_an_adapter_has_its_parents_window() -> None:
    cards = models({"id": "lora", "parent": "a", "max_model_len": None}, {"id": "a", "max_model_len": 10})
    engine = await started(with_page("/v1/models", 200, cards))
    assert (engine.info().name, engine.info().context_window) == ("lora", 10)


@pytest.mark.parametrize(("status", "body"), [(404, b"no"), (200, b"<html>"), (200, b'{"version": 3}')])
async def test_a_hidden_version_is_no_reason_not_to_start(status: int, body: bytes) -> None:
    engine = await started(with_page("/version", status, body))
    assert (engine.info().details or {})["version"] is None


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        (401, Exchange.load("unauthorized").answer, BadConfiguration, "--engine-api-key"),
        (403, b"", BadConfiguration, "API key"),
        (503, b"loading", EngineFailed, "not ready"),
        (404, b"<html>", BadConfiguration, "vLLM does not run there"),
        (200, b"<html>", BadConfiguration, "vLLM does not run there"),
        (200, models(), BadConfiguration, "vLLM does not run there"),
        (200, models({"id": "gpt-5"}), BadConfiguration, "max_model_len"),
    ],
)
async def test_start_says_what_is_wrong(
    status: int, body: bytes, kind: type[SingletreeError], says: str
) -> None:
    transport = with_page("/v1/models", status, body)
    with pytest.raises(kind, match=says) as caught:
        await started(transport)
    assert URL in caught.value.message
    assert transport.closed == 1


def no_ids(**more: Any) -> bytes:
    """An event of a server that tells text alone, as llama.cpp's does."""
    choice = {"text": "x", "index": 0, "logprobs": None, "finish_reason": None, **more}
    return b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode()


NO_ENGINE: list[tuple[str, MemoryAnswer | Exception, type[SingletreeError], str]] = [
    ("text alone", MemoryAnswer(200, [no_ids(), b"data: [DONE]\n\n"]), BadConfiguration, "no token ids"),
    ("ids that are null", MemoryAnswer(200, [no_ids(token_ids=None)]), BadConfiguration, "no token ids"),
    ("not one id", MemoryAnswer(200, [event([], "length"), b""]), BadConfiguration, "returned no token id"),
    ("one body", MemoryAnswer(200, [json.dumps({"choices": []}).encode(), b""]), BadConfiguration, "no event stream"),
    ("a page", MemoryAnswer(200, [b"<html>\n</html>\n", b""]), BadConfiguration, "no event stream"),
    ("other events", MemoryAnswer(200, [b'data: {"choices": 3}\n\n']), BadConfiguration, "not a completion chunk"),
    ("no such path", MemoryAnswer(404, [b'{"error":{"message":"File Not Found"}}', b""]), BadConfiguration, "HTTP 404"),
    ("not implemented", MemoryAnswer(501, [b"", b""]), BadConfiguration, "HTTP 501"),
    ("no model", MemoryAnswer(400, [b'{"error":{"message":"no such API"}}', b""]), BadConfiguration, "no such API"),
    ("the key", MemoryAnswer(401, [b"", b""]), BadConfiguration, "--engine-api-key"),
    ("busy", MemoryAnswer(503, [b"", b""]), EngineFailed, "wait until the server is ready"),
    ("broken", MemoryAnswer(500, [b"boom", b""]), EngineFailed, "boom"),
    ("lost", LOST, EngineFailed, "lost"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "kind", "says"), [n[1:] for n in NO_ENGINE], ids=[n[0] for n in NO_ENGINE]
)
async def test_start_refuses_a_server_that_gives_no_token_ids(
    answer: MemoryAnswer | Exception, kind: type[SingletreeError], says: str
) -> None:
    transport = MemoryTransport()
    transport.probe = answer
    with pytest.raises(kind, match=says) as caught:
        await started(transport)
    assert caught.value.message.startswith(f"{URL}/v1/completions was asked for one token")
    assert kind is EngineFailed or "start it with `vllm serve" in caught.value.message
    assert transport.closed == 1


async def test_start_asks_for_one_token() -> None:
    transport = MemoryTransport()
    await started(transport)
    probed = transport.probed or {}
    assert (probed["prompt"], probed["max_tokens"], probed["return_token_ids"]) == ([0], 1, True)


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
        await vllm_engine(url, transport=transport).start()


@pytest.mark.parametrize(
    "url", ["", "vllm", "127.0.0.1:8000", "ftp://h", "http://", "/v1", "http://h:99999", "http://[::1"]
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(BadConfiguration, match="http://HOST:PORT"):
        vllm_engine(url)


@pytest.mark.parametrize("key", ["k\n", "schlüssel", "a\x00b"])
def test_a_key_that_no_header_can_hold(key: str) -> None:
    with pytest.raises(BadConfiguration, match="--engine-api-key has a line break") as caught:
        vllm_engine(api_key=key)
    assert key not in caught.value.message
