"""API keys in a file: names, rights, rates, and what happens when the file changes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from singletree import key_files
from singletree.errors import BadConfiguration, RateLimited
from singletree.key_files import KeyFile, RequestRate, key
from singletree.server.settings.api_keys import RIGHTS, digest_of
from singletree.server.settings.config import Config

from .owning import client
from .serving import MODEL, Served, serving
from .test_websocket import connected

MESSAGES = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
SESSIONS = "/v1/singletree/sessions"


def entry(name: str, *keys: str, **fields: Any) -> str:
    digests = ", ".join(f'"{digest_of(each).hex()}"' for each in keys)
    rest = "".join(f"{field} = {value}\n" for field, value in fields.items())
    return f"[{name}]\nsha256 = [{digests}]\n{rest}\n"


def served_with(path: Path, text: str, **flags: Any) -> AbstractAsyncContextManager[Served]:
    path.write_text(text)
    return serving(config=Config(key_file=path, **flags))


async def statuses(served: Served, used: str) -> Mapping[str, int]:
    who = client(served, used)
    asked = {
        "inference": await who.post("/v1/messages", MESSAGES),
        "sessions": await who.get(SESSIONS),
        "inspect": await who.get("/inspect/api/sessions"),
        "capture": await who.get("/sessions"),
    }
    return {right: reply.status for right, reply in asked.items()}


async def test_each_right_opens_its_routes_alone(tmp_path: Path) -> None:
    text = "".join(entry(right, right, rights=f'["{right}"]') for right in RIGHTS)
    flags = {"inspect": True, "capture": tmp_path / "captured"}
    async with served_with(tmp_path / "keys.toml", text, **flags) as served:
        for right in RIGHTS:
            found = await statuses(served, right)
            assert found == {each: 200 if each == right else 403 for each in found}, right
        assert set((await statuses(served, "unknown")).values()) == {401}
        assert set((await statuses(served, "")).values()) == {401}


async def test_without_rights_a_name_asks_and_sees_what_is_its_own(tmp_path: Path) -> None:
    flags = {"inspect": True, "capture": tmp_path / "captured", "capture_key": ("trainer",)}
    async with served_with(tmp_path / "keys.toml", entry("alice", "a"), **flags) as served:
        assert await statuses(served, "a") == {
            "inference": 200,
            "sessions": 200,
            "inspect": 200,
            "capture": 403,
        }
        assert (await client(served, "trainer").get("/sessions")).status == 200


async def test_a_refusal_has_the_form_of_the_protocol(tmp_path: Path) -> None:
    async with served_with(tmp_path / "k", entry("a", "one", rights='["sessions"]')) as served:
        who = client(served, "one")
        error = (await who.post("/v1/messages", MESSAGES)).json["error"]
        assert error["type"] == "permission_error"
        assert "no right to inference" in error["message"]
        error = (await who.post("/v1/chat/completions", MESSAGES)).json["error"]
        assert error["code"] == "insufficient_permissions"


async def test_what_is_remembered_belongs_to_the_name(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    async with served_with(path, entry("alice", "old", "new") + entry("bob", "b"), explain=True) as served:
        assert served.service.keys.owners == ("alice", "bob")
        await client(served, "old").post("/v1/messages", MESSAGES, {"x-session-id": "s"})
        listed = {used: (await client(served, used).get(SESSIONS)).json["data"] for used in ("new", "b")}
        assert [each["id"] for each in listed["new"]] == ["s"]
        assert listed["b"] == []


async def test_the_operator_sees_all(tmp_path: Path) -> None:
    text = entry("alice", "a") + entry("ops", "o", rights='["sessions", "admin"]')
    async with served_with(tmp_path / "k", text) as served:
        await client(served, "a").post("/v1/messages", MESSAGES, {"x-session-id": "s"})
        assert [each["id"] for each in (await client(served, "o").get(SESSIONS)).json["data"]] == ["alice/s"]


async def test_keys_that_share_have_one_memory(tmp_path: Path) -> None:
    text = entry("alice", "a") + entry("bob", "b")
    async with served_with(tmp_path / "k", text, share_between_keys=True) as served:
        assert served.service.keys.owners == ()
        await client(served, "a").post("/v1/messages", MESSAGES, {"x-session-id": "s"})
        assert [each["id"] for each in (await client(served, "b").get(SESSIONS)).json["data"]] == ["s"]


async def test_a_changed_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_files, "_CHECK_SECONDS", 0.0)
    path = tmp_path / "keys.toml"
    async with served_with(path, entry("alice", "a")) as served:
        assert (await client(served, "b").get("/v1/models")).status == 401
        path.write_text(entry("bob", "b"))
        assert (await client(served, "b").get("/v1/models")).status == 200
        assert (await client(served, "a").get("/v1/models")).status == 401
        path.write_text("[bob")
        assert (await client(served, "b").get("/v1/models")).status == 200
        path.unlink()
        assert (await client(served, "b").get("/v1/models")).status == 200
        path.write_text("")  # a file without names takes all keys away
        assert (await client(served, "b").get("/v1/models")).status == 401
    assert [r.levelname for r in caplog.records if "stay as they were" in r.message] == ["ERROR"] * 2


async def test_a_connection_ends_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_files, "_CHECK_SECONDS", 0.0)
    path = tmp_path / "keys.toml"
    async with (
        served_with(path, entry("alice", "a")) as served,
        connected(served, **{"x-api-key": "a"}) as socket,
    ):
        socket.create("hi")
        assert (await socket.response())["status"] == "completed"
        path.write_text(entry("bob", "b"))
        socket.create("hi")
        assert "API key is wrong" in (await socket.event())["error"]["message"]
        path.write_text(entry("bob", "a"))
        socket.create("hi")
        assert "another name now" in (await socket.event())["error"]["message"]


async def test_a_name_may_ask_so_often(tmp_path: Path) -> None:
    async with served_with(tmp_path / "k", entry("a", "one", "two", requests_per_minute=2)) as served:
        for used in ("one", "two"):
            assert (await client(served, used).post("/v1/messages", MESSAGES)).status == 200
        refused = await client(served, "one").post("/v1/messages", MESSAGES)
        assert refused.status == 429
        assert refused.json["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        chat = await client(served, "one").post("/v1/chat/completions", MESSAGES)
        assert (chat.status, chat.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert chat.json["error"]["type"] == "requests"
        assert (await client(served, "one").get("/v1/models")).status == 200, "no turn is asked for"


async def test_a_name_has_a_budget(tmp_path: Path) -> None:
    text = entry("a", "one", "two", budget='"generated=1"') + entry("b", "free")
    async with served_with(tmp_path / "k", text, key_budget="generated=1G") as served:
        assert (await client(served, "one").post("/v1/messages", MESSAGES)).status == 200
        refused = await client(served, "two").post("/v1/messages", MESSAGES)
        assert (refused.status, refused.json["error"]["type"]) == (402, "billing_error")
        assert refused.json["error"]["message"].endswith("use another key, or raise its budget in --key-file")
        raw = {"model": MODEL, "prompt": "hi", "max_tokens": 3}
        assert (await client(served, "two").post("/v1/completions", raw)).status == 400
        assert (await client(served, "free").post("/v1/messages", MESSAGES)).status == 200


def test_a_rate_comes_back_evenly() -> None:
    now = [0.0]
    rate = RequestRate(60, clock=lambda: now[0])
    for _ in range(60):
        rate.admit()
    with pytest.raises(RateLimited) as refused:
        rate.admit()
    assert refused.value.retry_after == pytest.approx(1)
    now[0] += 1
    rate.admit()
    with pytest.raises(RateLimited):
        rate.admit()
    now[0] += 3600
    for _ in range(60):
        rate.admit()


def test_a_file_that_changes_begins_no_new_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_files, "_CHECK_SECONDS", 0.0)
    path = tmp_path / "keys.toml"
    path.write_text(entry("a", "one", requests_per_minute=1))
    keys = KeyFile(path)
    keys()[0].admit()
    path.write_text(entry("a", "one", requests_per_minute=1) + entry("b", "two"))
    assert len(keys()) == 2
    with pytest.raises(RateLimited):
        keys()[0].admit()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[a", "Expected"),
        ("[a]\n", "sha256"),
        ("[a]\nsha256 = 'short'\n", "matching regex"),
        (entry("a", "one", rights='["all"]'), "Invalid enum value 'all'"),
        (entry("a", "one", requests_per_minute=0), "> 0"),
        (entry("a", "one", rate=5), "rate"),
        (entry("a", "one", budget='"loops=3"'), "'loops=3' is not a limit"),
        (entry('"a/b"', "one"), "the name 'a/b' is not one"),
        (entry("0123456789abcdef", "one"), "16 hexadecimal digits"),
    ],
)
def test_a_file_of_another_form_ends_the_start(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(BadConfiguration) as refused:
        KeyFile(path)
    assert reason in refused.value.message
    assert "--key-file" in refused.value.message


def test_a_file_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="No such file"):
        KeyFile(tmp_path / "none.toml")


def test_the_command_prints_a_key_and_its_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key("alice")
    printed = capsys.readouterr()
    path = tmp_path / "keys.toml"
    path.write_text(printed.out)
    os.chmod(path, 0o600)
    [known] = KeyFile(path)()
    assert (known.owner, known.digest) == ("alice", digest_of(printed.err.split()[1]))
    with pytest.raises(BadConfiguration, match="is not one"):
        key("a/b")
