"""Shows the progress of a download or of another long task, as a bar or as plain lines."""

from __future__ import annotations

import contextlib
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from singletree.engines.progress import ONE_STEP

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

_LINES = 10  # for one download, where progress is shown as plain lines


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
            if done == total == ONE_STEP:
                # The steps within this one, whose ends nobody reports, are over as well.
                for task in self._bar.tasks:
                    if task.total is None:
                        self._bar.update(task.id, completed=ONE_STEP, total=ONE_STEP)
            if self._bar.finished:
                self._stop()

    def _stop(self) -> None:
        """Take the bar away: a finished one would be drawn anew as long as the server runs."""
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._tasks = None, {}

    def _line(self, label: str, done: int, total: int | None) -> None:
        if label in self._steps and total == ONE_STEP:
            return
        step = done * _LINES // total if total else 0
        if self._steps.get(label, -1) >= step:
            return
        self._steps[label] = step
        amount = f": {done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else ""
        print(f"{label}{amount}", file=self._stream, flush=True)


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
