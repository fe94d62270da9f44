"""Which web pages may use the server: Origin, Host, preflights and CORS, over every route and both transports."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Route

from singletree.errors import BadConfiguration, ForbiddenHost, ForbiddenOrigin
from singletree.server.cross_origin import CrossOriginPolicy, policy_for
from singletree.server.http.app import App
from singletree.server.settings.config import Config

from .memory import Client, scope
from .serving import Served, body, serving
from .test_app import PATHS, each_protocol, error_of
from .test_config import read

HERE = "127.0.0.1:8000"
PAGE = "https://page.example"


def on(served: Served, address: str | None = "127.0.0.1") -> Client:
    """A client of the same server, which listens on ``address``."""
    return Client(App(served.service, address), {"host": HERE})


FOREIGN = [
    PAGE,
    "null",
    "file://",
    "http://localhost:3000",
    "http://127.0.0.1",
    "http://127.0.0.1:8001",
    "http://localhost:8000",
    "http://127.0.0.1:8000.page.example",
    "http://127.0.0.1.page.example:8000",
    "http://127.0.0.1:8000@page.example",
    "tauri://localhost",
    "vscode-webview://1b2c",
    "chrome-extension://abcdef",
    "HTTPS://PAGE.EXAMPLE",
    "nonsense",
    "",
    "http://",
    "http://\u00ff",
    "ftp://127.0.0.1:8000",
]


@each_protocol
@pytest.mark.parametrize("origin", FOREIGN)
async def test_a_page_of_another_origin_is_refused(path: str, origin: str) -> None:
    simple = {"content-type": "text/plain;charset=UTF-8"}
    async with serving() as served:
        reply = await on(served).post(path, body(path, "[[echo:x]]"), {"origin": origin, **simple})
        assert not served.engine.log
    assert reply.status == 403
    kind, message = error_of(path, reply)
    assert kind == ("permission_error" if path == "/v1/messages" else "origin_not_allowed")
    assert "--allowed-origins" in message
    assert "access-control-allow-origin" not in reply.headers


@each_protocol
@pytest.mark.parametrize("origin", [None, f"http://{HERE}"])
@pytest.mark.parametrize(
    "kind", ["application/json", "text/plain", "application/x-www-form-urlencoded", None]
)
async def test_other_clients_and_pages_of_its_own_are_served(
    path: str, origin: str | None, kind: str | None
) -> None:
    headers = {name: value for name, value in (("origin", origin), ("content-type", kind)) if value}
    async with serving() as served:
        reply = await on(served).post(path, body(path, "[[echo:yes]]"), headers)
    assert reply.status == 200
    assert "access-control-allow-origin" not in reply.headers


HOSTS = {
    "127.0.0.1:8000": True,
    "127.0.0.1": True,
    "127.0.0.2:9": True,
    "localhost:8000": True,
    "LocalHost.": True,
    "app.localhost:8000": True,
    "[::1]:8000": True,
    "[::ffff:127.0.0.1]": True,
    "host.docker.internal:8000": True,
    "page.example:8000": False,
    "localhost.page.example": False,
    "127.0.0.1.page.example:8000": False,
    "notlocalhost": False,
    "192.168.1.7:8000": False,
    "0.0.0.0:8000": False,
    "[::]:8000": False,
    "": False,
    ":8000": False,
    "localhost@page.example": False,
    "page.example#localhost": False,
    "\u00ff": False,
}


@each_protocol
@pytest.mark.parametrize(("host", "known"), HOSTS.items(), ids=map(ascii, HOSTS))
async def test_a_name_of_another_machine_is_refused(path: str, host: str, known: bool) -> None:
    async with serving() as served:
        reply = await on(served).post(path, body(path, "[[echo:x]]"), {"host": host})
    assert reply.status == (200 if known else 403)
    if not known:
        kind, message = error_of(path, reply)
        assert kind == ("permission_error" if path == "/v1/messages" else "host_not_allowed")
        assert "--allowed-hosts" in message


async def test_rebound_names_read_no_sessions() -> None:
    """A page at http://page.example:8000 whose name was made to resolve to this machine is of the same origin."""
    async with serving() as served:
        rebound = {"host": "page.example:8000", "origin": "http://page.example:8000"}
        for headers in (rebound, {"host": "page.example:8000"}):
            reply = await on(served).get("/v1/singletree/sessions", headers)
            assert (reply.status, reply.json["error"]["code"]) == (403, "host_not_allowed")


