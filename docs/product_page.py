"""The newest measurements as Markdown: the parts of docs/benchmarks.md and of the README that are made from results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.figures import (
    DYNAMO,
    MAX_OTHERS,
    MAX_SPREAD,
    OWN,
    TARGETS,
    Figure,
    Result,
    Target,
    Verdict,
    verdicts,
)

import page_parts

_NONE = "There is no full run yet: `make bench` makes one.\n"


def page(result: Result | None) -> str:
    """Return the newest run as docs/benchmarks.md shows it."""
    if result is None:
        return _NONE
    found = list(verdicts(result))
    return "\n\n".join(
        [conditions(result), _peers(result), _targets(found), _missed(found), _all_figures(result)]
    )


def summary(result: Result | None, others: Sequence[Sequence[str]]) -> str:
    """Return what README.md shows: the figures that a user feels, after those that ``others`` measured."""
    if result is None:
        return _NONE
    rows = [
        *others,
        _row("CPU of a streamed token, 64 streams", result, "a token, *, 64 streams"),
        _row("first token of a 50,000-token prompt that grew", result, "time to the first token, grown, *"),
        _row("memory, idle, with Qwen3's tokenizer", result, "memory, idle"),
        _row("start until ready", result, "start, seconds"),
    ]
    return f"{conditions(result)}\n\n{page_parts.table(['', OWN, 'beside'], rows)}"


def _row(title: str, result: Result, pattern: str) -> list[str]:
    found = [verdict.figure for verdict in verdicts(result, [Target(title, pattern)])]
    if not found:
        return [title, "not measured", "–"]
    own, other = (
        _range([value for figure in found if (value := figure.median(name)) is not None])
        for name in (OWN, DYNAMO)
    )
    unit = found[0].unit.removeprefix("CPU ")
    return [title, f"{own} {unit}", f"{other} {unit} with Dynamo" if other else "–"]


def _range(values: Sequence[float]) -> str:
    ends = dict.fromkeys(_number(value) for value in (min(values), max(values))) if values else {}
    return " to ".join(ends)


def conditions(result: Result) -> str:
    """Return where and when a run was made, and whether its machine was quiet."""
    quiet = (
        f"Everything else on the machine kept {result.others_meanwhile:.2f} cores busy meanwhile (median)."
    )
    if not result.is_quiet:
        quiet += (
            f" **The machine was not quiet**: everything else kept {result.others:.2f} cores busy before (at most "
            f"{MAX_OTHERS:g}), and a fixed piece of work took up to {result.spread:.2f} times its shortest time (at "
            f"most {MAX_SPREAD:g}). Ratios of one run may be compared, single times may not."
        )
    quick = " A quick run: its figures are rough." if result.is_quick else ""
    return f"{result.date}, singletree {result.version}; {result.machine}. {quiet}{quick}"


def _peers(result: Result) -> str:
    measured = f"Measured beside {DYNAMO} {result.dynamo}." if result.dynamo else "Measured alone."
    failed = "".join(f"\n- {part}: {why}" for part, why in result.failed.items())
    return f"{measured}{' Not measured:' + chr(10) if failed else ''}{failed}"


def _targets(found: Sequence[Verdict]) -> str:
    rows = []
    for target in TARGETS:
        own = [verdict for verdict in found if verdict.target is target]
        known = [verdict.value for verdict in own if verdict.value is not None]
        if own:
            beside, unit = (f", beside {target.peer}", "") if target.peer else ("", f" {own[0].figure.unit}")
            missed = sum(verdict.is_met is False for verdict in own)
            state = f"missed by {missed} of {len(known)}" if missed else "met" if known else "not measured"
            shown = f"{_range(known)}{unit}" if known else "–"
            rows.append([f"{target.title}{beside}", shown, _bound(target), state])
    return page_parts.table(["figure", "ratio, or value", "target", ""], rows)


def _missed(found: Sequence[Verdict]) -> str:
    lines: dict[str, list[str]] = {}
    for verdict in found:
        if verdict.is_met is False:
            beside = f" beside {verdict.target.peer}" if verdict.target.peer else ""
            value = f"{verdict.name}{beside} {_number(verdict.value or 0.0)} ({_bound(verdict.target)})"
            lines.setdefault(verdict.target.where, []).append(value)
    text = "\n".join(f"- {'; '.join(names)}. Where it goes: {where}." for where, names in lines.items())
    return "**Figures that miss their target**\n\n" + (text or "None.")


def _all_figures(result: Result) -> str:
    names = list(dict.fromkeys(name for figure in result.figures.values() for name in figure.values))
    rows = [[name, figure.unit, *_cells(figure, names)] for name, figure in result.figures.items()]
    seconds = sum(result.part_seconds.values())
    return (
        f"**All figures**, median (least–most); the run took {seconds / 60:.0f} minutes\n\n"
        f"{page_parts.table(['figure', 'unit', *names], rows)}"
    )


def _cells(figure: Figure, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        values = figure.values.get(name)
        middle = _number(figure.median(name) or 0.0)
        spread = f" ({_number(min(values))}–{_number(max(values))})" if values and len(values) > 1 else ""
        yield f"{middle}{spread}" if values else "–"


def _bound(target: Target) -> str:
    return f"≤ {_number(target.bound)}{' ×' if target.peer else ''}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
