"""A loopback port that passes on to a server, keeps what clients send, and breaks a connection off where told to."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

_PIECE = 65_536
_UNTIL_READ = 0.5
"""Seconds in which the client reads what it was sent: what is still unread when the connection breaks may get lost."""


class Relay:
    """Passes bytes on, both ways. The first answer that says ``cut_at``, if anything, ends there, as if the network had
    failed.

    ``before`` is called before anything that a client sent is passed on.

    Attributes:
        url: where it listens.
        asked: what clients sent, connection by connection.
        cuts: how many answers it broke off.
    """

    def __init__(self, url: str, cut_at: bytes = b"", before: Callable[[], None] = lambda: None) -> None:
        self._before = before
        self._server = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
        self._cut_at = cut_at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked: list[bytearray] = []
        self.cuts = 0

    def listen(self) -> None:
        """Until ``close``."""
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                _begin(self._ask, client, server)
                _begin(self._answer, client, server)

    def close(self) -> None:
        """No more connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        asked = bytearray()
        self.asked.append(asked)
        with suppress(OSError):
            while data := client.recv(_PIECE):
                asked += data
                self._before()
                server.sendall(data)
        _end(server)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        seen = b""
        with suppress(OSError):
            while data := server.recv(_PIECE):
                client.sendall(data)
                if self.cuts or not self._cut_at:
                    continue
                seen = seen[-len(self._cut_at) :] + data
                if self._cut_at in seen:
                    self.cuts += 1
                    time.sleep(_UNTIL_READ)
                    _end(server)
                    break
        _end(client)


def _begin(work: object, *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()  # type: ignore[arg-type]


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@contextmanager
def relaying(url: str, cut_at: str = "", before: Callable[[], None] = lambda: None) -> Iterator[Relay]:
    """A relay to the server at ``url`` that works until the block ends."""
    relay = Relay(url, cut_at.encode(), before)
    _begin(relay.listen)
    try:
        yield relay
    finally:
        relay.close()
