"""The tables and charts of docs/comparison.md: sessions where others tie or win stand first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.compare_report import Cell, Comparison
from benchmarks.figures import OWN

from page_parts import table

_COLOURS = {"vLLM": "#d97706", "LiteLLM": "#7c3aed", "Dynamo": "#16a34a"}
_COLOURS |= {"llama.cpp": "#db2777", OWN: "#2563eb"}
_ACROSS, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 520, 300, 70, 130, 40, 40
_COMPLAINTS = 3  # of a row, the last ones: before them stand what it tried again
_LETTER = 6.5  # of a server's name, about


def in_place(run: Comparison, other: str) -> list[str]:
    """Return singletree's and another server's share of generated tokens in place, over the live sessions of both."""
    found = {(c.model, c.session, c.server): c for c in run.cells if c.mode == "live" and c.generated}
    both = [key[:2] for key in found if key[2] == OWN and (*key[:2], other) in found]
    shares = []
    for server in (OWN, other):
        cells = [found[*key, server] for key in both]
        kept, generated = (sum(getattr(cell, name) for cell in cells) for name in ("in_place", "generated"))
        shares.append(f"{100 * kept / generated:.0f} %")
    return shares


def timed_page(run: Comparison) -> str:
    """Return the tables of a run whose turns were timed as Markdown, one column a turn."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    parts = [f"{run.date}; {run.machine}; {run.turns} turns with tool calls a session. {versions}."]
    for cells in sorted(run.groups(), key=lambda cells: cells[0].model):
        first = cells[0]
        parts.append(f"### {run.titles[first.session]}, shape {first.model}")
        head = ["server", *(f"turn {number}" for number in range(1, len(first.prompts) + 1))]
        rows = [[cell.server, *map(_timed, cell.prefilled, cell.first_ms)] for cell in cells]
        parts.append(table(head, rows))
        parts.append(f"The last prompt has {first.prompts[-1]:,} tokens.")
        parts += [f"- {each.server}: {_first_line(text)}" for each in cells for text in each.complaints]
    return "\n\n".join(parts)


def _timed(tokens: int | None, ms: float) -> str:
    return f"{tokens or 0:,} in {ms / 1e3:.2f} s"


def page(run: Comparison) -> str:
    """Return the tables of a run as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    templates = ", ".join(f"{name} (SHA-256 {digest[:12]})" for name, digest in run.templates.items())
    parts = [
        f"{run.date}, {run.machine}; {run.turns} turns with tool calls a session. {versions}.",
        f"Chat templates: {templates}.",
    ]
    for cells in run.groups():
        first = cells[0]
        parts.append(f"### {run.titles[first.session]}, {first.model}, {first.mode}")
        if first.mode == "live":
            parts.append(f"![prefilled tokens by turn](pictures/{picture_name(first)})")
        parts.append(_table(cells, run.date))
        refused: dict[str, list[str]] = {}
        for cell in cells:
            if cell.without:
                refused.setdefault("` and `".join(cell.without), []).append(cell.server)
        parts += [
            f"- Sent without `{fields}`, which the server refuses with status 400: {'; '.join(refusing)}."
            for fields, refusing in refused.items()
        ]
        parts += [
            f"- {cell.server}: {_first_line(each)}"
            for cell in cells
            for each in list(dict.fromkeys(cell.complaints))[-_COMPLAINTS:]
        ]
    return "\n\n".join(parts)


def _first_line(text: str) -> str:
    return text.replace("|", "\\|").split("\n")[0][:300]


def _table(cells: Iterable[Cell], today: str) -> str:
    head = ["server", "turns", "prompt tokens", "prefilled after turn 1", "in the last turn"]
    rows = []
    for cell in sorted(cells, key=lambda cell: (bool(cell.complaints), cell.read_again)):
        last = cell.prefilled[-1] if cell.prefilled else None
        failed, day = " (failed)" if cell.complaints else "", f" ({cell.date})" if cell.date != today else ""
        rows.append(
            [
                f"{cell.server}{failed}{day}",
                str(len(cell.prompts)),
                f"{sum(cell.prompts):,}",
                f"{'≥ ' if None in cell.prefilled else ''}{cell.read_again:,}",
                "–" if last is None else f"{last:,}",
                f"{cell.in_place / cell.generated:.0%}" if cell.generated else "–",
            ]
        )
    return table([*head, "generated tokens in place"], rows)


def picture_name(cell: Cell) -> str:
    """Return the file name of the chart of a cell's session."""
    return f"comparison-{cell.session}-{cell.model}.svg"


def pictures(run: Comparison) -> Mapping[str, str]:
    """Return the charts of the live sessions, by file name."""
    live = [cells for cells in run.groups() if cells[0].mode == "live"]
    return {picture_name(cells[0]): chart(cells, run.titles[cells[0].session]) for cells in live}


def chart(cells: Sequence[Cell], title: str) -> str:
    """Return an SVG: a line for each server, the tokens prefilled in each turn after the first."""
    lines = {
        cell.server: [each or 0 for each in cell.prefilled[1:]] for cell in cells if len(cell.prefilled) > 2
    }
    top = max((max(line) for line in lines.values()), default=1) or 1
    turns = max((len(line) for line in lines.values()), default=2)
    down = _HEIGHT - _TOP - _BOTTOM

    def point(turn: int, tokens: float) -> tuple[float, float]:
        return _LEFT + _ACROSS * turn / max(turns - 1, 1), _TOP + down * (1 - tokens / top)

    style = 'font-family="sans-serif" font-size="12" fill="#6b7280"'

    def label(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" {style}{more}>{words}</text>'

    parts = [label(_LEFT, 20, f"{title}: tokens prefilled in each turn", ' font-weight="bold"')]
    for share in (0, 0.5, 1):
        x, y = point(0, share * top)
        parts += [
            f'<line x1="{x:.0f}" y1="{y:.0f}" x2="{_LEFT + _ACROSS}" y2="{y:.0f}" stroke="#d1d5db"/>',
            label(x - 8, y + 4, f"{share * top:,.0f}", ' text-anchor="end"'),
        ]
    for turn in (0, turns - 1):
        x, y = point(turn, 0)
        parts.append(label(x, y + 18, f"turn {turn + 2}", ' text-anchor="middle"'))
    ends: list[float] = []
    for server, line in sorted(lines.items(), key=lambda item: item[1][-1]):
        base, _, workaround = server.partition(", ")
        colour, dashes = _COLOURS.get(base, "#111827"), ' stroke-dasharray="5 3"' if workaround else ""
        points = " ".join("{:.1f},{:.1f}".format(*point(turn, tokens)) for turn, tokens in enumerate(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        x, y = point(len(line) - 1, line[-1])
        y = min([y, *(end - 14 for end in ends[-1:])])  # Names of lines that end at one place stand apart.
        ends.append(y)
        parts.append(label(x + 8, y + 4, server, f' style="fill:{colour}"'))
    right = max([_RIGHT, *(_LETTER * len(server) + 12 for server in lines)])
    width = f"{_LEFT + _ACROSS + right:.0f}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" role="img">'
    return "\n".join([head, f"<title>{title}</title>", *parts, "</svg>"]) + "\n"