def routes(app: App) -> list[tuple[str, str]]:
    """Every method and path that the application offers."""
    found = []
    for route in app._all.router.routes:
        assert isinstance(route, Route)
        path = route.path.replace(":path", "").replace("{id}", "x").replace("{item}", "y")
        found += [(method, path) for method in route.methods or ()]
    return sorted(found)


def _every_route() -> list[tuple[str, str]]:
    async def find() -> list[tuple[str, str]]:
        async with serving() as served:
            return routes(served.client.app)  # type: ignore[arg-type]

    return asyncio.run(find())


@pytest.mark.parametrize(("method", "path"), [*_every_route(), ("GET", "/nowhere"), ("PUT", "/v1/messages")])
async def test_every_route_looks_where_a_request_comes_from(method: str, path: str) -> None:
    async with serving(config=Config(api_key=("k",))) as served:
        client = on(served)
        for headers in (
            {"origin": PAGE},
            {"origin": "null"},
            {"host": "page.example"},
            {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
            {"origin": PAGE, "x-api-key": "k"},
        ):
            reply = await client.request(method, path, b"", headers)
            assert reply.status == 403, headers
            asked = {**headers, "access-control-request-method": method}
            if "origin" in headers:
                assert (await client.request("OPTIONS", path, b"", asked)).status == 403
        for headers in ({}, {"origin": f"http://{HERE}"}, {"sec-fetch-site": "same-origin"}):
            assert (await client.request(method, path, b"", headers)).status != 403


async def test_a_link_to_the_server_may_be_followed() -> None:
    async with serving() as served:
        followed = {
            "sec-fetch-site": "cross-site",
            "sec-fetch-mode": "navigate",
            "sec-fetch-dest": "document",
        }
        assert (await on(served).get("/", followed)).status == 200


ALLOWING = Config(allowed_origins=(PAGE, "http://localhost:*"), api_key=("k",))


@each_protocol
@pytest.mark.parametrize("stream", [False, True])
async def test_an_allowed_page_reads_every_answer_and_its_headers(path: str, stream: bool) -> None:
    async with serving(config=ALLOWING) as served:
        came = {"origin": PAGE, "x-api-key": "k", "x-singletree-explain": "1"}
        reply = await on(served).post(path, body(path, "[[echo:yes]]", stream=stream), came)
        refused = await on(served).post(path, b"{", came)
        nobody = await on(served).post(path, body(path, "x"), {"origin": PAGE})
    assert (reply.status, refused.status, nobody.status) == (200, 400, 401)
    for answer in (reply, refused, nobody):
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "Origin" in answer.headers["vary"]
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "request-id", "content-type"} <= set(exposed)
    assert "x-singletree-session" in reply.headers["access-control-expose-headers"]


@pytest.mark.parametrize("path", [*PATHS, "/v1/models", "/nowhere"])
async def test_a_preflight_of_an_allowed_page_is_answered_without_a_key(path: str) -> None:
    wanted = "authorization,content-type,x-stainless-os,anthropic-dangerous-direct-browser-access"
    asked = {
        "origin": "http://localhost:5173",
        "access-control-request-method": "POST",
        "access-control-request-headers": wanted,
        "access-control-request-private-network": "true",
    }
    async with serving(config=ALLOWING) as served:
        reply = await on(served).request("OPTIONS", path, b"", asked)
        plain = await on(served).request("OPTIONS", path, b"", {"origin": PAGE})
    assert (reply.status, reply.body) == (204, b"")
    assert reply.headers["access-control-allow-origin"] == asked["origin"]
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == wanted
    assert reply.headers["access-control-allow-private-network"] == "true"
    assert plain.status in (404, 405)


