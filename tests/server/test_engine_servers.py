"""Several servers at --engine-url: each is looked at on its own, and all have to serve the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.wire_servers import DIALECTS, DialectTransport, remote_engine
from singletree.engines.checkpoint import Checkpoint
from singletree.engines.progress import no_progress
from singletree.errors import BadConfiguration, EngineFailed
from singletree.model_files import resolve as weights
from singletree.remote import detection
from singletree.remote import servers as engine_servers
from singletree.remote.engine import RemoteEngine
from singletree.remote.servers import EngineServers
from singletree.server.models import model_source
from singletree.server.settings.config import Config

from .test_config import read

CHECKPOINT = Checkpoint("org/m", Path("/nowhere"), 4096, ())


class Network:
    """Servers by URL: the name of a dialect, and the checkpoint that it reports; None where nobody answers."""

    def __init__(self, **servers: tuple[str, str] | None) -> None:
        self.servers = servers
        self.made: list[RemoteEngine] = []

    def _dialect(self, url: str) -> tuple[str, str]:
        found = self.servers[url.partition("//")[2]]
        if found is None:
            raise EngineFailed(f"no answer from {url}")
        return found

    async def detect(self, url: str, key: str | None) -> Any:
        """See ``detect_server``."""
        return DIALECTS[self._dialect(url)[0]].server()

    async def open(self, kind: Any) -> Any:
        """See ``open_server``; ``detect`` finds the server itself."""
        return kind

    def engine(self, server: Any, url: str, **settings: Any) -> RemoteEngine:
        """See ``RemoteEngine``."""
        name, checkpoint = self._dialect(url)
        transport = DialectTransport(DIALECTS[name])
        page = {"data": [{"id": "m", "root": checkpoint, "max_model_len": 512, "owned_by": "x"}]}
        info = {"version": "1", "model_path": checkpoint, "max_running_requests": 8}
        pages = {**transport.dialect.pages, "/v1/models": page, "/server_info": info}
        transport.dialect = replace(transport.dialect, pages=pages)
        made = remote_engine(transport)
        self.made.append(made)
        return made


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    made = Network()
    monkeypatch.setattr(detection, "detect_server", made.detect)
    monkeypatch.setattr(engine_servers, "open_server", made.open)
    monkeypatch.setattr(engine_servers, "RemoteEngine", made.engine)
    monkeypatch.setattr(weights, "resolve", lambda model, **_: CHECKPOINT)
    return made


def servers_at(*names: str) -> EngineServers:
    return EngineServers(Config(engine_url=tuple(f"http://{name}" for name in names)))


async def test_servers_of_different_kinds_are_one_model(network: Network) -> None:
    network.servers = {"a": ("vllm-completions", "org/m"), "b": ("sglang-incremental", "/models/M")}
    config = Config(engine_url=("http://a", "http://b"))
    found = await model_source.find_model_source(config, no_progress)
    assert found.names == ("m", "org/m")
    assert found.engine == "vLLM at http://a, SGLang at http://b"
    await found.close()


async def test_different_models_are_refused_by_their_names(network: Network) -> None:
    network.servers = {"a": ("vllm-completions", "org/one"), "b": ("vllm-completions", "org/two")}
    with pytest.raises(BadConfiguration) as caught:
        await servers_at("a", "b").start()
    for word in ("org/one", "http://a", "org/two", "http://b"):
        assert word in caught.value.message
    assert all(engine._transport.closed for engine in network.made)  # type: ignore[attr-defined]


async def test_one_that_is_down_comes_later(network: Network) -> None:
    network.servers = {"a": None, "b": ("vllm-completions", "org/m")}
    servers = servers_at("a", "b")
    info = await servers.start()
    assert info.checkpoint == "org/m"
    assert [worker.state for worker in servers.workers] == ["down", "up"]
    await servers.complete(CHECKPOINT)
    network.servers["a"] = ("sglang-incremental", "org/m")
    engine: Any = servers.workers[0].engine
    await engine.revive()
    assert (engine.info().slots, servers.title) == (4, "SGLang at http://a, vLLM at http://b")
    await servers.close()


async def test_another_model_that_comes_later_stays_out(network: Network) -> None:
    network.servers = {"a": None, "b": ("vllm-completions", "org/m")}
    servers = servers_at("a", "b")
    await servers.start()
    await servers.complete(CHECKPOINT)
    network.servers["a"] = ("vllm-completions", "org/other")
    engine: Any = servers.workers[0].engine
    with pytest.raises(BadConfiguration, match="org/other"):
        await engine.revive()
    await servers.close()


async def test_none_that_answers(network: Network) -> None:
    network.servers = {"a": None, "b": None}
    with pytest.raises(EngineFailed, match="no answer from http://a"):
        await servers_at("a", "b").start()


def test_urls_by_commas_and_several_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--engine-url", "http://a,http://b", "--engine-url", "http://c", "--router-mode", "round-robin"]
    config = read(*flags, "--migration-limit", "7")
    assert config.engine_url == ("http://a", "http://b", "http://c")
    assert (config.router_mode, config.migration_limit) == ("round-robin", 7)
    assert read("--engine-url", "http://a").engine_url == ("http://a",)
    file = tmp_path / "settings.toml"
    file.write_text('engine-url = ["http://a", "http://b"]\n')
    assert read("--config", str(file)).engine_url == ("http://a", "http://b")
    file.write_text('engine-url = "http://a"\n')
    assert read("--config", str(file)).engine_url == ("http://a",)
    monkeypatch.setenv("SINGLETREE_ENGINE_URL", "http://d,http://e")
    assert read().engine_url == ("http://d", "http://e")


def test_an_endpoint_of_events_for_each_engine() -> None:
    config = read("--engine-url", "http://a,http://b", "--kv-events", ",tcp://b:5557")
    assert config.kv_events == ("", "tcp://b:5557")
    with pytest.raises(BadConfiguration, match="--kv-events has 1 endpoints for 2 engines"):
        Config(engine_url=("http://a", "http://b"), kv_events=("tcp://a:1",))
