"""The ASGI application: routes, keys, request ids, and errors in the words of the protocol that asked.

It is served by Granian over ASGI, in the server's own process. ``benchmarks/http_server.py`` measures the
choice: CPU of the server process a chunk of one token's size, 64 streams at once, 2 cores. With everything
that is ready written as one piece (``Outbox``) Granian takes 1.2 µs, uvicorn with httptools 3.5 with a
write for each chunk and 5.6 through the outbox, with h11 7.1. Granian's own interface, RSGI, takes 1.1 but
has no back-pressure: a client that did not read made the process grow by 280 MB a second, which decides it.
At 100 to 200 chunks a second and stream, waking up costs most, and all of them are alike.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from singletree.errors import MethodNotAllowed, Overloaded, RouteNotFound, SingletreeError, Superseded
from singletree.protocols import models, tokenize
from singletree.server import websocket
from singletree.server.body import ClientLeft
from singletree.server.completing import complete
from singletree.server.identity import request_id
from singletree.server.operations import JSON, OPEN_ROUTES, OPERATIONS, OWN_ROUTES, Call, Operation, Service
from singletree.server.protocol import CHAT, COMPACT, COMPLETIONS, MESSAGES, RESPONSES, encode_error
from singletree.server.stored_operations import STORED_OPERATIONS
from singletree.server.stream import told
from singletree.server.tracing import Trace


class App:
    """The application. It starts and stops nothing: engines are the caller's."""

    def __init__(self, service: Service) -> None:
        self._service = service
        keyed = [_route(service, *route, needs_key=True) for route in _keyed_routes(service)]
        free = [_route(service, *route, needs_key=False) for route in OPEN_ROUTES]
        self._router = Router([*keyed, *free], redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection, as ASGI has it. Answers whatever goes wrong."""
        if scope["type"] == "websocket" and scope["path"] == websocket.PATH:
            await websocket.Socket(self._service, scope, receive, send).run()
            return
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        id = request_id(Headers(scope=scope).get("x-request-id"))
        trace = scope["trace"] = Trace(self._service.tracing, scope["method"], scope["path"], id)
        scope["app"] = self  # so that the router raises what it cannot route
        started = False

        async def send_marked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                trace.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_ids(id)]
            await send(message)

        try:
            await self._router(scope, receive, send_marked)
        except ClientLeft:
            pass
        except Exception as error:
            refusal = _refusal(HttpRequest(scope), error)
            if not started:
                await refusal(scope, receive, send_marked)
        finally:
            trace.close()


def _keyed_routes(service: Service) -> list[tuple[str, str, Operation]]:
    openai = [CHAT, RESPONSES, COMPACT, COMPLETIONS]
    protocols = [MESSAGES, *openai] if service.config.enable_anthropic_api else openai
    tables = (*(protocol.ROUTES for protocol in protocols), models.ROUTES, tokenize.ROUTES)
    operations = {**OPERATIONS, **STORED_OPERATIONS, "complete": complete}
    named = [(method, path, operations[name]) for table in tables for method, path, name in table]
    return [*named, *OWN_ROUTES]


def _route(service: Service, method: str, path: str, operation: Operation, *, needs_key: bool) -> Route:
    async def endpoint(http: HttpRequest) -> Response:
        trace: Trace = http.scope["trace"]
        trace.route = path
        call = Call(service, http, _lower(http.headers), trace)
        if needs_key:
            call.authorize()
        return await operation(call)  # type: ignore[return-value]  # any ASGI application will do

    return Route(path, endpoint, methods=[method])


def _lower(headers: Headers) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _refusal(http: HttpRequest, error: Exception) -> Response:
    """The answer to a request that failed, in the words of its protocol."""
    known = _as_ours(http, error)
    trace: Trace = http.scope["trace"]
    trace.failed(known)
    status, body = encode_error(known, http.url.path, _lower(http.headers), trace.request_id)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(known, Overloaded):
        headers["retry-after"] = str(max(1, round(known.retry_after)))
    if isinstance(known, Superseded):
        headers["x-should-retry"] = "false"  # the official SDKs repeat a 409
    return Response(b"" if http.method == "HEAD" else body, status, headers, media_type=JSON)


def _as_ours(http: HttpRequest, error: Exception) -> SingletreeError:
    if not isinstance(error, HTTPException):
        return told(error)
    path = ascii(http.url.path[:128])[1:-1]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return MethodNotAllowed(f"{http.method} is not offered on {path}; send {allowed}")
    return RouteNotFound(f"there is no {path} here")


def _ids(id: str) -> Iterable[tuple[bytes, bytes]]:
    """Under OpenAI's name for it and Anthropic's: both SDKs show it."""
    return (b"x-request-id", id.encode()), (b"request-id", id.encode())
