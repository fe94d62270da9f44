"""What was measured, the file that keeps it, and the targets as data: a run of ``make bench``."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
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


@dataclass(frozen=True, slots=True)
class Target:
    """One target.

    Attributes:
        title: what is measured, for readers.
        figures: pattern of the names of its figures.
        bound: the highest value that meets it: of the ratio to ``peer``, or of the figure itself.
        peer: what the figure is compared with; empty for none.
        where: where the time or memory goes.
    """

    title: str
    figures: str
    bound: float = 1.0
    peer: str = ""
    where: str = ""


_TOKEN = (
    "waking up for the engine's event and reading it, decoding its token into events of the turn, encoding and "
    "writing them; with one stream most of it is the system's; `make counts` has the calls"
)
_PROMPT = "comparing the body with the last one, copying text and tokens, writing the token ids as JSON for the engine"
_NEW = "rendering, encoding (a fifth each), decoding (a seventh), token ids as JSON, digests of turns (a tenth each)"
_REQUEST = (
    "decoding and checking the body, the template's tail, the session, the engine's HTTP request, metrics"
)
_STREAM = "buffers of two connections, tasks and generators"

TARGETS = (
    Target("a streamed token", "a token, *", 1.0, DYNAMO, _TOKEN),
    Target("a request of one token", "a request of one token, *", 1.0, DYNAMO, _REQUEST),
    *(
        Target(
            f"first token of {title} prompt, {what}",
            f"{what} to the first token, {kind}, *",
            1.0,
            peer,
            where,
        )
        for peer in (DYNAMO, FAST_DYNAMO)
        for kind, title in (("cold", "a new"), ("repeat", "a repeated"), ("grown", "a grown"))
        for what in ("CPU", "time")
        for where in (_NEW if kind == "cold" and peer == FAST_DYNAMO else _PROMPT,)
    ),
    Target("count_tokens of 100,000 known tokens", "count_tokens, known", 1.0, DYNAMO, _PROMPT),
    Target(
        "memory, idle with Qwen3's tokenizer", "memory, idle", 150, where="the tokenizer (60 MiB), imports"
    ),
    Target(
        "memory after sessions, share of what the flags allow",
        "memory after sessions",
        1.2,
        where="the stores of turns, sessions and prompts, and what the allocator keeps beside them",
    ),
    Target("start until ready", "start, seconds", 1.0, where="imports (0.45 s of CPU), probing the engine"),
    Target("memory of a stream", "streams, KB each", 60, where=_STREAM),
    Target("99 % of first tokens, 5,000 streams", "streams, 99 % of first tokens", 1.0, where=_REQUEST),
    Target(
        "99 % of first tokens, 2,000 opened at once", "at once, 99 % of first tokens", 1.0, where=_REQUEST
    ),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure beside its target; ``value`` is None where the peer was not measured."""

    target: Target
    name: str
    figure: Figure
    value: float | None

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None where that is not known."""
        return None if self.value is None else self.value <= self.target.bound


def verdicts(result: Result, targets: Sequence[Target] = TARGETS) -> Iterator[Verdict]:
    """Yield each figure that has a target, beside it. A target without figures yields nothing."""
    for target in targets:
        for name, figure in result.figures.items():
            if fnmatchcase(name, target.figures):
                own, other = figure.median(), figure.median(target.peer) if target.peer else 1.0
                yield Verdict(target, name, figure, None if own is None or not other else own / other)
