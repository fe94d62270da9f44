"""``--engine-url`` finds out what answers, and refuses what takes only text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from engines.wire_servers import DIALECTS, URL
from singletree.errors import BadConfiguration, EngineFailed
from singletree.remote import detection
from singletree.remote.detection import detect_server
from singletree.remote.servers import open_server
from singletree.remote.transport import ConnectionLost, StreamedResponse


class Pages:
    """A server of some pages."""

    def __init__(self, pages: dict[str, Any], status: int = 404) -> None:
        self.pages, self.status = pages, status
        self.asked: list[str] = []
        self.closed = 0

    async def open(self) -> None:
        """Nothing to open."""

    async def get(self, path: str) -> tuple[int, bytes]:
        self.asked.append(path)
        if path not in self.pages:
            return self.status, b"<html>no</html>"
        page = self.pages[path]
        return 200, page if isinstance(page, bytes) else json.dumps(page).encode()

    def post(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> StreamedResponse:
        raise AssertionError("nothing is generated to find out what answers")

    async def close(self) -> None:
        self.closed += 1


def models(**fields: Any) -> dict[str, Any]:
    return {"/v1/models": {"object": "list", "data": [{"id": "m", **fields}]}}


@pytest.mark.parametrize("name", list(DIALECTS))
async def test_every_server_is_known_by_its_own_pages(name: str) -> None:
    dialect = DIALECTS[name]
    pages = Pages(dict(dialect.pages))
    found = await open_server(await detect_server(URL, transport=pages))
    assert type(found) is dialect.server
    assert pages.closed == 1


@pytest.mark.parametrize(
    ("pages", "title"),
    [
        (models(owned_by="gateway") | {"/model_info": {"model_path": "m", "is_generation": True}}, "SGLang"),
        (models() | {"/get_model_info": {"model_path": "m", "is_generation": True}}, "SGLang"),
        ({"/props": {"default_generation_settings": {"n_ctx": 5}}}, "llama.cpp"),
        (models(max_model_len=4096), "vLLM"),
    ],
)
async def test_behind_a_gateway_other_pages_identify_the_server(pages: dict[str, Any], title: str) -> None:
    found = await open_server(await detect_server(URL, transport=Pages(pages)))
    assert found.title == title


@pytest.mark.parametrize(
    ("pages", "named", "cure"),
    [
        (models(owned_by="library"), "Ollama", "singletree serve --model FILE.gguf"),
        (models() | {"/api/version": {"version": "0.12"}}, "Ollama", "ollama show"),
        (models(owned_by="organization_owner"), "LM Studio", "llama-server"),
        (models() | {"/api/v0/models": {"data": []}}, "LM Studio", "llama-server"),
        (models(owned_by="system"), "hosted API", "vLLM, SGLang, TensorRT-LLM or llama-server"),
        (models(owned_by="openai"), "hosted API", "vLLM"),
    ],
)
async def test_a_server_that_takes_only_text_is_refused(pages: dict[str, Any], named: str, cure: str) -> None:
    transport = Pages(pages)
    with pytest.raises(BadConfiguration, match=named) as caught:
        await detect_server(URL, transport=transport)
    assert "takes only text" in caught.value.message
    assert cure in caught.value.message
    assert transport.closed == 1


@pytest.mark.parametrize("host", sorted(detection.HOSTS))
async def test_a_hosted_api_is_refused_before_the_key_is_sent(host: str) -> None:
    transport = Pages({})
    with pytest.raises(BadConfiguration, match=detection.HOSTS[host]):
        await detect_server(f"https://{host}/v1", "secret", transport=transport)
    assert transport.asked == []


@pytest.mark.parametrize(
    ("pages", "status", "kind", "says"),
    [
        ({}, 401, BadConfiguration, "API key"),
        ({}, 503, EngineFailed, "not ready"),
        ({}, 404, BadConfiguration, "vllm, sglang, tensorrt-llm, llama-server"),
        (models(), 404, BadConfiguration, "lists 'm'"),
        ({"/v1/models": b"<html>", "/props": b"[" * 100_000}, 404, BadConfiguration, "lists no models"),
        ({"/v1/models": b"\xff", "/props": b"[]", "/model_info": b'"x"'}, 404, BadConfiguration, "no models"),
    ],
)
async def test_it_says_what_is_wrong(
    pages: dict[str, Any], status: int, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says) as caught:
        await detect_server(URL, transport=Pages(pages, status))
    assert URL in str(caught.value)


async def test_nobody_answers() -> None:
    class Nobody(Pages):
        async def get(self, path: str) -> tuple[int, bytes]:
            raise ConnectionLost("it cannot be reached")

    transport = Nobody({})
    with pytest.raises(EngineFailed, match="cannot be reached"):
        await detect_server(URL, transport=transport)
    assert transport.closed == 1


@pytest.mark.parametrize("url", ["", "gpu:8000", "ftp://gpu", "http://"])
async def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(BadConfiguration, match="http://HOST:PORT"):
        await detect_server(url, transport=Pages({}))
