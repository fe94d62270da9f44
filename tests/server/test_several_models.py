"""Several models in one server: who answers, what one that does not start costs, and what each keeps for itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from singletree.errors import BadConfiguration, WeightsUnavailable
from singletree.server.http.app import App
from singletree.server.http.service import Service
from singletree.server.models import catalog as catalog_module
from singletree.server.models.catalog import Catalog, load_models
from singletree.server.models.model import Model, load_model
from singletree.server.settings.config import Config
from singletree.server.telemetry import Tracing

from .memory import Client, events
from .serving import body

PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
BIG = Config(engine="scripted", model_name=("big",), model_alias=("gpt-5.5", "claude-opus-*"))
SMALL = Config(
    engine="scripted", model_name=("small", "tiny"), model_alias=("claude-haiku-*",), context_window=4096
)
GONE = Config(engine="scripted", model="/srv/secret/gone.gguf", model_name=("gone",))


@asynccontextmanager
async def serving(*each: Config) -> AsyncIterator[tuple[Client, Catalog, list[str]]]:
    """A server of several models, and what its start reported."""
    lines: list[str] = []
    config = Config(each_model=each)
    catalog = await load_models(config, lines.append)
    try:
        yield Client(App(Service(config, catalog, Tracing()))), catalog, lines
    finally:
        await catalog.close()


async def listed(client: Client) -> list[str]:
    """The names in the list of models."""
    return [each["id"] for each in (await client.get("/v1/models")).json["data"]]


async def asked(client: Client, model: str, path: str = PATHS[0], **more: Any) -> Any:
    """The answer to a request for ``model``."""
    return await client.post(path, {**body(path, "hi"), "model": model, **more})


@pytest.mark.parametrize("path", [*PATHS, "/v1/completions"])
async def test_the_error_for_a_missing_model_names_the_models(path: str) -> None:
    async with serving(BIG, SMALL) as (client, _, _):
        asked = {name: value for name, value in body(path, "hi").items() if name != "model"}
        reply = await client.post(path, asked | ({"prompt": "hi"} if path == "/v1/completions" else {}))
        assert reply.status == 400
        assert "model is not given, and several are served: big, small" in reply.json["error"]["message"]


async def test_of_the_built_in_models_the_first_is_for_requests_that_name_none() -> None:
    catalog = await load_models(Config(each_model=(BIG, SMALL), built_in=True), lambda _: None)
    try:
        assert catalog.get("").name == "big"
    finally:
        await catalog.close()


async def test_without_the_first_of_the_built_in_models_there_is_no_server() -> None:
    later = replace(SMALL, load="lazy")
    with pytest.raises(WeightsUnavailable):
        await load_models(Config(each_model=(GONE, later), built_in=True), lambda _: None)


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_goes_to_the_model_that_it_names(path: str) -> None:
    async with serving(BIG, SMALL) as (client, catalog, _):
        assert await listed(client) == ["big", "small"]
        wanted = {
            "big": "big",
            "TINY": "small",
            "gpt-5.5": "big",
            "claude-opus-4-7[1m]": "big",
            "claude-haiku-4-5-20251001": "small",
        }
        assert {name: catalog.get(name).name for name in wanted} == wanted
        for name, model in wanted.items():
            answer = await asked(client, name, path)
            assert (answer.status, answer.json["model"]) == (200, name)
            count = f'singletree_generations_total{{model="{model}",reason="stop"}} '
            assert count in (await client.get("/metrics")).body.decode()
        unknown = await asked(client, "nope", path)
        assert unknown.status == 404
        assert "served: big, small" in unknown.body.decode()


async def test_any_name_is_for_one_of_them() -> None:
    async with serving(BIG, replace(SMALL, model_name=("small", "*"))) as (_, catalog, _):
        assert [catalog.get(name).name for name in ("big", "nope", "", "claude-opus-5")] == [
            "big",
            "small",
            "small",
            "big",
        ]


async def test_each_has_its_own_memory_and_metrics() -> None:
    async with serving(BIG, replace(SMALL, turn_memory=0)) as (client, catalog, _):
        big, small = catalog.get("big"), catalog.get("small")
        assert (big.memory is None, small.memory) == (False, None)
        assert big.prompt_cache is not small.prompt_cache
        assert (small.context_window, big.engine is small.engine) == (4096, False)
        for name in ("big", "small", "big"):
            assert (await asked(client, name, user="one session")).status == 200
        metrics = (await client.get("/metrics")).body.decode()
        assert 'singletree_prefix_courses_total{course="first",model="small"} 1.0' in metrics
        assert 'singletree_generations_total{model="big",reason="stop"} 2.0' in metrics
        assert 'singletree_generations_total{model="small",reason="stop"} 1.0' in metrics


async def states(client: Client) -> dict[str, list[str]]:
    """The states in which the metrics have each model."""
    page = (await client.get("/metrics")).body.decode()
    found = re.findall(r'singletree_model_state\{model="(.*)",state="(.*)"\} (\S+)', page)
    return {
        model: [state for name, state, value in found if (name, value) == (model, "1.0")]
        for model, _, _ in found
    }


async def test_the_metrics_have_the_state_of_each_model() -> None:
    lazy, idle = replace(SMALL, load="lazy"), replace(BIG, idle_unload=3600.0)
    async with serving(GONE, idle, lazy) as (client, catalog, _):
        assert await states(client) == {"gone": ["failed"], "big": ["loaded"], "small": ["lazy"]}
        assert (await asked(client, "small")).status == 200
        unloading = catalog.get("big").unloading
        assert unloading is not None
        await unloading._unload()
        assert await states(client) == {"gone": ["failed"], "big": ["unloaded"], "small": ["loaded"]}
        assert (await asked(client, "big")).status == 200
        assert (await states(client))["big"] == ["loaded"]


async def test_the_turns_of_a_model_are_not_those_of_another() -> None:
    async with serving(BIG, SMALL) as (client, catalog, _):
        text = (await asked(client, "big")).json["choices"][0]["message"]
        again = [{"role": "user", "content": "hi"}, text, {"role": "user", "content": "more"}]
        for name in ("small", "big"):
            assert (await asked(client, name, messages=again)).status == 200
        metrics = (await client.get("/metrics")).body.decode()
        assert 'singletree_replayed_turns_total{model="big"} 1.0' in metrics
        assert 'singletree_replayed_turns_total{model="small"} 0.0' in metrics
        assert catalog.get("big").memory is not catalog.get("small").memory


@pytest.mark.parametrize(("path", "status"), [*zip(PATHS, (503, 529, 503), strict=True)])
async def test_one_that_does_not_start_stops_no_other(path: str, status: int) -> None:
    async with serving(GONE, BIG) as (client, _, lines):
        assert [line for line in lines if line.startswith("WARNING")] == [
            "WARNING    gone did not start: no model at '/srv/secret/gone.gguf': check the path"
        ]
        assert await listed(client) == ["big"]
        assert (await asked(client, "big", path)).status == 200
        for stream in (False, True):
            refused = await asked(client, "gone", path, stream=stream)
            assert (refused.status, 0 < int(refused.headers["retry-after"]) <= 30) == (status, True)
            shown = refused.body.decode()
            assert "model 'gone' did not start: no model at" in shown
            assert "/gone.gguf" in shown
            assert "secret" not in shown
        assert (await client.get("/v1/models/gone")).status == 503


async def test_it_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = tmp_path / "t.jinja"
    monkeypatch.setattr(catalog_module, "RETRY_SECONDS", 0.0)
    async with serving(replace(SMALL, chat_template=template), BIG) as (client, _, _):
        assert (await asked(client, "small")).status == 503
        template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
        assert (await asked(client, "small")).status == 200
        assert await listed(client) == ["small", "big"]


async def test_without_any_model_there_is_no_server() -> None:
    with pytest.raises(WeightsUnavailable, match="no model at"):
        await load_models(Config(each_model=(GONE, replace(GONE, model_name=("gone too",)))), print)
    with pytest.raises(WeightsUnavailable, match="no model at"):
        await load_models(GONE, print)


async def test_two_of_one_name_are_not_mixed() -> None:
    unnamed = Config(engine="scripted")
    async with serving(unnamed, unnamed) as (client, _, lines):
        assert any("another model is already called 'scripted'" in line for line in lines)
        assert await listed(client) == ["scripted"]
        assert (await asked(client, "scripted")).status == 200


@pytest.mark.parametrize("first", ["start", "lazy"])
async def test_a_lazy_model_has_no_name_of_another(first: Any) -> None:
    one = replace(BIG, model_name=("big", "both"), load=first, context_window=4096)
    same, other = replace(one, load="lazy"), replace(one, load="lazy", model_name=("both", "other"))
    async with serving(one, same, other) as (client, catalog, lines):
        assert any("another model is already called 'big'" in line for line in lines)
        assert await listed(client) == ["big", "other"]
        for name in ("both", "other", "big"):
            assert (await asked(client, name)).status == 200
        assert [catalog.get(name).name for name in ("both", "other", "big")] == ["big", "other", "big"]
        assert await listed(client) == ["big", "other"]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models in the order in which they are loaded."""
    order: list[str] = []
    load = load_model

    async def loading(config: Config, *more: Any) -> Model:
        order.append(config.model_name[0])
        return await load(config, *more)

    monkeypatch.setattr("singletree.server.models.catalog.load_model", loading)
    return order


