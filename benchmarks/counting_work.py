"""Counts what the project's code does: calls, bytecode instructions and memory, which no other program disturbs."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import singletree
from source import DOORS

_PACKAGE = "singletree"
_TEMPLATE = "<template>"
"""The file name of compiled chat templates."""

_INLINED = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})
"""Functions that newer versions of Python inline (PEP 709), so that they are calls in some only."""


@dataclass(slots=True)
class Work:
    """What was counted.

    Attributes:
        calls: of functions of the project, each time that a generator or coroutine goes on included, and of functions
            in C that it calls. Much the same in every version of Python.
        instructions: bytecode instructions of the project. They differ between minor versions of Python, and hardly
            between patch versions.
        crossings: ways from one area of the project to another that the calls took until the engine was asked
            (``AreaCrossings``); 0 where they were not counted.
        peak: bytes of memory that Python's allocator gave out at most beside what was in use before.
    """

    calls: int = 0
    instructions: int = 0
    peak: int = 0
    crossings: int = 0

    def less(self, other: Work, parts: int) -> Work:
        """Return what this has more than ``other``, divided by ``parts``. The peak stays."""
        return Work(
            (self.calls - other.calls) // parts, (self.instructions - other.instructions) // parts, self.peak
        )


class WorkCounter:
    """Counts in the thread that made it, while ``counting`` is entered."""

    def __init__(self) -> None:
        self._own: dict[CodeType, bool] = {}

    @contextmanager
    def counting(self) -> Iterator[Work]:
        """Count calls and instructions into the value that is yielded."""
        work = Work()
        gc.collect()
        gc.disable()
        sys.setprofile(self._profiler(work))
        sys.settrace(self._tracer(work))
        try:
            yield work
        finally:
            sys.settrace(None)
            sys.setprofile(None)
            gc.enable()

    def _is_own(self, frame: FrameType) -> bool:
        code = frame.f_code
        known = self._own.get(code)
        if known is None:
            name = frame.f_globals.get("__name__", "")
            known = name.partition(".")[0] == _PACKAGE or code.co_filename == _TEMPLATE
            self._own[code] = known
        return known

    def _profiler(self, work: Work) -> Callable[[FrameType, str, Any], None]:
        is_own = self._is_own

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            counts = event == "c_call" or (event == "call" and frame.f_code.co_name not in _INLINED)
            if counts and is_own(frame):
                work.calls += 1

        return profile

    def _tracer(self, work: Work) -> Callable[[FrameType, str, Any], Any]:
        is_own = self._is_own

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "opcode":
                work.instructions += 1
            return step

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if not is_own(frame):
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            return step

        return trace


_FOLDER = Path(singletree.__file__).parent


def area_of(module: str) -> str | None:
    """Return the area of a module: its folder in ``singletree``, of ``server`` its room; None for other modules.

    Modules beside those folders are shared by all of them, so that a call to one crosses nothing.
    """
    top, *parts = module.split(".")
    depth = 2 if parts[:1] == ["server"] else 1
    folder = "/".join(parts[:depth])
    is_area = len(parts) >= depth and (folder in DOORS or (_FOLDER / folder).is_dir())
    return folder if top == _PACKAGE and is_area else None


class AreaCrossings:
    """Collects the ways from one area to another that calls take until an engine is asked to generate.

    A way is a pair of areas: the second is that of a function which is called, the first that of the nearest function
    of the project that called it. Where the same way is taken again, it is one; a return, and a coroutine that goes on,
    are no call. So the figure is how many boundaries a reader meets who follows a request.
    """

    def __init__(self) -> None:
        self.ways: set[tuple[str, str]] = set()
        self._known: set[FrameType] = set()
        self._areas: dict[CodeType, str | None] = {}
        self._asked = False

    @contextmanager
    def collecting(self) -> Iterator[AreaCrossings]:
        sys.setprofile(self._profile)
        try:
            yield self
        finally:
            sys.setprofile(None)
            self._known.clear()

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._asked or event != "call" or frame in self._known:
            return
        area = self._area(frame)
        if area is None:
            return
        self._known.add(frame)
        caller = frame.f_back
        while caller is not None and self._area(caller) is None:
            caller = caller.f_back
        if caller is not None and (above := self._area(caller)) is not None and above != area:
            self.ways.add((above, area))
        # The first of any package that has engines: the pool is one itself.
        self._asked = frame.f_code.co_name == "generate" and not area.startswith("server/")

    def _area(self, frame: FrameType) -> str | None:
        code = frame.f_code
        if code not in self._areas:
            self._areas[code] = area_of(frame.f_globals.get("__name__", ""))
        return self._areas[code]


@contextmanager
def peak_memory() -> Iterator[Work]:
    """Measure the peak of the memory in use into the value that is yielded."""
    work = Work()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    try:
        yield work
    finally:
        work.peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        gc.enable()
