"""Reads the log of an engine that starts in other processes: how far it is, and which limit ended it.

vLLM and SGLang load the model in child processes. When that fails, the exception in this process names no cause; the
cause is in the log of the child. So both engines write their log to a file, which is read here.
"""

from __future__ import annotations

import contextlib
import json
import logging.config
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from singletree.engines.weights.progress import Progress

_POLL_SECONDS = 0.2
_LAST_LINES = 3
_RAISED = re.compile(r"^.*?\b((?:[A-Z]\w*)?(?:Error|Exception): .+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StartupStep:
    """A step of the start.

    Attributes:
        pattern: regular expression for a line of the log that the step begins with.
        label: what the user reads.
    """

    pattern: str
    label: str


@dataclass(frozen=True, slots=True)
class StartupLimit:
    """A limit at which the start may end.

    Attributes:
        pattern: regular expression for the engine's own message.
        problem: which limit was hit; ``{name}`` stands for a named group of ``pattern``.
        cure: what to change, likewise.
    """

    pattern: str
    problem: str
    cure: str


def explain_failure(log: str, limits: Sequence[StartupLimit]) -> str:
    """Return which of ``limits`` the engine hit and what to change; else the last errors of its log.

    Args:
        log: the text of the log.
        limits: the known ones; the first that matches counts.
    """
    for limit in limits:
        if found := re.search(limit.pattern, log, re.DOTALL):
            given = {name: value or "" for name, value in found.groupdict().items()}
            return f"{limit.problem.format(**given)}; {limit.cure.format(**given)}"
    raised = list(dict.fromkeys(match[1].strip()[:300] for match in _RAISED.finditer(log)))
    return "; ".join(raised[-_LAST_LINES:]) or "its log names no cause"


@contextlib.contextmanager
def follow_steps(path: Path, steps: Sequence[StartupStep], progress: Progress) -> Iterator[None]:
    """Report each of ``steps`` once, when its line appears in the log at ``path``, until the context ends."""
    done = threading.Event()

    def watch() -> None:
        remaining, position = list(steps), 0
        while True:
            ended = done.wait(_POLL_SECONDS)
            lines, position = _complete_lines(path, position)
            for line in lines:
                for step in [each for each in remaining if re.search(each.pattern, line)]:
                    remaining.remove(step)
                    progress(step.label, 0, None)
            if ended:
                return

    thread = threading.Thread(target=watch, name="engine start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _complete_lines(path: Path, position: int) -> tuple[list[str], int]:
    """Return the whole lines after byte ``position``, and the position behind them."""
    try:
        with path.open("rb") as file:
            file.seek(position)
            data = file.read()
    except OSError:
        return [], position
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode("utf-8", "replace").splitlines(), position + len(whole)


def log_to_file(package: str, variable: str) -> Path | None:
    """Make the processes of an engine log to a new file, and return it; None if the user has set up its log.

    Args:
        package: the package, which is also the name of its logger.
        variable: the environment variable that names a file with settings for Python's ``dictConfig``.
    """
    prefix = f"singletree-{package}-"
    given = os.environ.get(variable)
    if given and not Path(given).parent.name.startswith(prefix):
        return None
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    log, settings = folder / f"{package}.log", folder / "logging.json"
    line = {"format": "%(asctime)s %(levelname)s %(process)d %(message)s"}
    handler = {"class": "logging.FileHandler", "filename": str(log), "formatter": "line", "level": "INFO"}
    wanted = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": line},
        "handlers": {"file": handler},
        "loggers": {package: {"handlers": ["file"], "level": "INFO", "propagate": False}},
    }
    settings.write_text(json.dumps(wanted), encoding="utf-8")
    os.environ[variable] = str(settings)
    # SGLang logs before it reads the settings: all its arguments, as one line of thousands of characters.
    logging.config.dictConfig(wanted)
    return log


def read_log(path: Path) -> str:
    """Return the text of the log at ``path``; empty when there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
