"""How quiet the machine is, before anything is measured on it."""

from __future__ import annotations

import time

from benchmarks.figures import Quiet
from benchmarks.processor import Watch, calibrate

_SECONDS = 3.0
_REPEATS = 12


def look() -> Quiet:
    """Look for some seconds at what else runs, and at how evenly a fixed piece of work goes."""
    watch = Watch(())
    time.sleep(_SECONDS)
    spent = watch.stop()
    times = [calibrate() for _ in range(_REPEATS)]
    return Quiet(round(spent.others / spent.wall, 3), round(max(times) / min(times), 3))