class Handshake:
    """What a WebSocket client is answered before it has said anything."""

    def __init__(self, reply: list[dict[str, Any]]) -> None:
        self.types = [message["type"] for message in reply]
        self.reply = reply


async def connect(
    client: Client, path: str, headers: Mapping[str, str], *, answers: bool = True
) -> Handshake:
    """Ask for a WebSocket, and hang up."""
    came: list[dict[str, Any]] = []
    waiting = [{"type": "websocket.connect"}, {"type": "websocket.disconnect", "code": 1000}]
    wanted = scope("GET", path, {**client.headers, **headers}, b"") | {
        "type": "websocket",
        "subprotocols": [],
    }
    wanted |= {"extensions": {"websocket.http.response": {}}} if answers else {}

    async def receive() -> Any:
        return waiting.pop(0)

    async def send(message: Any) -> None:
        came.append(message)

    await asyncio.wait_for(client.app(wanted, receive, send), 5)
    return Handshake(came)


@pytest.mark.parametrize("path", ["/v1/responses", "/nowhere"])
@pytest.mark.parametrize(
    "headers",
    [{"origin": PAGE}, {"origin": "null"}, {"host": "page.example", "origin": "http://page.example"}],
)
async def test_a_websocket_of_another_page_is_refused_before_the_handshake(
    path: str, headers: dict[str, str]
) -> None:
    async with serving() as served:
        refused = await connect(on(served), path, headers)
        closed = await connect(on(served), path, headers, answers=False)
    assert refused.reply[0]["status"] == 403
    assert b"not" in refused.reply[1]["body"]
    assert closed.types == ["websocket.close"]


@pytest.mark.parametrize("headers", [{}, {"origin": f"http://{HERE}"}, {"origin": PAGE}])
async def test_a_websocket_of_other_clients_and_of_allowed_pages_is_taken(headers: dict[str, str]) -> None:
    async with serving(config=Config(allowed_origins=(PAGE,))) as served:
        assert (await connect(on(served), "/v1/responses", headers)).types[0] == "websocket.accept"


ALLOWED = [
    ("*", ["null", PAGE, "app://x", "http://localhost:1"], []),
    ("null", ["null"], [PAGE, "file://"]),
    ("file://", ["file://"], ["null", "file://host"]),
    ("https://page.example", [PAGE, "https://PAGE.example:443"], ["http://page.example", f"{PAGE}:8443"]),
    ("https://page.example/", [PAGE], ["https://page.example.evil"]),
    ("http://localhost:*", ["http://localhost", "http://localhost:5173"], ["https://localhost:1", "http://localhost.evil:1"]),
    ("https://*.example.com", ["https://a.example.com", "https://a.b.example.com"], ["https://example.com", "https://a.example.com:1"]),
    ("vscode-webview://*", ["vscode-webview://1b2c"], ["vscode-file://vscode-app", PAGE]),
    ("http://[::1]:3000", ["http://[::1]:3000"], ["http://[::2]:3000"]),
    ("app://obsidian.md", ["app://obsidian.md"], ["app://other.md"]),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "allowed", "refused"), ALLOWED, ids=[a[0] for a in ALLOWED])
def test_patterns_of_origins(pattern: str, allowed: list[str], refused: list[str]) -> None:
    policy = policy_for("127.0.0.1", "127.0.0.1", allowed_origins=[pattern])
    for origin in allowed:
        assert policy.check(scope("POST", "/", {"host": HERE, "origin": origin}, b"")) == origin
    for origin in refused:
        with pytest.raises(ForbiddenOrigin):
            policy.check(scope("POST", "/", {"host": HERE, "origin": origin}, b""))


def knows(policy: CrossOriginPolicy, host: str) -> bool:
    """Whether the server may be reached under that name."""
    try:
        policy.check(scope("GET", "/", {"host": host}, b""))
    except ForbiddenHost:
        return False
    return True