@pytest.mark.parametrize("path", PATHS)
async def test_a_lazy_model_is_loaded_by_its_first_request(path: str, loads: list[str]) -> None:
    async with serving(replace(SMALL, load="lazy"), BIG) as (client, _, lines):
        assert "model      small: loaded by its first request" in lines
        assert await listed(client) == ["small", "big"]
        shown = (await client.get("/v1/models/tiny")).json
        assert (shown["id"], shown["context_window"]) == ("small", 4096)
        assert loads == ["big"]
        both = await asyncio.gather(*(asked(client, "claude-haiku-4-5", path) for _ in range(2)))
        assert [answer.status for answer in both] == [200, 200]
        assert loads == ["big", "small"]
        assert await listed(client) == ["small", "big"]
        assert (await client.get("/v1/models/small")).json["context_window"] == 4096


async def test_a_request_waits_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, load = asyncio.Event(), load_model

    async def slow(config: Config, *more: Any) -> Model:
        await go_on.wait()
        return await load(config, *more)

    async with serving(BIG, replace(SMALL, load="lazy", hold_seconds=0)) as (client, catalog, _):
        monkeypatch.setattr("singletree.server.models.catalog.load_model", slow)
        refused = await asked(client, "small")
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        assert "'small' is being loaded" in refused.body.decode()
        go_on.set()
        [loading] = [task for task in asyncio.all_tasks() if "_load_now" in repr(task)]
        await loading
        assert not catalog.loads_later
        assert (await asked(client, "small")).status == 200


