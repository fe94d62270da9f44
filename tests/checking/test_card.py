"""The command, the score card and the plugin of pytest, on endpoints that answer from a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from singletree.checking import endpoint
from singletree.checking.contract import CHECKS
from singletree.checking.endpoint import Arriving, Endpoint, HttpConnector, NoAnswer, Unreachable
from singletree.checking.returned_turns import PROTOCOLS
from singletree.cli import main
from source import SOURCE

from .in_memory import Given

REFUSAL = {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}


class Table:
    """A server with Messages alone, which refuses everything; malformed requests in another protocol's shape."""

    refusal: ClassVar[dict[str, Any]] = REFUSAL

    def __init__(self, url: str) -> None:
        self.url = url

    def open(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Arriving:
        if "gone" in self.url:
            raise NoAnswer("connection refused")
        if path == "/v1/models":
            return Given(200, {"data": [{"id": "m", "max_model_len": 100}]})
        return Given(400 if path == "/v1/messages" else 404, self.refusal)


class Framework(Table):
    refusal: ClassVar[dict[str, Any]] = {"detail": "<no>"}


class Absent(Table):
    def open(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Arriving:
        return super().open(method, path.replace("messages", "none"), headers, body)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "HttpConnector", Table)


def status(*arguments: str) -> int:
    try:
        main(["check", *arguments])
    except SystemExit as exit:
        return int(exit.code or 0)
    return 0


@pytest.mark.usefixtures("table")
def test_a_card_without_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "card.json"
    assert status("http://there", "--only", "error-shape", "--json", str(file)) == 0
    card = json.loads(file.read_text())
    assert card["protocols"] == ["messages"]
    assert [(r["check"], r["protocol"], r["verdict"]) for r in card["results"]] == [
        ("error-shape", "messages", "pass")
    ]
    assert card["counts"]["pass"] == 1
    assert "error-shape" in capsys.readouterr().out


def test_a_failure_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(endpoint, "HttpConnector", Framework)
    page = tmp_path / "card.html"
    assert status("http://there", "--only", "error-shape,model-metadata", "--html", str(page)) == 1
    printed = capsys.readouterr().out
    assert "users see" in printed
    assert "reference" in printed
    assert "&lt;no&gt;" in page.read_text()
    assert "http" not in page.read_text().partition("<table>")[0].replace("http://there", "")


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_a_file_that_cannot_be_written_is_refused_before_the_checks(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("http://there", flag, str(tmp_path)) == 1
    printed = capsys.readouterr()
    assert printed.err == f"singletree: {tmp_path}: Is a directory; give a path that can be used\n"
    assert printed.out == ""


@pytest.mark.usefixtures("table")
def test_nothing_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("http://gone") == 2
    assert "no endpoint answers: connection refused" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(endpoint, "HttpConnector", Absent)
    assert status("http://there", "--model", "nope") == 2
    assert "/v1/responses for the model 'nope'; it lists m" in capsys.readouterr().err


def test_an_unknown_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("http://there", "--only", "everything") == 1
    assert "unknown check 'everything'" in capsys.readouterr().err


@pytest.mark.usefixtures("table")
def test_the_list_asks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("http://gone", "--list") == 0
    printed = capsys.readouterr().out
    assert all(check.name in printed for check in CHECKS)


@pytest.mark.parametrize("url", ["ftp://a", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(Unreachable):
        HttpConnector(url)


def test_each_check_is_explained() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.title and check.users and check.reference for check in CHECKS)


def test_a_key_goes_with_each_protocol() -> None:
    headers = Endpoint(Table("http://there"), "k")._headers
    assert headers("messages", None)["x-api-key"] == headers("messages", None)["authorization"][7:] == "k"
    assert "authorization" not in Endpoint(Table("http://there"), "sk-ant-1")._headers("messages", None)


CONFTEST = """
import sys
from checking.test_card import Framework
from singletree.checking import endpoint
endpoint.HttpConnector = Framework
"""


def test_the_plugin_makes_a_test_of_each_check(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    path = os.pathsep.join([str(SOURCE), str(SOURCE.parent / "tests"), str(SOURCE.parent / "docs")])
    command = [sys.executable, "-m", "pytest", "-p", "singletree.checking.pytest_plugin", "-q", "-rs"]
    options = ["--singletree-url", "http://there", "--singletree-only", "error-shape,compressed-bodies"]
    done = subprocess.run(
        [*command, *options, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 5 skipped" in done.stdout, done.stdout + done.stderr
    assert "users see: Harnesses show" in done.stdout
    assert done.returncode == 1


class _Endless:
    """An endpoint that keeps a stream alive for ever, in pieces of some bytes and seconds."""

    status = 200

    def __init__(self, clock: list[float], seconds: float, piece: bytes) -> None:
        self._clock, self._seconds, self._piece = clock, seconds, piece

    def open(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Arriving:
        return self

    def read(self) -> bytes:
        self._clock[0] += self._seconds
        return self._piece

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("seconds", "piece", "is_late", "words"),
    [(15.0, b": alive\n\n", True, "not ended within 120 s"), (0.0, b"x" * 2**20, False, "after 64 MiB")],
)
def test_an_answer_without_end_ends_the_check(
    seconds: float, piece: bytes, is_late: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("singletree.checking.endpoint.time.monotonic", lambda: clock[0])
    for ask in (Endpoint.stream, Endpoint.ask):
        endpoint = Endpoint(_Endless(clock, seconds, piece), model="m")
        with pytest.raises(NoAnswer, match=words) as caught:
            ask(endpoint, PROTOCOLS[0], endpoint.request(PROTOCOLS[0], "Hi"))
        assert caught.value.is_late is is_late
