"""The cells of ``make compare``: what is kept of a run, and in which order its sessions stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.figures import FOLDER, OWN

FILE = FOLDER / "comparison" / "sessions.json"
GPU_FILE = FOLDER / "comparison" / "gpu.json"


class Cell(msgspec.Struct):
    """One session behind one server.

    Attributes:
        mode: ``live``, a real harness at work, or ``recorded``, its requests sent again.
        prompts: tokens of the prompt of each turn of the conversation; all requests where they were recorded.
        prefilled: those that the engine did not find in its cache; None where a side request began in the same moment.
        generated, in_place: tokens of the turns but the last one, and those with which the next prompt goes on.
        first_ms: from each request to the first words of its answer, where that was timed.
        without: fields that the server refuses, which its recorded requests were sent without.
        complaints: what the harness said of the server, or how its last words differ.
        date: of the run that measured it.
    """

    model: str
    session: str
    server: str
    mode: str
    prompts: list[int] = []
    prefilled: list[int | None] = []
    generated: int = 0
    in_place: int = 0
    first_ms: list[float] = []
    without: list[str] = []
    complaints: list[str] = []
    date: str = ""

    @property
    def read_again(self) -> int:
        """Tokens that were prefilled after the first turn."""
        return sum(filter(None, self.prefilled[1:]))


class Comparison(msgspec.Struct):
    """One run of ``make compare``."""

    date: str
    machine: str
    turns: int
    versions: dict[str, str]
    templates: dict[str, str]
    titles: dict[str, str]
    cells: list[Cell] = []

    def put(self, cell: Cell) -> None:
        """Add a cell in the place of an earlier one of the same session, server and mode."""
        same = (cell.model, cell.session, cell.server, cell.mode)
        self.cells = [c for c in self.cells if (c.model, c.session, c.server, c.mode) != same]
        cell.date = self.date
        self.cells.append(cell)

    def joined(self, run: Comparison) -> Comparison:
        """Return ``run`` with the cells of this one, which ``put`` replaces."""
        known = (self.versions | run.versions, self.templates | run.templates, self.titles | run.titles)
        return Comparison(run.date, run.machine, run.turns, *known, self.cells)

    def groups(self) -> list[list[Cell]]:
        """Return the cells by model, session and mode; those where singletree wins least stand first."""
        found: dict[tuple[str, str, str], list[Cell]] = {}
        for cell in self.cells:
            found.setdefault((cell.model, cell.session, cell.mode), []).append(cell)
        return sorted(found.values(), key=_gain)


def _gain(cells: Sequence[Cell]) -> float:
    """Return the prefilled tokens of the best other server as a multiple of singletree's."""
    own = next((cell.read_again for cell in cells if cell.server == OWN), 0)
    others = [cell.read_again for cell in cells if cell.server != OWN and not cell.complaints]
    return min(others, default=math.inf) / max(own, 1)


def read(file: Path = FILE) -> Comparison:
    """Return the kept run."""
    return msgspec.json.decode(file.read_bytes(), type=Comparison)


def write(run: Comparison, file: Path = FILE) -> None:
    """Keep a run; ``make docs`` prints it."""
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
