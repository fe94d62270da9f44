"""The ASGI application: routes, API keys, request ids, and errors in the format of the request's protocol.

It is served over ASGI by ``http_server``, on the same event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from urllib.parse import quote, unquote

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from singletree.errors import (
    EngineUnfit,
    MethodNotAllowed,
    Overloaded,
    RateLimited,
    RouteNotFound,
    SingletreeError,
    Superseded,
)
from singletree.server.answers.request_body import ClientLeft
from singletree.server.answers.stream import client_error
from singletree.server.cross_origin import CrossOriginPolicy, is_preflight, policy_for, preflight_headers
from singletree.server.doors import open_door_in_thread
from singletree.server.http.route_table import ROUTES, routes_of
from singletree.server.http.routes import JSON
from singletree.server.http.service import SCOPES, WEBSOCKET_PATH, AnswerSocket, Call, RouteRow, Service
from singletree.server.ids import request_id
from singletree.server.telemetry import Trace
from singletree.server.turn.protocol import encode_error

_BASES = {"/anthropic/": "/", "/openai/": "/", "/api/v1/": "/v1/", "/v1/v1/": "/v1/"}
"""Path prefixes that come from base URLs of other servers, and the prefixes that replace them."""
_BASE_PREFIXES = tuple(_BASES)
_UNESCAPED = "/:@!$&'*+,;=()"
_WITHOUT_VERSION = {row.path.removeprefix("/v1") for row in ROUTES}


class App:
    """The ASGI application. It does not start or stop engines; the caller does.

    Args:
        address: the IP address that the server listens on. None where another program listens: that program has to
            check the host names that clients use, unless ``--allowed-hosts`` names some.
    """

    def __init__(self, service: Service, address: str | None = None) -> None:
        self._service = service
        config = service.config
        self._policy = policy_for(
            config.host, address, allowed_origins=config.allowed_origins, allowed_hosts=config.allowed_hosts
        )
        routes = [(row, _Endpoint(service, self._policy, row)) for row in routes_of(service)]
        self._apis = _Routing([route for route in routes if SCOPES[route[0].scope].is_api])
        self._all = _Routing(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        routing = self._all
        if "path" in scope:
            sent = _sent_path(scope)
            path = sent
            if self._service.capture is not None:
                scope, path = self._service.capture.enter(scope, sent)
            path = plain_path(path)
            scope = {**scope, "path": path}
            if path != sent:
                routing = self._apis
        if scope["type"] == "websocket":
            await self._connect(routing, scope, receive, send)
            return
        if scope["type"] != "http":
            await routing.router(scope, receive, send)
            return
        # For the routes and for errors, so that they are decoded once.
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        scope["headers_by_name"] = headers
        id = request_id(headers.get("x-request-id"))
        trace = scope["trace"] = Trace(self._service.tracing, scope["method"], scope["path"], id)
        trace.traceparent = headers.get("traceparent", "")
        scope["app"] = self  # so that the router raises what it cannot route
        started, origin = False, None

        async def send_marked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                trace.status = message["status"]
                # OpenAI's and Anthropic's names of the request id: both SDKs show it.
                encoded = id.encode()
                answer = [*message.get("headers", ()), (b"x-request-id", encoded), (b"request-id", encoded)]
                message["headers"] = answer + self._policy.headers(origin, answer)
            await send(message)

        try:
            origin = self._policy.check(scope)
            endpoint = routing.endpoints.get((scope["method"], scope["path"]))
            answer: ASGIApp
            if origin and is_preflight(scope):
                answer = Response(status_code=204, headers=preflight_headers(scope))
            elif endpoint is None:
                answer = routing.router
            else:
                answer = await endpoint.answer(scope, receive)
            await answer(scope, receive, send_marked)
        except ClientLeft:
            pass
        except Exception as error:
            response = await _error_response(HttpRequest(scope), error)
            if not started:
                await response(scope, receive, send_marked)
        finally:
            trace.close()

    async def _connect(self, routing: _Routing, scope: Scope, receive: Receive, send: Send) -> None:
        refused = None
        try:
            self._policy.check(scope)
        except SingletreeError as error:
            refused = error
        if refused is None and scope["path"] != WEBSOCKET_PATH:
            await routing.router(scope, receive, send)
            return
        answer: AnswerSocket = await open_door_in_thread("websockets")
        await answer(self._service, refused, scope, receive, send)


def _sent_path(scope: Scope) -> str:
    """Return the path as the client sent it, with its escapes: ``_Endpoint`` decodes what belongs to an id.

    A path has one spelling: a reverse proxy that has a rule for ``/metrics`` does not see it in ``/%6detrics``.
    """
    raw: bytes | None = scope.get("raw_path")
    if raw is None:  # a server that does not tell
        return quote(scope["path"], safe=_UNESCAPED) if "%" in scope["path"] else str(scope["path"])
    return raw.decode("latin-1") if b"%" in raw else str(scope["path"])


def plain_path(path: str) -> str:
    """Return the route's path for a client of an API whose base URL has extra prefixes.

    ``/anthropic/v1/messages`` and ``/v1/v1/messages`` become ``/v1/messages``, ``/anthropic`` becomes ``/``.
    """
    path = "/" + path.lstrip("/")
    if path + "/" in _BASES:
        return "/"
    while path.startswith(_BASE_PREFIXES):
        base = next(each for each in _BASES if path.startswith(each))
        path = _BASES[base] + path.removeprefix(base).lstrip("/")
    return path


class _Routing:
    """Routes, and by method and path those whose path is fixed: the router compares every path with every route."""

    def __init__(self, routes: Sequence[tuple[RouteRow, _Endpoint]]) -> None:
        self._routes = routes
        self.endpoints = {(row.method, row.path): app for row, app in reversed(routes) if "{" not in row.path}

    @cached_property
    def router(self) -> Router:
        """The router, made for the first request that needs it."""
        routes = [Route(row.path, app, methods=[row.method]) for row, app in self._routes]
        return Router(routes, redirect_slashes=False)


class _Endpoint:
    """The ASGI application that answers the requests of one route.

    The router calls an object as it is; around a function, it would handle errors, which ``App`` does.
    """

    def __init__(self, service: Service, policy: CrossOriginPolicy, row: RouteRow) -> None:
        scope = SCOPES[row.scope]
        self._service = service
        # Without a key, only the name of the server tells the user of this machine from a web page (DNS rebinding).
        self._names = policy if scope.shows_prompts and "sessions" not in service.keys.needed else None
        self._path = row.path
        self._operation = row.operation
        self._right = scope.right

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises what its operation raises."""
        answer = await self.answer(scope, receive)
        await answer(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        """Return what will answer a request. Raises Unauthorized, ForbiddenAddress, and what the operation raises."""
        if self._names is not None:
            self._names.check_trusted_name(scope)
        if escaped := scope.get("path_params"):
            scope["path_params"] = {name: unquote(value) for name, value in escaped.items()}
        trace: Trace = scope["trace"]
        trace.route = self._path
        call = Call(self._service, scope, receive, scope["headers_by_name"], trace)
        if self._right is not None:
            call.authorize(self._right)
        try:
            return await self._operation(call)
        finally:
            call.end_work()


async def _error_response(http: HttpRequest, error: Exception) -> Response:
    known = _as_singletree_error(http, error)
    trace: Trace = http.scope["trace"]
    trace.failed(known)
    status, body = await encode_error(known, http.url.path, http.scope["headers_by_name"], trace.request_id)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(known, Overloaded | RateLimited):
        headers["retry-after"] = str(max(1, round(known.retry_after)))
    if isinstance(known, Superseded | EngineUnfit):
        headers["x-should-retry"] = "false"  # the official SDKs repeat a 409 and a 500
    return Response(b"" if http.method == "HEAD" else body, status, headers, media_type=JSON)


def _as_singletree_error(http: HttpRequest, error: Exception) -> SingletreeError:
    if not isinstance(error, HTTPException):
        return client_error(error)
    path = ascii(http.url.path[:128])[1:-1]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return MethodNotAllowed(f"{http.method} is not supported on {path}; send {allowed}")
    cure = "; the paths of the APIs begin with /v1" if path in _WITHOUT_VERSION else ""
    return RouteNotFound(f"the path {path} does not exist{cure}")
