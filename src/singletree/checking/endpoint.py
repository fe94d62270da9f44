"""An endpoint under check: its requests over HTTP, and what it has."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from singletree.checking.returned_turns import PROTOCOLS, TurnProtocol, WireBody
from singletree.checking.streams import READERS, Counts, Decoder, TurnReader, read_counts

SECONDS = 60.0
"""How long the endpoint may send nothing."""
_LONGEST_SECONDS = 120.0
_MOST_BYTES = 64 * 2**20
"""How long an answer may take in all, and how long it may be: one that never ends must not hold up the checks."""

_FEWEST_TOKENS = {"messages": 1, "chat": 1, "responses": 16}
_ABSENT = (404, 405, 501)
_WINDOWS = ("max_model_len", "context_window", "context_length", "max_context_length", "max_input_tokens")
_T = TypeVar("_T")
OfferedTool = tuple[str, str, WireBody]


class Unreachable(Exception):
    """No endpoint answers at the URL, or it has none of the three protocols."""


class NoAnswer(Exception):
    """The connection broke, or nothing came in time (``is_late``)."""

    def __init__(self, error: Exception | str) -> None:
        super().__init__(str(error) or type(error).__name__)
        self.is_late = isinstance(error, TimeoutError)


class Arriving(Protocol):
    """An answer that arrives. ``read`` returns what is there, and nothing at the end; ``close`` hangs up."""

    status: int

    def read(self) -> bytes: ...

    def close(self) -> None: ...


class Connector(Protocol):
    """Opens requests. Raises NoAnswer."""

    def open(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Arriving: ...


class HttpConnector:
    """One connection a request, over the standard library's client."""

    def __init__(self, url: str, seconds: float = SECONDS) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise Unreachable(f"{url!r} has no port from 1 to 65535") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Unreachable(f"{url!r} is not a URL; give one such as http://127.0.0.1:8000")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._seconds = seconds

    def open(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Arriving:
        connection: HTTPConnection
        if self._secure:
            context = ssl.create_default_context()
            connection = HTTPSConnection(self._host, self._port, timeout=self._seconds, context=context)
        else:
            connection = HTTPConnection(self._host, self._port, timeout=self._seconds)
        try:
            connection.request(method, self._prefix + path, body or None, dict(headers))
            return _HttpAnswer(connection, connection.getresponse())
        except (OSError, HTTPException) as error:
            connection.close()
            raise NoAnswer(error) from None


class _HttpAnswer:
    def __init__(self, connection: HTTPConnection, response: HTTPResponse) -> None:
        self._connection, self._response = connection, response
        self.status = response.status

    def read(self) -> bytes:
        try:
            return self._response.read1(65_536)
        except (OSError, HTTPException) as error:
            raise NoAnswer(error) from None

    def close(self) -> None:
        self._response.close()
        self._connection.close()


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A whole answer that was not streamed."""

    protocol: str
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON; None if it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def counts(self) -> Counts:
        value = self.json
        return read_counts(self.protocol, value.get("usage") if isinstance(value, dict) else None)

    def __str__(self) -> str:
        return f"{self.status} {self.body[:160].decode(errors='replace')}"


class Refused(Exception):
    """A request was answered with an error in place of a stream or a turn."""

    def __init__(self, answer: WholeAnswer) -> None:
        super().__init__(f"answered with {answer}")
        self.answer = answer


@dataclass
class Endpoint:
    """What answers at a URL.

    Attributes:
        model: the name in requests; by default the first of its list.
        models: its list of models.
        protocols: those that it has.
        window: the model's context window, where the list tells it.
        is_scripted: whether prompts choose what the engine plays (``singletree serve --engine scripted``).
        plays_calls: whether it reads a call that its engine was made to play.
    """

    connector: Connector
    key: str = ""
    second_key: str = ""
    model: str = ""
    models: list[dict[str, Any]] = field(default_factory=list)
    protocols: tuple[TurnProtocol, ...] = ()
    window: int | None = None
    is_scripted: bool = False
    plays_calls: bool = False
    kept: dict[object, Any] = field(default_factory=dict)
    limits: dict[str, str] = field(
        default_factory=lambda: {
            "messages": "max_tokens",
            "chat": "max_tokens",
            "responses": "max_output_tokens",
        }
    )

    def discover(self) -> None:
        """Find out which protocols, models and depths it has. Raises Unreachable."""
        try:
            self._discover()
        except (NoAnswer, Refused) as error:
            raise Unreachable(f"no endpoint answers: {error}; give the URL of a running server") from None

    def _discover(self) -> None:
        listed = self.get("/v1/models").json
        data = listed.get("data") if isinstance(listed, dict) else None
        self.models = [each for each in data or () if isinstance(each, dict) and each.get("id")]
        self.model = self.model or next((each["id"] for each in self.models), "")
        if not self.model:
            raise Unreachable("it lists no models at /v1/models: give --model")
        own = next((each for each in self.models if each["id"] == self.model), {})
        stated = [own.get(name) for name in _WINDOWS] + [(own.get("meta") or {}).get("n_ctx")]
        self.window = next((value for value in stated if isinstance(value, int)), None)
        self.protocols = tuple(protocol for protocol in PROTOCOLS if self._has(protocol))
        if not self.protocols:
            names = ", ".join(str(each["id"]) for each in self.models)
            unlisted = "" if own else f" for the model {self.model!r}; it lists {names or 'no models'}"
            raise Unreachable(
                f"it has none of /v1/messages, /v1/chat/completions and /v1/responses{unlisted}"
            )
        self._look_deeper(self.protocols[-1])

    def _has(self, protocol: TurnProtocol) -> bool:
        answer = self.ask(protocol, self.request(protocol, "Hi"))
        if answer.status in (401, 403):
            raise Unreachable(f"it refuses the key: {answer}")
        if answer.status == 400 and b"max_completion_tokens" in answer.body:
            self.limits["chat"] = "max_completion_tokens"
        return answer.status not in _ABSENT

    def _look_deeper(self, protocol: TurnProtocol) -> None:
        answer = self.ask(protocol, self.request(protocol, "[[gen:80:80:0]]", tokens=100))
        self.is_scripted = answer.status == 200 and b"Rain fell" in answer.body
        if self.is_scripted:
            call = '<tool_call>\n{"name": "lookup", "arguments": {"city": "Oslo"}}\n</tool_call>'
            reader = self.stream(
                protocol, self.request(protocol, f"[[echo:{call}]]", tools=[LOOKUP], tokens=200)
            )
            self.plays_calls = [block.kind for block in reader.blocks] == ["call"]

    def request(
        self,
        protocol: TurnProtocol,
        asked: str | Sequence[WireBody],
        turns: Sequence[WireBody] = (),
        *,
        tools: Sequence[OfferedTool] = (),
        tokens: int | None = None,
        **more: Any,
    ) -> WireBody:
        """Return a request of ``protocol``: a question or whole messages, turns after it, a limit of output tokens.

        The limit is the least that the protocol allows by default.
        """
        first = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        limit = tokens or _FEWEST_TOKENS[protocol.name]
        body: WireBody = {
            "model": self.model,
            protocol.history: [*first, *turns],
            self.limits[protocol.name]: limit,
        }
        if tools:
            body["tools"] = [protocol.tool(*tool) for tool in tools]
        if protocol.name == "responses":
            body["store"] = False
        return body | more

    def once(self, key: object, make: Callable[[], _T]) -> _T:
        """Return what ``make`` returned for ``key`` the first time."""
        if key not in self.kept:
            self.kept[key] = make()
        value: _T = self.kept[key]
        return value

    def get(self, path: str, key: str | None = None) -> WholeAnswer:
        return self._whole("", self.connector.open("GET", path, self._headers("", key), b""))

    def ask(
        self,
        protocol: TurnProtocol,
        body: WireBody | bytes,
        headers: Mapping[str, str] | None = None,
        *,
        key: str | None = None,
        below: str = "",
    ) -> WholeAnswer:
        """Return the answer to a request, whatever its status. ``below`` goes after the protocol's path."""
        return self._whole(protocol.name, self._open(protocol, body, headers, key, below))

    def turn(
        self, protocol: TurnProtocol, body: WireBody, headers: Mapping[str, str] | None = None
    ) -> WholeAnswer:
        """Return an answer with a turn. Raises Refused."""
        answer = self.ask(protocol, body, headers)
        if answer.status != 200:
            raise Refused(answer)
        return answer

    def stream(
        self,
        protocol: TurnProtocol,
        body: WireBody,
        headers: Mapping[str, str] | None = None,
        *,
        key: str | None = None,
        until: int | None = None,
    ) -> TurnReader:
        """Return a streamed turn; hang up after ``until`` events. Raises Refused."""
        options = {"stream_options": {"include_usage": True}} if protocol.name == "chat" else {}
        began = time.perf_counter()
        arriving = self._open(protocol, {**body, "stream": True, **options}, headers, key, "")
        if arriving.status != 200:
            raise Refused(self._whole(protocol.name, arriving))
        reader, decoder, count = READERS[protocol.name](), Decoder(), 0
        with closing(arriving):
            for data in _pieces(arriving):
                seconds = time.perf_counter() - began
                for event in decoder.feed(data):
                    reader.feed(seconds, event.event, event.data)
                    count += 1
                if until is not None and count >= until:
                    return reader
        reader.end()
        return reader

    def _open(
        self,
        protocol: TurnProtocol,
        body: WireBody | bytes,
        headers: Mapping[str, str] | None,
        key: str | None,
        below: str,
    ) -> Arriving:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {**self._headers(protocol.name, key), **(headers or {})}
        return self.connector.open("POST", protocol.path + below, given, data)

    def _headers(self, protocol: str, key: str | None) -> dict[str, str]:
        key = self.key if key is None else key
        headers = {"content-type": "application/json", "user-agent": "singletree-check"}
        if protocol == "messages":
            headers |= {"anthropic-version": "2023-06-01", **({"x-api-key": key} if key else {})}
        if key and not (protocol == "messages" and key.startswith("sk-ant-")):
            headers["authorization"] = f"Bearer {key}"
        return headers

    def _whole(self, protocol: str, arriving: Arriving) -> WholeAnswer:
        with closing(arriving):
            return WholeAnswer(protocol, arriving.status, b"".join(_pieces(arriving)))


def _pieces(arriving: Arriving) -> Iterator[bytes]:
    """Yield what arrives, to the end. Raises NoAnswer for an answer that does not end."""
    end, size = time.monotonic() + _LONGEST_SECONDS, 0
    while data := arriving.read():
        yield data
        size += len(data)
        if size > _MOST_BYTES:
            raise NoAnswer(f"the answer goes on after {_MOST_BYTES >> 20} MiB")
        if time.monotonic() > end:
            raise NoAnswer(TimeoutError(f"the answer has not ended within {_LONGEST_SECONDS:.0f} s"))


LOOKUP: OfferedTool = (
    "lookup",
    "Look up the weather of a city.",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
        "required": ["city"],
    },
)
"""The tool of the checks."""
