"""What a client is told when it takes the wrong way in."""

from __future__ import annotations

import pytest

from singletree import __version__
from singletree.server.answers.tracing import Tracing
from singletree.server.http.app import App, plain_path
from singletree.server.http.routes import Service
from singletree.server.models.config import Config
from singletree.server.models.served_models import load_models

from .memory import Client
from .serving import MODEL, body, serving
from .test_app import PATHS, each_protocol, error_of, said


async def test_a_wrong_method_is_told_the_right_one() -> None:
    async with serving() as served:
        answer = await served.client.get("/v1/messages")
    assert answer.status == 405
    assert "GET is not supported on /v1/messages; send POST" in answer.body.decode()


BASES = ["/anthropic", "/v1", "/anthropic/v1", "/openai", "/openai/v1", "/api", "/", "//"]


@each_protocol
@pytest.mark.parametrize("base", BASES)
async def test_a_base_url_with_too_much_in_it_leads_to_the_same_route(path: str, base: str) -> None:
    async with serving() as served:
        reply = await served.client.post(base + path, body(path, "[[echo:yes]]"))
        wrong = await served.client.post(base + path, b"{")
    assert (reply.status, said(path, reply)) == (200, "yes")
    assert error_of(path, wrong)[0] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("/", "/"),
        ("", "/"),
        ("/anthropic", "/"),
        ("/anthropic/", "/"),
        ("/anthropic/api/hello", "/api/hello"),
        ("/api/hello", "/api/hello"),
        ("/v1/v1/v1/models", "/v1/models"),
        ("/anthropic//v1/messages", "/v1/messages"),
        ("/v1/models/v1/v1/x", "/v1/models/v1/v1/x"),
        ("/v1/models/anthropic/v1/x", "/v1/models/anthropic/v1/x"),
        ("/anthropics/v1/messages", "/anthropics/v1/messages"),
    ],
)
def test_plain_paths(path: str, plain: str) -> None:
    assert plain_path(path) == plain


async def test_other_routes_below_a_base_url() -> None:
    async with serving() as served:
        assert (await served.client.request("HEAD", "/anthropic")).status == 200
        assert (await served.client.get("/anthropic/v1/models")).json["data"][0]["id"] == MODEL
        counted = await served.client.post(
            "/v1/v1/messages/count_tokens", {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        )
        assert counted.json["input_tokens"] > 0


async def test_a_forgotten_version_is_named() -> None:
    async with serving() as served:
        for path in PATHS:
            lost = await served.client.post(path.removeprefix("/v1"), body(path, "x"))
            assert lost.status == 404
            assert "begin with /v1" in lost.body.decode()
        assert "begin with" not in (await served.client.get("/nowhere")).body.decode()


async def test_the_version_is_told_without_a_key() -> None:
    async with serving(config=Config(api_key=("k",))) as served:
        assert (await served.client.get("/version")).json == {"version": __version__}


@each_protocol
@pytest.mark.parametrize("named", ["gpt-5", "claude-opus-4-5[1m]", "org/a b", "\u00e9"])
async def test_any_name_will_do_where_that_is_said(path: str, named: str) -> None:
    config = Config(engine="scripted", model_name=("own", "*"))
    loaded = await load_models(config, lambda line: None)
    try:
        client = Client(App(Service(config, loaded, Tracing())))
        reply = await client.post(path, body(path, "[[echo:yes]]") | {"model": named})
        listed = (await client.get("/v1/models")).json["data"]
        found = await client.get("/v1/models/gpt-5")
        nameless = await client.post(path, body(path, "x") | {"model": ""})
    finally:
        await loaded.close()
    assert (reply.status, said(path, reply), reply.json["model"]) == (200, "yes", named)
    assert ([model["id"] for model in listed], found.json["id"]) == (["own"], "own")
    assert nameless.status == 400


async def test_the_models_own_name_is_shown_where_any_will_do() -> None:
    loaded = await load_models(Config(engine="scripted", model_name=("*",)), lambda line: None)
    try:
        assert loaded.models[0].name == "scripted"
        assert loaded.get("gpt-5") is loaded.models[0]
    finally:
        await loaded.close()
