"""Codex behaves with singletree as with its native backend: catalog, transports, compaction, tools, sessions."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from clients.codex import WEBSOCKETS, Codex, Ran, sign_in
from clients.conftest import Flags, Workspace
from clients.harness import SINGLETREE
from clients.scripts import HERMES, Style, think
from clients.served import MODEL, Server
from singletree.prompts.template.content import NO_IMAGES

COMMAND = ("exec_command", {"cmd": "echo product-$((6 * 7))"})
PRINTED = "product-42"
ANSWER = "It printed product-42."
HERE = Path(__file__).parent
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
"""A picture of one pixel."""

Start = Callable[..., Codex]


@pytest.fixture
def start(server: Callable[[Style, Flags], Server], workspace: Workspace, tmp_path: Path) -> Start:
    """Codex with a home of its own, on the server with these flags."""
    home = tmp_path / "home"
    home.mkdir()
    return lambda *flags: Codex(server(HERMES, flags), workspace, home)


def task(codex: Codex) -> str:
    """A prompt for a command and an answer."""
    return "Run it. " + codex.script(
        think("I run it.") + HERMES.call(*COMMAND), think("It is done.") + ANSWER
    )


def names(request: dict[str, Any]) -> set[str]:
    return {tool.get("name", tool["type"]) for tool in request["tools"]}


# The catalog


def by_url(codex: Codex, folder: Path) -> tuple[str, ...]:
    return ()


def by_file(codex: Codex, folder: Path) -> tuple[str, ...]:
    """A provider that serves no catalog, beside the file that ``singletree catalog`` wrote."""
    path = folder / "catalog.json"
    command = [str(SINGLETREE), "catalog", "--base-url", codex.server.url, "--output", str(path)]
    subprocess.run(command, check=True, capture_output=True, env=codex.environment)
    provider = 'name="x", base_url="{url}/v1", env_key="SINGLETREE_API_KEY", wire_api="responses"'
    reported = (
        f"model_providers.x={{{provider}}}",
        "model_provider=x",
        f"model_catalog_json={json.dumps(str(path))}",
    )
    return tuple(word for setting in reported for word in ("-c", setting))


def no_catalog(codex: Codex, folder: Path) -> tuple[str, ...]:
    return by_file(codex, folder)[:4]


@pytest.mark.parametrize("source", [by_url, by_file])
def test_with_the_catalog_it_is_as_with_its_own_models(
    start: Start, tmp_path: Path, source: Any
) -> None:  # C29
    codex = start("--model-card", _card(tmp_path, "tool_output_tokens = 300"))
    many = HERMES.call("exec_command", {"cmd": "seq 1 20000", "max_output_tokens": 5000})
    ran = codex.run("Count. " + codex.script(think("I count.") + many, ANSWER), *source(codex, tmp_path))
    ran.went_well(ANSWER)
    ran.came_back()
    first = ran.requests[0]
    patch = next(tool for tool in first["tools"] if tool.get("name") == "apply_patch")
    assert (patch["type"], patch["format"]["syntax"]) == ("custom", "lark")
    assert first["include"] == ["reasoning.encrypted_content"]
    [counted] = ran.outputs()
    assert re.search(r"tokens truncated", counted), counted
    assert len(counted) < 5 * 300
    asked = [sent.path for sent in ran.sent if sent.method == "GET" and "client_version" in sent.path]
    assert len(asked) == (source is by_url), "one look is enough"


def test_without_it_codex_says_so(start: Start, tmp_path: Path) -> None:
    codex = start()
    ran = codex.run(task(codex), *no_catalog(codex, tmp_path))
    [complaint] = ran.outcome.complaints
    assert f"Model metadata for `{MODEL}` not found" in complaint
    assert "apply_patch" not in names(ran.requests[0])


def test_a_name_inherits_what_the_operator_says(start: Start, tmp_path: Path, installed: Path) -> None:  # C29
    bundled = tmp_path / "bundled.json"
    program = installed / "node_modules" / ".bin" / "codex"
    command = list(map(str, (SINGLETREE, "catalog", "--bundled", "--codex", program, "--output", bundled)))
    subprocess.run(command, check=True, capture_output=True)
    alias = "openai/openai/gpt-5.5"
    flags = ("--model-name", alias, "--codex-catalog", str(bundled), "--codex-profile", f"{alias}=gpt-5.5")
    codex = start(*flags)
    ran = codex.run(task(codex), model=alias)
    ran.went_well(ANSWER)
    first = ran.requests[0]
    assert first["text"] == {"verbosity": "low"}
    assert {"apply_patch", "tool_search"} <= names(first)
    assert "You are Codex" in ran.plays[0].prompt


def _card(folder: Path, *lines: str) -> str:
    path = folder / "card.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


# Transport


def test_over_a_websocket_each_request_says_only_what_is_new(start: Start) -> None:  # C30
    codex = start()
    prompt = task(codex)
    over_http = codex.run(prompt)
    ran = codex.run(prompt, *WEBSOCKETS)
    ran.went_well(ANSWER)
    assert ran.paths("POST") == []
    warm = next(sent.json for sent in ran.sent if sent.method == "WS")
    assert warm["generate"] is False
    assert all(request["previous_response_id"] for request in ran.requests)
    assert [item["type"] for item in ran.requests[-1]["input"]] == ["function_call_output"]
    warmed, *turns = ran.plays
    assert turns[0].prompt_token_ids[: len(warmed.prompt_token_ids) - 10] == warmed.prompt_token_ids[:-10]
    assert [_without_chance(play.prompt) for play in turns] == [
        _without_chance(play.prompt) for play in over_http.plays
    ]
    for before, after in pairwise(turns):
        cached = before.prompt_token_ids + before.token_ids
        assert after.prompt_token_ids[: len(cached)] == cached


def _without_chance(prompt: str) -> str:
    return re.sub(r"Chunk ID: \w+\nWall time: [\d.]+", "", prompt)


def test_without_websockets_it_falls_back_at_once(start: Start) -> None:
    codex = start("--no-websockets")
    ran = codex.run(task(codex), *WEBSOCKETS)
    ran.went_well(ANSWER)
    ran.came_back()
    assert ran.paths("GET") == ["/v1/models", "/v1/models", "/v1/responses"]
    assert ran.paths("POST") == ["/v1/responses"] * 2


def test_signed_in_to_chatgpt_it_compresses_its_requests(start: Start) -> None:
    codex = start("--no-websockets")
    ran = codex.run(task(codex), *sign_in(codex.home))
    ran.went_well(ANSWER)
    ran.came_back()
    posted = [sent for sent in ran.sent if sent.method == "POST"]
    assert [sent.headers.get("content-encoding") for sent in posted] == ["zstd"] * 2
    assert all(sent.size < len(sent.body) / 2 for sent in posted)


# Compaction

SHORT = ("-c", "model_auto_compact_token_limit=1000")
"""Less than any prompt: Codex compacts as soon as a turn is not the last."""


def long_task(codex: Codex) -> str:
    """A prompt for a command, a summary and an answer behind it."""
    end = codex.script(think("I know it.") + ANSWER)
    call = think("I run it.") + HERMES.call(*COMMAND)
    return "Run it. " + codex.script(call, think("What mattered?") + f"The command printed {PRINTED}. {end}")


def test_it_compacts_by_a_prompt_of_its_own(start: Start) -> None:  # C25
    codex = start()
    ran = codex.run(long_task(codex), *SHORT)
    ran.went_well(ANSWER)
    assert "CONTEXT CHECKPOINT COMPACTION" in json.dumps(ran.requests[1]["input"][-1])
    assert not ran.requests[1].get("tools")
    first, second, last = ran.plays
    assert "<tools>" in second.prompt, "the tools stay at the head"
    assert second.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
    assert PRINTED in last.prompt
    assert "<tool_response>" not in last.prompt


@pytest.mark.parametrize("options", [(), ("-c", "features.remote_compaction_v2=false")], ids=["v2", "off"])
def test_on_openais_own_provider_the_server_compacts(start: Start, options: tuple[str, ...]) -> None:  # C25
    codex = start("--no-websockets")
    ran = codex.run(long_task(codex), *SHORT, *sign_in(codex.home), *options)
    ran.went_well(ANSWER)
    begun = ran.plays[0].prompt_token_ids + ran.plays[0].token_ids
    assert ran.plays[1].prompt_token_ids[: len(begun)] == begun
    asked, after = ran.requests[1:]
    assert asked["input"][-1] == {"type": "compaction_trigger"}
    assert names(asked) == names(ran.requests[0])
    assert [item["type"] for item in after["input"]].count("compaction") == 1
    assert PRINTED not in json.dumps(after["input"])
    last = ran.plays[-1]
    assert f"The command printed {PRINTED}." in last.prompt
    assert "<tool_response>" not in last.prompt


def test_over_a_websocket_the_server_compacts_too(start: Start) -> None:  # C25 C30
    codex = start()
    ran = codex.run(long_task(codex), *SHORT, *sign_in(codex.home))
    ran.went_well(ANSWER)
    assert "/v1/responses" not in ran.paths("POST")
    assert f"The command printed {PRINTED}." in ran.plays[-1].prompt


# Sessions. The turns say nothing before a new question but what the template keeps behind one.


def plain_task(codex: Codex) -> str:
    """A prompt for a command and an answer, without a thought."""
    return "Run it. " + codex.script(HERMES.call(*COMMAND), ANSWER)


def goes_on(first: Ran, second: Ran) -> None:
    """The first prompt of the second run begins with all there was at the end of the first."""
    for ran in (first, second):
        ran.went_well(ANSWER)
    last = first.plays[-1]
    begun = last.prompt_token_ids + last.token_ids
    assert second.plays[-1].prompt_token_ids[: len(begun)] == begun


@pytest.mark.parametrize("transport", [(), WEBSOCKETS], ids=["http", "websocket"])
def test_a_session_that_is_resumed_appends(start: Start, transport: tuple[str, ...]) -> None:  # C26
    codex = start()
    first = codex.run(plain_task(codex), *transport)
    second = codex.run("Again. " + codex.script(ANSWER), "--last", *transport, command=("exec", "resume"))
    goes_on(first, second)
    assert second.requests[0]["prompt_cache_key"] == first.requests[0]["prompt_cache_key"]


def test_a_fork_appends_to_what_it_was_forked_from(start: Start) -> None:  # C26
    codex = start()
    first = codex.run(plain_task(codex))
    thread = re.search(r'"thread_id":"([^"]+)"', first.outcome.output)
    assert thread is not None
    fork = codex.run("Again. " + codex.script(ANSWER), thread[1], command=("exec", "fork"))
    goes_on(first, fork)
    assert fork.requests[0]["prompt_cache_key"] != first.requests[0]["prompt_cache_key"]


# Tools

PATCH = "*** Begin Patch\n*** Update File: calc.py\n@@\n-    return a + b\n+    return b + a\n*** End Patch\n"


def test_a_patch_is_applied_as_the_model_wrote_it(start: Start, workspace: Workspace) -> None:  # C41
    codex = start()
    call = HERMES.call("apply_patch", {"input": PATCH})
    ran = codex.run("Change it. " + codex.script(think("I change it.") + call, ANSWER))
    ran.went_well(ANSWER)
    ran.came_back()
    assert "return b + a" in (workspace.folder / "calc.py").read_text()
    [back] = [item for item in ran.requests[-1]["input"] if item["type"] == "custom_tool_call"]
    assert back["input"] == PATCH
    [output] = ran.outputs("custom_tool_call_output")
    assert "calc.py" in json.dumps(output)


def test_two_calls_of_one_turn_run_both(start: Start) -> None:
    codex = start()
    calls = [HERMES.call("exec_command", {"cmd": f"echo {word}-$((6 * 7))"}) for word in ("one", "two")]
    ran = codex.run("Run both. " + codex.script("\n".join(calls), ANSWER))
    ran.went_well(ANSWER)
    ran.came_back()
    assert ran.requests[0]["parallel_tool_calls"] is True
    assert ["one-42" in ran.outputs()[0], "two-42" in ran.outputs()[1]] == [True, True]


def test_a_tool_of_an_mcp_server_is_called_in_its_namespace(start: Start) -> None:  # C42
    codex = start()
    server = {"command": json.dumps(sys.executable), "args": json.dumps([str(HERE / "mcp_words.py")])}
    arguments = [
        word for name, value in server.items() for word in ("-c", f"mcp_servers.words.{name}={value}")
    ]
    found = codex.run("Hi. " + codex.script(ANSWER), *arguments)
    namespace = next(
        t for t in found.requests[0]["tools"] if t["type"] == "namespace" and "words" in t["name"]
    )
    [tool] = namespace["tools"]
    shown = re.search(r'"name": "([^"]*reverse[^"]*)"', found.plays[0].prompt)
    assert shown is not None
    ran = codex.run(
        "Reverse it. " + codex.script(HERMES.call(shown[1], {"word": "singletree"}), ANSWER), *arguments
    )
    ran.went_well(ANSWER)
    ran.came_back()
    [back] = [item for item in ran.requests[-1]["input"] if item["type"] == "function_call"]
    assert (back["namespace"], back["name"]) == (namespace["name"], tool["name"])
    assert "eertelgnis" in json.dumps(ran.outputs())


def test_a_tool_that_is_found_can_be_called(start: Start, tmp_path: Path) -> None:  # C43
    codex = start("--model-card", _card(tmp_path, "[codex]", "supports_search_tool = true"))
    server = {"command": json.dumps(sys.executable), "args": json.dumps([str(HERE / "mcp_words.py")])}
    arguments = [
        word for name, value in server.items() for word in ("-c", f"mcp_servers.words.{name}={value}")
    ]
    search = HERMES.call("tool_search", {"query": "reverse a word", "limit": 5})
    found = codex.run("Look. " + codex.script(search, ANSWER), *arguments)
    found.went_well(ANSWER)
    [output] = [item for item in found.requests[-1]["input"] if item["type"] == "tool_search_output"]
    assert "reverse" in json.dumps(output["tools"])
    shown = re.search(r'"name": "([^"]*reverse[^"]*)"', found.plays[-1].prompt)
    assert shown is not None, "the tool is shown where it was found"
    assert "reverse" not in found.plays[0].prompt
    call = HERMES.call(shown[1], {"word": "singletree"})
    ran = codex.run("Look and reverse. " + codex.script(search, call, ANSWER), *arguments)
    ran.went_well(ANSWER)
    ran.came_back()
    assert "eertelgnis" in json.dumps(ran.outputs())


def test_a_picture_that_it_looks_at_has_a_placeholder(
    start: Start, workspace: Workspace, tmp_path: Path
) -> None:
    codex = start("--model-card", _card(tmp_path, 'input_modalities = ["text", "image"]'))
    picture = workspace.folder / "dot.png"
    picture.write_bytes(base64.b64decode(DOT))
    ran = codex.run("Look. " + codex.script(HERMES.call("view_image", {"path": str(picture)}), ANSWER))
    ran.went_well(ANSWER)
    ran.came_back()
    assert "data:image/png" in json.dumps(ran.requests[-1])
    assert "data:image/png" not in ran.plays[-1].prompt
    assert NO_IMAGES in ran.plays[-1].prompt