async def test_closing_ends_the_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(BIG, replace(SMALL, load="lazy", hold_seconds=0)) as (client, _, _):
        monkeypatch.setattr(
            "singletree.server.models.catalog.load_model", lambda *given: asyncio.Event().wait()
        )
        assert (await asked(client, "small")).status == 503
    assert len(asyncio.all_tasks()) == 1


async def test_an_unforeseen_fault_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*given: Any) -> Model:
        raise RuntimeError("/home/me is broken")

    async with serving(BIG, replace(SMALL, load="lazy")) as (client, _, _):
        monkeypatch.setattr("singletree.server.models.catalog.load_model", broken)
        refused = await asked(client, "small")
        assert (refused.status, "internal error" in refused.body.decode()) == (503, True)
        assert "/home" not in refused.body.decode()


async def test_a_wrong_card_of_a_lazy_model_is_its_failure(tmp_path: Path) -> None:
    lazy = replace(SMALL, load="lazy", model_card=tmp_path / "none.toml")
    async with serving(lazy, BIG) as (client, _, lines):
        assert any("small did not start" in line for line in lines)
        assert await listed(client) == ["big"]
    with pytest.raises(BadConfiguration):
        await load_models(lazy, print)


async def test_an_engine_that_rests_keeps_the_turns() -> None:
    async with serving(BIG, replace(SMALL, idle_unload=1)) as (client, catalog, _):
        message = (await asked(client, "small")).json["choices"][0]["message"]
        await _stop(catalog.get("small"))
        again = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "more"}]
        assert (await asked(client, "small", messages=again)).status == 200
        assert 'replayed_turns_total{model="small"} 1.0' in (await client.get("/metrics")).body.decode()


async def _stop(model: Model) -> None:
    """Let the time of rest pass at once."""
    engine: Any = model.engine
    while not hasattr(engine, "is_loaded"):
        engine = engine._engines[0] if hasattr(engine, "_engines") else engine._engine
    engine._begin_unloading()
    await engine._unloading
    assert not engine.is_loaded


async def test_streams_of_two_models_at_once() -> None:
    async with serving(BIG, SMALL) as (client, _, _):
        streams = [asked(client, name, PATHS[1], stream=True) for name in ("big", "small", "big")]
        answers = await asyncio.gather(*streams)
        assert [events(answer.body)[-1][0] for answer in answers] == ["message_stop"] * 3
