"""A trainer changes the weights of a real vLLM that serves a captured session: ``make engines``."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.served import running
from engines import real_vllm
from singletree.training.graph import check_session, read_session

pytestmark = pytest.mark.engines

LONG = " ".join(f"number {at}" for at in range(120))  # more than vLLM's block of 128 tokens


@pytest.fixture(scope="module", params=["--enable-scale-out", ""], ids=["generate", "completions"])
def urls(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, Path]]:
    """A server that captures, the vLLM behind it, and the folder of the sessions."""
    folder = tmp_path_factory.mktemp("weights")
    flags = [request.param] if request.param else []
    _, model = real_vllm.install()
    with real_vllm.running(*flags, dev_mode=True) as vllm:
        port = real_vllm.free_port()
        given = ["--engine-url", vllm.url, "--model", str(model), "--capture", str(folder / "sessions")]
        with running([*given, "--store-path", str(folder / "store.sqlite")], port, folder / "output.txt"):
            yield f"http://127.0.0.1:{port}", vllm.url, folder / "sessions"


def _post(url: str, sent: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(sent).encode(), {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=120)


def _state(url: str, path: str, sent: dict[str, Any] | None = None) -> dict[str, Any]:
    with _post(url + path, sent or {}) if sent is not None else urllib.request.urlopen(url + path) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _chat(url: str, session: str, text: str, **more: Any) -> Any:
    sent = {"model": "smollm2", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}
    return _post(f"{url}/sessions/{session}/v1/chat/completions", sent)


def test_a_turn_that_is_held_has_both_versions(urls: tuple[str, str, Path]) -> None:
    url, vllm, folder = urls
    _state(url, "/update_weight_version", {"new_version": "v1"})
    assert _state(vllm, "/weight_info") == {"weight_version": "v1"}
    with _chat(url, "held", "Tell a story.", stream=True, max_tokens=400, ignore_eos=True) as answer:
        for _ in range(20):
            answer.readline()
        assert _state(url, "/pause?mode=keep", {})["is_paused"]
        assert _state(vllm, "/is_paused") == {"is_paused": True}
        time.sleep(1)
        _state(url, "/update_weight_version", {"new_version": "v2"})
        assert _state(url, "/resume", {})["weight_version"] == "v2"
        assert b"[DONE]" in answer.read()
    graph = read_session(folder / "held.jsonl")
    assert check_session(graph) == []
    [call] = graph.calls.values()
    assert call.end is not None
    [(first, start, middle), (second, again, end)] = call.end.weights
    print(f"v1 {start}-{middle}, v2 {again}-{end}")
    assert (first, second, start, end) == ("v1", "v2", 0, len(call.completion))
    assert 0 < middle == again < end


def test_no_prefix_of_old_weights_is_used(urls: tuple[str, str, Path]) -> None:
    url, _, _ = urls
    cached = []
    for version in ("a", None, "b", None, "a"):
        if version:
            _state(url, "/update_weight_version", {"new_version": version})
        with _chat(url, "prefix", LONG) as answer:
            cached.append(json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])
    print(f"cached tokens: {cached}")
    assert [bool(count) for count in cached] == [False, True, False, True, False]


def test_a_turn_ends_before_a_pause(urls: tuple[str, str, Path]) -> None:
    url, vllm, folder = urls
    with _chat(url, "ended", "Tell a story.", stream=True, max_tokens=60, ignore_eos=True) as answer:
        answer.readline()
        assert _state(url, "/pause", {})["running"] == 0
        assert _state(vllm, "/is_paused") == {"is_paused": False}
        assert b"[DONE]" in answer.read()
    _state(url, "/resume", {})
    [call] = read_session(folder / "ended.jsonl").calls.values()
    assert len(call.completion) == 60
