"""Long tasks, such as a download: their progress, and a thread that can be left."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

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


_Result = TypeVar("_Result")


def in_own_thread(work: Callable[[], _Result], name: str) -> Future[_Result]:
    """Begin ``work`` in a thread of its own, and return what will have its result or error; it can only be left.

    ``asyncio.to_thread`` will not do where work may be given up: the end of the event loop waits for its threads, and
    so for the end of a download, or of a look-up of a name in a network that drops packets.
    """
    outcome: Future[_Result] = Future()

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # The caller's event loop has been closed.
            try:
                result = work()
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)

    outcome.set_running_or_notify_cancel()  # From here on it cannot be cancelled, only left.
    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
