"""What was measured, and the file that keeps it: a run of ``make bench``."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import msgspec

OWN = "singletree"
DYNAMO = "Dynamo"
FAST_DYNAMO = "Dynamo, fastokens"
FOLDER = Path(__file__).with_name("results")


class Figure(msgspec.Struct):
    """One figure: its value in each round, by what was measured.

    Attributes:
        unit: such as ``CPU µs``.
        values: name of a server -> one value a round, the rounds in the same order for all.
    """

    unit: str
    values: dict[str, list[float]]

    def median(self, name: str = OWN) -> float | None:
        """Return the median of one server's values; None if it has none."""
        return statistics.median(self.values[name]) if self.values.get(name) else None


class Peer(msgspec.Struct):
    """A program to measure beside singletree: its version, or why it is missing."""

    name: str
    version: str = ""
    missing: str = ""


class Quiet(msgspec.Struct):
    """How quiet the machine was.

    Attributes:
        others: how many cores everything else kept busy before the measurements began.
        spread: the longest time of a fixed piece of work as a multiple of its shortest.
        during: how many cores everything else kept busy during the measurements (median).
    """

    others: float
    spread: float
    during: float = 0.0

    @property
    def is_quiet(self) -> bool:
        """Whether figures of time may be trusted."""
        return not self.complaints()

    def complaints(self) -> list[str]:
        """Return what is wrong, and by how much."""
        found = []
        if self.others > MAX_OTHERS:
            found.append(f"other programs keep {self.others:.2f} cores busy (at most {MAX_OTHERS:g})")
        if self.spread > MAX_SPREAD:
            found.append(
                f"a fixed piece of work takes up to {self.spread:.2f} times its shortest time (at most {MAX_SPREAD:g})"
            )
        return found


MAX_OTHERS = 0.1
MAX_SPREAD = 1.25


class Result(msgspec.Struct):
    """One run.

    Attributes:
        part_seconds: how long each part took.
        failed: parts that did not finish, with the reason.
    """

    version: str
    date: str
    machine: str
    is_quick: bool
    quiet: Quiet
    peers: list[Peer]
    figures: dict[str, Figure] = {}
    part_seconds: dict[str, float] = {}
    failed: dict[str, str] = {}

    @property
    def path(self) -> Path:
        """The file in which the run is kept: ``<version>-<machine>.json``."""
        quick = "-quick" if self.is_quick else ""
        return FOLDER / f"{self.version}-{slug(self.machine)}{quick}.json"

    def add(self, name: str, unit: str, server: str, *values: float) -> None:
        """Add values to a figure."""
        figure = self.figures.setdefault(name, Figure(unit, {}))
        figure.values.setdefault(server, []).extend(round(value, 4) for value in values)


def slug(machine: str) -> str:
    """Return the machine's processor and number of cores as a part of a file's name."""
    processor, _, rest = machine.partition(", ")
    words = re.sub(r"\((?:R|TM)\)|processor|CPU|@.*", " ", processor, flags=re.IGNORECASE)
    cores = rest.partition(",")[0]
    return re.sub(r"[^a-z0-9]+", "-", f"{words} {cores}".lower()).strip("-")


def write(result: Result) -> Path:
    """Write the file of a run."""
    FOLDER.mkdir(exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(result), indent=1)
    result.path.write_bytes(text + b"\n")
    return result.path


def newest() -> Result | None:
    """Return the latest full run; None if there is none. Runs on a quiet machine are preferred."""
    found = [msgspec.json.decode(path.read_bytes(), type=Result) for path in sorted(FOLDER.glob("*.json"))]
    full = [result for result in found if not result.is_quick]
    return max(full, key=lambda result: (result.quiet.is_quiet, result.date), default=None)
