"""A receiver of OTLP over HTTP on loopback: it reads what the SDK sends as the protocol defines it."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_SECONDS = 30.0


class Receiver(ThreadingHTTPServer):
    """Keeps the spans that it gets.

    Attributes:
        spans: (resource attributes, span) of each, in the order of their arrival.
        headers: those of each request.
        answers: while it is not set, requests wait.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiving)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.spans: list[tuple[dict[str, Any], Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answers = threading.Event()
        self.answers.set()

    def wait(self, count: int) -> list[Any]:
        """Return the spans when there are ``count`` of them."""
        until = time.monotonic() + _SECONDS
        while len(self.spans) < count:
            assert time.monotonic() < until, [span.name for _, span in self.spans]
            time.sleep(0.02)
        return [span for _, span in self.spans]


class _Receiving(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Receiver

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
            ExportTraceServiceResponse,
        )

        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.answers.wait(_SECONDS)
        assert self.path == "/v1/traces"
        assert self.headers["content-type"] == "application/x-protobuf"
        if self.headers["content-encoding"] == "gzip":
            body = gzip.decompress(body)
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        for each in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = attributes(each.resource)
            self.server.spans += [(resource, span) for scope in each.scope_spans for span in scope.spans]
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver until the block ends."""
    receiver = Receiver()
    thread = threading.Thread(target=receiver.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.answers.set()
        receiver.shutdown()
        receiver.server_close()


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in value.attributes}