BOUND = [
    ("0.0.0.0", (), ["any.example", "10.0.0.1", "localhost"], []),
    ("10.0.0.7", (), ["any.example", "10.0.0.7"], []),
    ("0.0.0.0", ("gpu.example",), ["gpu.example:8000", "localhost", "10.0.0.7:8000", "[fe80::1]"], ["any.example"]),
    ("10.0.0.7", ("*.gpu.example",), ["a.gpu.example", "10.0.0.7:1", "127.0.0.1"], ["gpu.example", "10.0.0.8"]),
    ("127.0.0.1", ("gpu.example:8000",), ["gpu.example", "gpu.example:9", "localhost"], ["other.example"]),
    ("127.0.0.1", ("*",), ["any.example"], []),
    ("::1", (), ["[::1]:8000", "localhost"], ["any.example"]),
    ("127.0.1.1", (), ["box.lan:8000", "localhost"], ["box.lan.example"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("address", "listed", "known", "unknown"), BOUND, ids=[f"{b[0]} {b[1]}" for b in BOUND]
)
def test_names_by_where_the_server_listens(
    address: str, listed: tuple[str, ...], known: list[str], unknown: list[str]
) -> None:
    policy = policy_for("box.lan", address, allowed_hosts=listed)
    assert [host for host in known if not knows(policy, host)] == []
    assert [host for host in unknown if knows(policy, host)] == []


@given(st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=40))
def test_whatever_stands_in_the_headers_is_judged(text: str) -> None:
    policy = policy_for("127.0.0.1", "127.0.0.1", allowed_origins=["http://localhost:*"])
    raw = text.encode("latin-1")
    for headers in (
        [(b"host", HERE.encode()), (b"origin", raw)],
        [(b"host", raw)],
        [(b"origin", raw), (b"host", raw)],
    ):
        with suppress(ForbiddenOrigin, ForbiddenHost):
            origin = policy.check({"type": "http", "headers": headers})
            assert origin is None or origin.startswith("http://localhost")


def test_of_several_headers_each_is_judged() -> None:
    policy = policy_for("127.0.0.1", "127.0.0.1")
    here = (b"host", HERE.encode())
    with pytest.raises(ForbiddenHost):
        policy.check({"type": "http", "headers": [here, (b"host", b"page.example")]})
    with pytest.raises(ForbiddenOrigin):
        policy.check(
            {"type": "http", "headers": [here, (b"origin", b"http://" + here[1]), (b"origin", PAGE.encode())]}
        )


@pytest.mark.parametrize(
    "flags",
    [["--allowed-origins", "localhost:3000"], ["--allowed-origins", "https://a.*.example"], ["--allowed-origins", "https://a/b"],
     ["--allowed-hosts", "http://gpu"], ["--allowed-hosts", "a*"], ["--allowed-hosts", ""]],
)  # fmt: skip
def test_a_pattern_that_cannot_be_read_is_refused_at_start_up(flags: list[str]) -> None:
    with pytest.raises(BadConfiguration, match=flags[0]):
        read(*flags)


def test_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = read(
        "--allowed-origins", PAGE, "null", "--allowed-hosts", "a.example", "--allowed-hosts", "b.example"
    )
    assert (given.allowed_origins, given.allowed_hosts) == ((PAGE, "null"), ("a.example", "b.example"))
    monkeypatch.setenv("SINGLETREE_ALLOWED_ORIGINS", f"{PAGE}, null")
    assert read().allowed_origins == (PAGE, "null")


def test_decisions_about_names_are_those_of_their_policy_and_text_that_is_too_long_is_not_a_name() -> None:
    local, everywhere = policy_for("127.0.0.1", "127.0.0.1"), policy_for("0.0.0.0", "0.0.0.0")
    listed = policy_for("127.0.0.1", "127.0.0.1", allowed_hosts=["*.example.com"])
    for _ in range(2):
        assert not knows(local, "a.example.com")
        assert knows(everywhere, "a.example.com")
        assert knows(listed, "a.example.com:8000")
    assert knows(listed, "a." * 120 + "example.com:8000")
    assert not knows(listed, "a." * 200 + "example.com:8000")
