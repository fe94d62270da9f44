"""Real harnesses on ``--workers 2``, while each request goes to another process than the one before."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from clients import install
from clients.conftest import TOKENIZER, Workspace, workspace  # noqa: F401 (a fixture)
from clients.harness import CODEX, PI, Harness
from clients.ran import perform
from clients.scenarios import ANSWER, COMMAND
from clients.scripts import HERMES, Style
from clients.served import Server, serving
from clients.turns import Stage, read, shell, text_for_user, thought
from singletree.prompts.tokenizer.huggingface import read_directory
from singletree.prompts.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.scale

OWN_SPELLING = Style(
    "own_spelling",
    (),
    lambda name, arguments: HERMES.call(name, arguments).replace('": ', '":   '),
    HERMES.breaks,
)
_PIECE = 65_536
_SKIPPED = {"connection", "keep-alive", "transfer-encoding", "content-length", "upgrade", "host"}


class Alternator(ThreadingHTTPServer):
    """Passes each request on over a connection of its own, in turns to each of two processes.

    Attributes:
        answered: the process that got each request.
    """

    daemon_threads = True

    def __init__(self, server: Server) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.server = server
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.answered: list[int] = []
        self._choosing = threading.Lock()

    def connection(self, path: str) -> HTTPConnection:
        """Return a connection to the process whose turn it is; only generations count."""
        with self._choosing:
            wanted = 1 + len(self.answered) % 2
            while True:
                connection = HTTPConnection("127.0.0.1", int(self.server.url.rpartition(":")[2]), timeout=120)
                id = f"where-{uuid.uuid4().hex}"
                connection.request("GET", "/health", headers={"x-request-id": id})
                connection.getresponse().read()
                found = re.search(rf"\[(\d)\] GET /health 200 id={id}", self.server.output.read_text())
                if found and int(found[1]) == wanted:
                    break
                connection.close()
            if path.startswith(("/v1/responses", "/v1/messages", "/v1/chat")):
                self.answered.append(wanted)
            return connection


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Alternator

    def do_POST(self) -> None:
        """Pass the request on, and the answer as it comes."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        connection = self.server.connection(self.path)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _SKIPPED}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _SKIPPED:
                self.send_header(name, value)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        while data := answer.read1(_PIECE):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")
        connection.close()

    do_GET = do_POST

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""


@contextmanager
def alternating(server: Server) -> Iterator[Alternator]:
    """An alternator before ``server`` until the block ends."""
    passing = Alternator(server)
    thread = threading.Thread(target=passing.serve_forever)
    thread.start()
    try:
        yield passing
    finally:
        passing.shutdown()
        thread.join()
        passing.server_close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two processes, and the tokenizer of a real model."""
    if not install.is_installed():
        pytest.skip("the harnesses are not installed: python tests/clients/install.py")
    flags = ("--workers", "2", "--log-level", "debug")
    with serving(install.folder() / TOKENIZER, tmp_path_factory.mktemp("harness"), flags) as started:
        yield started


@pytest.mark.parametrize(
    "harness", [CODEX, PI._replace(api="chat"), PI._replace(api="responses")], ids=lambda each: each.title
)
def test_each_prompt_continues_the_last_one_at_another_process(
    server: Server,
    workspace: Workspace,  # noqa: F811 (the fixture)
    tmp_path: Path,
    harness: Harness,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    tokenizer = Tokenizer(read_directory(install.folder() / TOKENIZER))
    turns = (
        (thought("I run the command first."), shell(COMMAND)),
        (thought("Again."), shell(COMMAND)),
        (thought("Now the notes."), text_for_user("I read the notes."), read()),
        (thought("I know both."), text_for_user(ANSWER)),
    )
    with alternating(server) as passing:
        stage = Stage(OWN_SPELLING, harness, workspace.notes)
        done = perform(
            server._replace(url=passing.url), stage, turns, home, lambda text: len(tokenizer.encode(text))
        )
    done.went_well(ANSWER, generations=len(turns))
    assert {1, 2} == set(passing.answered)
    for before, after in pairwise(done.plays):
        cached = before.prompt_token_ids + before.token_ids
        assert after.prompt_token_ids[: len(cached)] == cached
