"""What each route does. A protocol's ``ROUTES`` name these by their keys in ``OPERATIONS``."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from singletree import __version__
from singletree.conversation import Request
from singletree.errors import InvalidRequest, MethodNotAllowed, Overloaded, Unauthorized
from singletree.protocols import messages, models, responses, tokenize
from singletree.server import pipeline
from singletree.server.answer import Answer, Header
from singletree.server.body import read_body
from singletree.server.catalog import Catalog, Model
from singletree.server.config import Config
from singletree.server.protocol import WireProtocol, speaking
from singletree.server.tracing import Trace, Tracing

JSON = "application/json"

_WARNING_BYTES = 1024


@dataclass(slots=True)
class Service:
    """What all operations share. ``closing`` is set once the server is on its way out."""

    config: Config
    catalog: Catalog
    tracing: Tracing
    closing: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request. ``headers`` have lower-case names."""

    service: Service
    http: HttpRequest
    headers: Mapping[str, str]
    trace: Trace

    @property
    def protocol(self) -> WireProtocol:
        """The protocol that it speaks."""
        return speaking(self.http.url.path, self.headers)

    async def body(self) -> bytes:
        """Its body."""
        return await read_body(self.headers, self.http.receive, self.service.config.body_limit)

    def authorize(self) -> None:
        """Raises Unauthorized unless it brings one of the keys, if there are any."""
        keys = self.service.config.api_key
        if not keys:
            return
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        given = [self.headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        if not any(given):
            raise Unauthorized("no API key: send it as x-api-key, or as Authorization: Bearer")
        # A sum, not any(): every comparison is made, so that time tells nothing.
        if not sum(hmac.compare_digest(one.encode(), key.encode()) for one in given for key in keys):
            raise Unauthorized("the API key is wrong; send one that the server was started with (--api-key)")


def _input_tokens(tokens: int) -> bytes:
    return b'{"object":"response.input_tokens","input_tokens":%d}' % tokens


COUNTING: dict[str, tuple[Callable[[bytes, Mapping[str, str]], Request], Callable[[int], bytes]]] = {
    "/v1/messages/count_tokens": (messages.decode_count, messages.encode_count),
    "/v1/responses/input_tokens": (responses.decode, _input_tokens),
}
"""How the requests that only count are read, and their answers written."""

Operation = Callable[[Call], Awaitable[ASGIApp]]


async def create(call: Call) -> ASGIApp:
    """One turn, streamed or whole."""
    service, protocol = call.service, call.protocol
    request = protocol.decode(await call.body(), call.headers)
    if service.closing:
        raise Overloaded("the server is shutting down; try again in a moment")
    _refuse_stored(request)
    model = service.catalog.get(request.model)
    generation = pipeline.prepare(model, request)
    return Answer(
        protocol,
        generation,
        call.trace,
        headers=_warnings([*request.warnings, *_unseen_tools(model, request)]),
        keep_alive_seconds=service.config.keep_alive_seconds,
    )


async def count_tokens(call: Call) -> ASGIApp:
    """How long the prompt of a request would be, exactly."""
    decode, encode = COUNTING[call.trace.route]
    request = decode(await call.body(), call.headers)
    prompt = pipeline.write_prompt(call.service.catalog.get(request.model), request)
    return Response(encode(len(prompt.token_ids)), media_type=JSON)


async def list_models(call: Call) -> ASGIApp:
    """The models, in the shape that the client reads."""
    query = dict(call.http.query_params)
    infos = [model.info for model in call.service.catalog.models]
    return Response(models.encode_models(infos, models.style(call.headers, query), query), media_type=JSON)


async def get_model(call: Call) -> ASGIApp:
    """One model."""
    model = call.service.catalog.get(call.http.path_params["id"])
    style = models.style(call.headers, dict(call.http.query_params))
    return Response(models.encode_model(model.info, style), media_type=JSON)


async def tokenize_text(call: Call) -> ASGIApp:
    """A text, or a conversation, as tokens."""
    wanted = tokenize.decode_tokenize(await call.body(), call.headers)
    model = call.service.catalog.get(wanted.model)
    if wanted.chat is None:
        ids = model.tokenizer.encode(wanted.prompt or "")
    else:
        opened = wanted.add_generation_prompt
        ids = pipeline.write_prompt(model, wanted.chat, add_generation_prompt=opened).token_ids
    texts = [model.tokenizer.decode([id]) for id in ids] if wanted.return_token_strs else None
    body = tokenize.encode_tokenize(ids, max_model_len=model.context_window, token_strs=texts)
    return Response(body, media_type=JSON)


async def detokenize(call: Call) -> ASGIApp:
    """Tokens as text."""
    wanted = tokenize.decode_detokenize(await call.body(), call.headers)
    model = call.service.catalog.get(wanted.model)
    known = model.tokenizer.vocabulary_size
    for i, token in enumerate(wanted.tokens):
        if not 0 <= token < known:
            raise InvalidRequest(
                f"tokens.{i} is {token}; this model's ids go from 0 to {known - 1}", param=f"tokens.{i}"
            )
    return Response(tokenize.encode_detokenize(model.tokenizer.decode(wanted.tokens)), media_type=JSON)


async def upgrade(call: Call) -> ASGIApp:
    """Codex asks for a WebSocket first, and falls back to HTTP at once when it reads 426."""
    if "upgrade" not in call.headers:
        raise MethodNotAllowed("GET /v1/responses is not offered; responses are not stored. Send POST")
    return Response(status_code=426, headers={"upgrade": "HTTP/1.1"})


async def health(call: Call) -> ASGIApp:
    """Whether requests are taken."""
    if call.service.closing:
        return Response(b'{"status":"closing"}', status_code=503, media_type=JSON)
    return Response(b'{"status":"ok"}', media_type=JSON)


async def metrics(call: Call) -> ASGIApp:
    """Prometheus."""
    tracing = call.service.tracing
    return Response(tracing.exposition(), media_type=tracing.content_type)


async def hello(call: Call) -> ASGIApp:
    """Harnesses look whether anybody is there."""
    return Response(f"singletree {__version__}\n", media_type="text/plain")


OPERATIONS: dict[str, Operation] = {
    "create": create,
    "count_tokens": count_tokens,
    "list_models": list_models,
    "get_model": get_model,
    "tokenize": tokenize_text,
    "detokenize": detokenize,
}

OPEN_ROUTES: list[tuple[str, str, Operation]] = [
    ("GET", "/", hello),
    ("GET", "/api/hello", hello),
    ("GET", "/health", health),
    ("GET", "/metrics", metrics),
]
"""Routes that take no key."""


def _refuse_stored(request: Request) -> None:
    wanted = request.extra.get("stateful")
    if wanted:
        field = next(iter(wanted))
        raise InvalidRequest(f"{field}: this server stores no responses; send the whole input", param=field)


def _unseen_tools(model: Model, request: Request) -> list[str]:
    if model.template.reads.tools or not request.conversation.tools:
        return []
    return ["tools: the chat template of this model prints none, so the model does not see them"]


def _warnings(warnings: list[str]) -> list[Header]:
    if not warnings:
        return []
    text = "; ".join(warnings).encode("ascii", "replace")[:_WARNING_BYTES]
    return [(b"x-singletree-warning", bytes(b if 32 <= b < 127 else 32 for b in text))]
