"""``singletree service``: keep a server running for this user, through systemd or, on macOS, launchd."""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from pathlib import Path

from cyclopts import App

from singletree.cli.flag_values import Arguments
from singletree.errors import BadConfiguration
from singletree.private_files import create_private

app = App(name="service", help="Keep a server running for this user, also after a restart of the machine.")

_UNIT = """\
[Unit]
Description=singletree serves open models to agent harnesses
After=network-online.target

[Service]
ExecStart={command}
Restart=on-failure
RestartSec=5
TimeoutStopSec=45

[Install]
WantedBy=default.target
"""
_LABEL = "singletree.serve"


@app.command
def install(*arguments: Arguments) -> None:
    """Write the service, start it, and start it again with each login of this user.

    Parameters
    ----------
    arguments
        Arguments of `singletree serve`, after --. Paths must be absolute. Give keys as @FILE: all users of a machine
        can see the arguments of its programs.
    """
    from singletree.cli import app as command_line

    # What serve would refuse is refused now, not at each of its starts.
    command_line().parse_args(["serve", *arguments], print_error=False, exit_on_error=False)
    path = _definition()
    command = [sys.executable, "-m", "singletree", "serve", *arguments]
    path.parent.mkdir(parents=True, exist_ok=True)
    create_private(path)
    if _is_mac():
        job = {"Label": _LABEL, "ProgramArguments": command, "RunAtLoad": True}
        log = str(Path.home() / "Library" / "Logs" / "singletree.log")
        keep = {"KeepAlive": {"SuccessfulExit": False}, "StandardErrorPath": log, "StandardOutPath": log}
        path.write_bytes(plistlib.dumps(job | keep))
        _run("launchctl", "bootout", f"{_domain()}/{_LABEL}", may_fail=True)
        _run("launchctl", "bootstrap", _domain(), str(path))
    else:
        path.write_text(_UNIT.format(command=" ".join(map(_quoted, command))), encoding="utf-8")
        _run("systemctl", "--user", "daemon-reload")
        _run("systemctl", "--user", "enable", path.name)
        _run("systemctl", "--user", "restart", path.name)
        log = f"journalctl --user --unit {path.name}"
    print(f"wrote      {path}\nits log    {log}\nremove it  singletree service remove")


@app.command
def status() -> None:
    """Print whether the service runs, as systemd or launchd report it; the exit status is theirs."""
    if not _definition().exists():
        raise BadConfiguration("the service is not installed; install it with `singletree service install`")
    if _is_mac():
        sys.exit(_run("launchctl", "print", f"{_domain()}/{_LABEL}", may_fail=True))
    sys.exit(_run("systemctl", "--user", "--no-pager", "status", _definition().name, may_fail=True))


@app.command
def remove() -> None:
    """Stop the service and delete its file. Models and stored responses stay."""
    path = _definition()
    if not path.exists():
        raise BadConfiguration(f"there is no {path}: the service is not installed")
    if _is_mac():
        _run("launchctl", "bootout", f"{_domain()}/{_LABEL}", may_fail=True)
    else:
        _run("systemctl", "--user", "disable", "--now", path.name, may_fail=True)
    path.unlink()
    if not _is_mac():
        _run("systemctl", "--user", "daemon-reload", may_fail=True)
    print(f"removed    {path}")


def _is_mac() -> bool:
    return sys.platform == "darwin"


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _definition() -> Path:
    if _is_mac():
        return Path.home() / "Library" / "LaunchAgents" / f"{_LABEL}.plist"
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "systemd" / "user" / "singletree.service"


def _quoted(argument: str) -> str:
    """Quote an argument for ``ExecStart``, where %, $, backslash and quotation marks have a meaning."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _run(*command: str, may_fail: bool = False) -> int:
    """Run a command of the system, and return its exit status.

    Raises:
        BadConfiguration: it is not there; or it fails, and may not.
    """
    try:
        done = subprocess.run(command, stderr=None if may_fail else subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise BadConfiguration(
            f"{command[0]} does not start ({error.strerror}): a service needs systemd or launchd; start "
            f"`singletree serve` in another way, such as the container of docs/deploy.md"
        ) from None
    if done.returncode and not may_fail:
        raise BadConfiguration(
            f"`{' '.join(command)}` fails: {done.stderr.strip()}; the file of the service is {_definition()}: "
            "install it as a user who is logged in, or start `singletree serve` in another way"
        )
    return done.returncode
