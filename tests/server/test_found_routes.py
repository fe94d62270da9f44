"""What a client is told when it takes the wrong way in."""

from __future__ import annotations

import pytest
from starlette.types import Receive, Scope, Send

from singletree import __version__
from singletree.server.http.app import App, plain_path
from singletree.server.http.service import Service
from singletree.server.models.catalog import load_models
from singletree.server.settings.config import Config
from singletree.server.telemetry import Tracing

from .memory import Client
from .serving import MODEL, body, serving
from .test_app import PATHS, each_protocol, error_of, text_of


async def test_the_error_for_a_wrong_method_names_the_right_one() -> None:
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
    assert (reply.status, text_of(path, reply)) == (200, "yes")
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


OWN = ["/metrics", "/health", "/version", "/inspect/api/sessions", "/v1/singletree/sessions"]
"""Routes that a reverse proxy may have a rule for."""


def _spellings(path: str) -> list[str]:
    """Other paths that some server somewhere takes for ``path``."""
    name = path[1:]
    return [
        *(base + path for base in BASES),
        *(
            f"{start}{name}"
            for start in ("/%2f", "/./", "/%2e/", "/x/../", "/x/%2e%2e/", "/;/", "\\", "/%5c", "/%00/")
        ),
        *(path + end for end in ("/", "//", "/.", ";x", "%20", "%00", "%3f", "%23", "%2f", ".")),
        f"/%{ord(name[0]):x}{name[1:]}",
        f"/%25{ord(name[0]):x}{name[1:]}",
        f"/{name[:-1]}%{ord(name[-1]):X}",
        path.upper(),
        path.replace("s", "\u017f"),
    ]


@pytest.mark.parametrize("path", OWN)
async def test_a_route_that_is_no_api_has_one_spelling(path: str) -> None:
    async with serving(config=Config(inspect=True)) as served:
        assert (await served.client.get(path)).status == 200
        found = [each for each in _spellings(path) if each != path]
        answers = {each: (await served.client.get(each)).status for each in found}
    # A path below the sessions or the models is the name of one, which is not found.
    assert {each: status for each, status in answers.items() if status != 404} == {}


@each_protocol
async def test_an_escape_in_a_fixed_path_is_another_path(path: str) -> None:
    async with serving() as served:
        for other in (
            path.replace("m", "%6d").replace("p", "%70"),
            path.replace("/v1/", "/v1%2f"),
            f"/%2f{path}",
        ):
            assert (await served.client.post(other, body(path, "x"))).status == 404


async def test_ids_may_be_escaped() -> None:
    async with serving() as served:
        for id in ("org/test-model", "org%2Ftest-model", "org%2ftest%2Dmodel", "%6frg/test-model"):
            assert (await served.client.get(f"/v1/models/{id}")).json["id"] == MODEL
        missing = await served.client.get("/v1/models/100%2525")
        assert "'100%25'" in missing.body.decode()


async def test_a_server_without_a_raw_path_is_understood() -> None:
    async with serving() as served:

        async def without(scope: Scope, receive: Receive, send: Send) -> None:
            await served.client.app({key: scope[key] for key in scope if key != "raw_path"}, receive, send)

        client = Client(without)
        assert (await client.get("/v1/models/org%2Ftest-model")).json["id"] == MODEL
        assert "'100%25'" in (await client.get("/v1/models/100%2525")).body.decode()


async def test_a_forgotten_version_is_named() -> None:
    async with serving() as served:
        for path in PATHS:
            lost = await served.client.post(path.removeprefix("/v1"), body(path, "x"))
            assert lost.status == 404
            assert "begin with /v1" in lost.body.decode()
        assert "begin with" not in (await served.client.get("/nowhere")).body.decode()


async def test_the_version_is_reported_without_a_key() -> None:
    async with serving(config=Config(api_key=("k",))) as served:
        assert (await served.client.get("/version")).json == {"version": __version__}


@each_protocol
@pytest.mark.parametrize("named", ["gpt-5", "claude-opus-4-5[1m]", "org/a b", "\u00e9"])
async def test_any_name_is_accepted_where_configured(path: str, named: str) -> None:
    config = Config(engine="scripted", model_name=("own", "*"))
    loaded = await load_models(config, lambda line: None)
    try:
        client = Client(App(Service(config, loaded, Tracing())))
        reply = await client.post(path, body(path, "[[echo:yes]]") | {"model": named})
        listed = (await client.get("/v1/models")).json["data"]
        found = await client.get("/v1/models/gpt-5")
        nameless = await client.post(path, body(path, "[[echo:yes]]") | {"model": ""})
    finally:
        await loaded.close()
    assert (reply.status, text_of(path, reply), reply.json["model"]) == (200, "yes", named)
    assert ([model["id"] for model in listed], found.json["id"]) == (["own"], "own")
    assert (nameless.status, text_of(path, nameless), nameless.json["model"]) == (200, "yes", "own")


async def test_the_models_own_name_is_shown_where_any_will_do() -> None:
    loaded = await load_models(Config(engine="scripted", model_name=("*",)), lambda line: None)
    try:
        assert loaded.models[0].name == "scripted"
        assert loaded.get("gpt-5") is loaded.models[0]
    finally:
        await loaded.close()
