"""``singletree catalog``, with a fake Codex; ``tests/clients`` runs the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from singletree.cli import launch as command
from singletree.cli import main

ENTRIES = {"models": [{"slug": "m"}, {"slug": "n"}]}


def codex(folder: Path, body: str) -> str:
    """Make a program from the ``body`` of a shell script."""
    path = folder / "codex"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def run(*arguments: str) -> None:
    main(["catalog", *arguments])


def test_what_codex_takes_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_served", lambda target: json.dumps(ENTRIES))
    program = codex(tmp_path, f"echo '{json.dumps(ENTRIES)}'")
    run("--codex", program)
    assert json.loads(capsys.readouterr().out) == ENTRIES
    run("--codex", program, "--output", str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text()) == ENTRIES
    assert "m, n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 'Error: missing field `priority`' >&2; exit 1", "missing field `priority`"),
        ('echo \'{"models": [{"slug": "m"}]}\'', "without n"),
    ],
)
def test_what_codex_does_not_take_is_not_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    body: str,
    message: str,
) -> None:
    monkeypatch.setattr(command, "_served", lambda target: json.dumps(ENTRIES))
    with pytest.raises(SystemExit):
        run("--codex", codex(tmp_path, body), "--output", str(tmp_path / "out.json"))
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_codexs_own_catalog_is_had_without_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = f"[ \"$3\" = --bundled ] && echo '{json.dumps(ENTRIES)}'"
    run("--bundled", "--codex", codex(tmp_path, body))
    assert json.loads(capsys.readouterr().out) == ENTRIES


def test_without_codex_the_cure_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--codex", "no-such-codex")
    assert "npm install" in capsys.readouterr().err
