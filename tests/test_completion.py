"""``singletree completion``, in real shells on a terminal: text is typed, and Tab completes it."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import time
from pathlib import Path

import pytest

from singletree.cli import main

SECONDS = 20.0
_CONTROL = re.compile(
    r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][A-Z0-9]|\x1b[=>]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f]"
)

SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source {script}"),
    "zsh": (["zsh", "-f", "-i"], "fpath=({folder} $fpath); autoload -U compinit; compinit -u -D"),
    "fish": (["fish", "--no-config", "-i"], "source {script}"),
}
"""For each shell its command line, and the command that loads a script."""


class Terminal:
    """A shell on a terminal of its own."""

    def __init__(self, line: list[str], home: Path) -> None:
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            environment = {**os.environ, "HOME": str(home), "TERM": "xterm", "PS1": "> "}
            os.execvpe(line[0], line, environment)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait(self, text: str) -> None:
        """Read until ``text`` is shown."""
        until = time.monotonic() + SECONDS
        while text not in _CONTROL.sub("", self.shown):
            assert time.monotonic() < until, repr(self.shown[-2000:])
            if select.select([self._terminal], [], [], 0.2)[0]:
                self.shown += os.read(self._terminal, 65536).decode(errors="replace")
                if "\x1b[6n" in self.shown:
                    # fish asks where the cursor is.
                    self.shown = self.shown.replace("\x1b[6n", "")
                    self.type("\x1b[1;1R")

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._terminal)


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, load = SHELLS[shell]
    if shutil.which(line[0]) is None:
        pytest.skip(f"{shell} is not installed")
    main(["completion", shell])
    script = tmp_path / "_singletree"
    script.write_text(capsys.readouterr().out)
    terminal = Terminal(line, tmp_path)
    try:
        terminal.type(load.format(script=script, folder=tmp_path) + "; echo rea''dy\n")
        terminal.wait("ready")
        for typed, completed in (
            ("singletree comple\t", "completion"),
            ("singletree serve --router-mode least\t", "least-loaded"),
            ("singletree serve --trace-l\t", "--trace-limit"),
            ("singletree completion fi\t", "fish"),
        ):
            terminal.shown = ""
            terminal.type(typed)
            terminal.wait(completed)
            terminal.type("\x15")  # Ctrl-U: the line is empty again.
    finally:
        terminal.close()
