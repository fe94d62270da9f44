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
MAX_OTHERS, MAX_SPREAD = 0.1, 1.25


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


class Result(msgspec.Struct):
    """One run.

    Attributes:
        dynamo: its version; empty where it was not measured.
        others: how many cores everything else kept busy before the measurements began, time that a host took included.
        spread: the longest time of a fixed piece of work then, as a multiple of its shortest.
        others_meanwhile: as ``others``, during the measurements (median).
        part_seconds: how long each part took.
        failed: what was not measured, with the reason.
    """

    version: str
    date: str
    machine: str
    is_quick: bool
    others: float
    spread: float
    others_meanwhile: float = 0.0
    dynamo: str = ""
    figures: dict[str, Figure] = {}
    part_seconds: dict[str, float] = {}
    failed: dict[str, str] = {}

    @property
    def is_quiet(self) -> bool:
        """Whether figures of time may be trusted."""
        return self.others <= MAX_OTHERS and self.spread <= MAX_SPREAD

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
    paths = [path for path in sorted(FOLDER.glob("*.json")) if not path.stem.endswith("-quick")]
    found = [msgspec.json.decode(path.read_bytes(), type=Result) for path in paths]
    return max(found, key=lambda result: (result.is_quiet, result.date), default=None)
