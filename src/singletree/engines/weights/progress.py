"""The progress of a download or of another long task."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

Progress = Callable[[str, int, int | None], None]
"""Called repeatedly, from any thread, with a label, the bytes so far, and the total bytes or None."""

_POLL_SECONDS = 0.2
ONE_STEP = 1
"""The total of a step whose length nobody knows."""


def no_progress(label: str, done: int, total: int | None) -> None:
    """Show no progress."""


@contextlib.contextmanager
def shown_step(progress: Progress, label: str) -> Iterator[None]:
    """Show that something goes on whose length nobody knows, until the context ends."""
    progress(label, 0, None)
    try:
        yield
    finally:
        progress(label, ONE_STEP, ONE_STEP)


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
