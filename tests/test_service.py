"""``singletree service``: the files that it writes, and the commands of the system that it runs."""

from __future__ import annotations

import plistlib
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from singletree.cli import main

ARGUMENTS = ("--model", '/models/50% "best" $HOME\\x.gguf', "--port", "8123")


def run(*arguments: str) -> int:
    try:
        main(("service", *arguments))
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put stand-ins of systemctl and launchctl into the path; they write their arguments into the file ``ran``."""
    for name in ("systemctl", "launchctl"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/ran\nexit ${{STATUS:-0}}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


def ran(system: Path) -> list[str]:
    return (system / "ran").read_text().splitlines()


def test_systemd_starts_what_was_asked_for(system: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("install", "--", *ARGUMENTS) == 0
    unit = system / ".config/systemd/user/singletree.service"
    [line] = [each for each in unit.read_text().splitlines() if each.startswith("ExecStart=")]
    assert line == (
        f'ExecStart="{sys.executable}" "-m" "singletree" "serve" "--model" '
        '"/models/50%% \\"best\\" $$HOME\\\\x.gguf" "--port" "8123"'
    )
    assert stat.S_IMODE(unit.stat().st_mode) == 0o600
    assert ran(system)[-1] == "systemctl --user restart singletree.service"
    assert "remove it  singletree service remove" in capsys.readouterr().out
    assert run("status") == 0
    assert run("remove") == 0
    assert not unit.exists()
    assert "systemctl --user disable --now singletree.service" in ran(system)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(system: Path) -> None:
    assert run("install", "--", *ARGUMENTS) == 0
    unit = system / ".config/systemd/user/singletree.service"
    command = ["systemd-analyze", "verify", "--user", "--man=no", str(unit)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(system), "XDG_RUNTIME_DIR": str(system)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_launchd_starts_what_was_asked_for(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert run("install", "--", *ARGUMENTS) == 0
    job = system / "Library/LaunchAgents/singletree.serve.plist"
    arguments = plistlib.loads(job.read_bytes())["ProgramArguments"]
    assert arguments == [sys.executable, "-m", "singletree", "serve", *ARGUMENTS]
    assert ran(system)[-1].startswith("launchctl bootstrap gui/")
    assert run("remove") == 0
    assert not job.exists()


def test_a_system_that_refuses_is_named(
    system: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STATUS", "1")
    assert run("install") == 1
    assert "`systemctl --user daemon-reload` fails" in capsys.readouterr().err


def test_without_a_service_nothing_is_asked_of_the_system(
    system: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("status") == 1
    assert run("remove") == 1
    assert "not installed" in capsys.readouterr().err
    assert not (system / "ran").exists()


def test_without_systemd_another_way_is_named(
    system: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(system))
    assert run("install") == 1
    assert "a service needs systemd or launchd" in capsys.readouterr().err
