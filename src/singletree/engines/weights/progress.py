"""Shows the progress of a download or of another long task, as a bar or as plain lines."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

Progress = Callable[[str, int, int | None], None]
"""Called repeatedly, from any thread, with a label, the bytes so far, and the total bytes or None."""

_POLL_SECONDS = 0.2
_ONE_STEP = 1
_LINES = 10  # for one download, where progress is shown as plain lines


def no_progress(label: str, done: int, total: int | None) -> None:
    """Show no progress."""


class TerminalProgress:
    """Show progress as a bar on a terminal, elsewhere as at most a dozen plain lines. A context manager.

    Args:
        stream: where to print; None for standard error.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = False
        self._lock = threading.Lock()
        self._bar: Bar | None = None
        self._tasks: dict[str, TaskID] = {}
        self._steps: dict[str, int] = {}

    def __enter__(self) -> Self:
        with contextlib.suppress(ImportError):
            import rich.progress  # noqa: F401

            self._is_terminal = self._stream.isatty()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._stop()

    def __call__(self, label: str, done: int, total: int | None) -> None:
        """Show the progress of one task; a ``Progress``. The bar goes when all tasks are done, and comes again."""
        if not self._is_terminal:
            self._line(label, done, total)
            return
        with self._lock:
            if self._bar is None:
                self._bar = _bar(self._stream)
                self._bar.start()
            if label not in self._tasks:
                self._tasks[label] = self._bar.add_task(label, total=total)
            self._bar.update(self._tasks[label], completed=done, total=total)
            if done == total == _ONE_STEP:
                # The steps within this one, whose ends nobody reports, are over as well.
                for task in self._bar.tasks:
                    if task.total is None:
                        self._bar.update(task.id, completed=_ONE_STEP, total=_ONE_STEP)
            if self._bar.finished:
                self._stop()

    def _stop(self) -> None:
        """Take the bar away: a finished one would be drawn anew as long as the server runs."""
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._tasks = None, {}

    def _line(self, label: str, done: int, total: int | None) -> None:
        if label in self._steps and total == _ONE_STEP:
            return
        step = done * _LINES // total if total else 0
        if self._steps.get(label, -1) >= step:
            return
        self._steps[label] = step
        amount = f": {done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else ""
        print(f"{label}{amount}", file=self._stream, flush=True)


@contextlib.contextmanager
def shown_step(progress: Progress, label: str) -> Iterator[None]:
    """Show that something goes on whose length nobody knows, until the context ends."""
    progress(label, 0, None)
    try:
        yield
    finally:
        progress(label, _ONE_STEP, _ONE_STEP)


def _bar(stream: TextIO) -> Bar:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amounts = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), BarColumn(), *amounts, console=Console(file=stream))


@contextlib.contextmanager
def looking(look: Callable[[], None], name: str) -> Iterator[None]:
    """Call ``look`` again and again, in a thread called ``name``, until the context ends, and once after that."""
    done = threading.Event()

    def watch() -> None:
        while True:
            ended = done.wait(_POLL_SECONDS)
            look()
            if ended:
                return

    thread = threading.Thread(target=watch, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def report_folder_size(folder: Path, report: Callable[[int], None]) -> AbstractContextManager[None]:
    """Call ``report`` with the size of ``folder`` in bytes, again and again, until the context ends."""
    return looking(lambda: report(_size(folder)), "download progress")


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # Files may disappear meanwhile.
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total
