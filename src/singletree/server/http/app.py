"""The ASGI application: routes, API keys, request ids, and errors in the format of the request's protocol.

It is served over ASGI by ``http_server``, on the same event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from singletree.errors import (
    EngineUnfit,
    MethodNotAllowed,
    Overloaded,
    RouteNotFound,
    SingletreeError,
    Superseded,
)
from singletree.protocols import models, tokenize
from singletree.server.answers.request_body import ClientLeft
from singletree.server.answers.stream import client_error
from singletree.server.answers.tracing import Trace
from singletree.server.cross_origin import is_preflight, policy_for, preflight_answer
from singletree.server.http import websocket
from singletree.server.http.completions_route import complete
from singletree.server.http.inspect_routes import INSPECT_ROUTES
from singletree.server.http.routes import JSON, OPEN_ROUTES, OPERATIONS, OWN_ROUTES, Call, Operation, Service
from singletree.server.http.store_routes import STORED_OPERATIONS
from singletree.server.turn.ids import request_id
from singletree.server.turn.protocol import (
    CHAT,
    COMPACT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    encode_error,
)

_BASES = {"/anthropic/": "/", "/openai/": "/", "/api/v1/": "/v1/", "/v1/v1/": "/v1/"}
"""Path prefixes that come from base URLs of other servers, and the prefixes that replace them."""
_BASE_PREFIXES = tuple(_BASES)
_PROTOCOLS = (MESSAGES, CHAT, RESPONSES, COMPACT, COMPLETIONS, GENERATE)
_WITHOUT_VERSION = {path.removeprefix("/v1") for each in _PROTOCOLS for _, path, _ in each.ROUTES}


class App:
    """The ASGI application. It does not start or stop engines; the caller does.

    Args:
        service: what all requests share.
        address: the IP address that the server listens on. None where another program listens: that program has to
            check the host names that clients use, unless ``--allowed-hosts`` names some.
    """

    def __init__(self, service: Service, address: str | None = None) -> None:
        self._service = service
        config = service.config
        self._policy = policy_for(
            config.host,
            address,
            allowed_origins=config.allowed_origins,
            allowed_hosts=config.allowed_hosts,
        )
        keyed = [_route(service, *route, needs_key=True) for route in _keyed_routes(service)]
        free = [_route(service, *route, needs_key=False) for route in OPEN_ROUTES]
        # Its operations ask for the key themselves: the page has to load before it can send one.
        inspect = [_route(service, *route, needs_key=False) for route in INSPECT_ROUTES]
        routes = [*keyed, *free, *inspect]
        self._router = Router(routes, redirect_slashes=False)
        # The router compares every path with every route, in their order.
        self._endpoints = {
            (method, route.path): route.app
            for route in reversed(routes)
            if isinstance(route.app, _Endpoint) and not route.param_convertors
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection. Every error becomes an answer."""
        if "path" in scope:
            scope = {**scope, "path": plain_path(scope["path"])}
        if scope["type"] == "websocket":
            await self._connect(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        # For the routes and for errors, so that they are decoded once.
        headers = scope["headers_by_name"] = _headers(scope)
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
                answer = [
                    *message.get("headers", ()),
                    (b"x-request-id", encoded),
                    (b"request-id", encoded),
                ]
                message["headers"] = answer + self._policy.headers(origin, answer)
            await send(message)

        try:
            origin = self._policy.check(scope)
            endpoint = self._endpoints.get((scope["method"], scope["path"]))
            answer: ASGIApp
            if origin and is_preflight(scope):
                answer = preflight_answer(scope)
            elif endpoint is None:
                answer = self._router
            else:
                answer = await endpoint.answer(scope, receive)
            await answer(scope, receive, send_marked)
        except ClientLeft:
            pass
        except Exception as error:
            response = _error_response(HttpRequest(scope), error)
            if not started:
                await response(scope, receive, send_marked)
        finally:
            trace.close()

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one WebSocket. Refuse it before the handshake when its web page may not use the server."""
        try:
            self._policy.check(scope)
        except SingletreeError as refused:
            await websocket.refuse(refused, scope, receive, send)
            return
        if scope["path"] == websocket.PATH:
            await websocket.Socket(self._service, scope, receive, send).run()
        else:
            await self._router(scope, receive, send)


def plain_path(path: str) -> str:
    """Return the route's path for a client whose base URL has extra prefixes.

    ``/anthropic/v1/messages`` and ``/v1/v1/messages`` become ``/v1/messages``, ``/anthropic`` becomes ``/``.
    """
    path = "/" + path.lstrip("/")
    if path + "/" in _BASES:
        return "/"
    while path.startswith(_BASE_PREFIXES):
        base = next(each for each in _BASES if path.startswith(each))
        path = _BASES[base] + path.removeprefix(base).lstrip("/")
    return path


def _keyed_routes(service: Service) -> list[tuple[str, str, Operation]]:
    offered = service.config.enable_anthropic_api
    protocols = [each for each in _PROTOCOLS if offered or each is not MESSAGES]
    tables = (*(protocol.ROUTES for protocol in protocols), models.ROUTES, tokenize.ROUTES)
    operations = {**OPERATIONS, **STORED_OPERATIONS, "complete": complete}
    named = [(method, path, operations[name]) for table in tables for method, path, name in table]
    return [*named, *OWN_ROUTES]


def _route(service: Service, method: str, path: str, operation: Operation, *, needs_key: bool) -> Route:
    return Route(path, _Endpoint(service, path, operation, needs_key=needs_key), methods=[method])


class _Endpoint:
    """The ASGI application that answers the requests of one route.

    The router calls an object as it is; around a function, it would handle errors, which ``App`` does.
    """

    def __init__(self, service: Service, path: str, operation: Operation, *, needs_key: bool) -> None:
        self._service = service
        self._path = path
        self._operation = operation
        self._needs_key = needs_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises what its operation raises."""
        answer = await self.answer(scope, receive)
        await answer(scope, receive, send)

    def answer(self, scope: Scope, receive: Receive) -> Awaitable[ASGIApp]:
        """Return what will answer a request. Raises Unauthorized, and what the operation raises."""
        trace: Trace = scope["trace"]
        trace.route = self._path
        call = Call(self._service, scope, receive, scope["headers_by_name"], trace)
        if self._needs_key:
            call.authorize()
        return self._operation(call)


def _headers(scope: Scope) -> dict[str, str]:
    """Return the headers of a request. Their names are in lower case, as in ``scope``."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _error_response(http: HttpRequest, error: Exception) -> Response:
    """Return the error response in the format of the request's protocol."""
    known = _as_singletree_error(http, error)
    trace: Trace = http.scope["trace"]
    trace.failed(known)
    status, body = encode_error(known, http.url.path, http.scope["headers_by_name"], trace.request_id)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(known, Overloaded):
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
