"""What singletree costs, measured, beside its peers where they are installed: ``make bench``."""

import signal
import sys
from pathlib import Path

# Harnesses, engines and stores are installed and driven as in their tests.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

_KILLS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _leave(number: int, frame: object) -> None:
    for each in _KILLS:
        signal.signal(each, signal.SIG_IGN)  # A second one would stop what the first one ends.
    raise KeyboardInterrupt


# A benchmark that is killed leaves its blocks, as after Ctrl-C: engines have sessions of their own, and would go on.
if sys.argv[0] == "-m":
    for _each in _KILLS:
        if signal.getsignal(_each) is not signal.SIG_IGN:
            signal.signal(_each, _leave)
