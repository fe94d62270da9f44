"""A run of all benchmarks as Markdown: the table of the README, and the page of figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks import documents
from benchmarks.figures import OWN, Figure, Result
from benchmarks.targets import TARGETS, Target, Verdict, verdicts

BLOCK = "product"
_NONE = "There is no full run yet: `make bench` makes one.\n"


def page(result: Result | None) -> str:
    """Return what docs/benchmarks.md has between its marks."""
    if result is None:
        return _NONE
    found = list(verdicts(result))
    return "\n\n".join(
        [_conditions(result), _peers(result), *_targets(found), _missed(found), _all_figures(result)]
    )


def summary(result: Result | None) -> str:
    """Return what README.md has between its marks: a line for each target."""
    if result is None:
        return _NONE
    found = list(verdicts(result))
    rows = [row for target in TARGETS if (row := _summary_row(target, found)) is not None]
    head = ["beside NVIDIA Dynamo 1.6.1, or alone", "singletree", "target", ""]
    return f"{_conditions(result)}\n\n{documents.table(head, rows)}"


def _summary_row(target: Target, found: Sequence[Verdict]) -> list[str] | None:
    own = [verdict for verdict in found if verdict.target is target]
    known = [verdict for verdict in own if verdict.value is not None]
    if not own:
        return None
    beside = f", beside {target.peer}" if target.peer else ""
    if not known:
        return [f"{target.title}{beside}", "–", _bound(target), "not measured"]
    values = sorted(verdict.value or 0.0 for verdict in known)
    shown = _number(values[0]) if len(values) == 1 else f"{_number(values[0])} to {_number(values[-1])}"
    met = sum(bool(verdict.is_met) for verdict in known)
    state = "met" if met == len(known) else f"missed by {len(known) - met} of {len(known)}"
    return [f"{target.title}{beside}", f"{shown}{_unit(own[0])}", _bound(target), state]


def _conditions(result: Result) -> str:
    quiet = (
        f"Everything else on the machine kept {result.quiet.during:.2f} cores busy meanwhile (median)."
        if result.quiet.is_quiet
        else f"**The machine was not quiet**: {'; '.join(result.quiet.complaints())}; meanwhile everything else kept "
        f"{result.quiet.during:.2f} cores busy (median). Ratios of one run may be compared, single times may not."
    )
    quick = " A quick run: its figures are rough." if result.is_quick else ""
    return f"{result.date}, singletree {result.version}; {result.machine}. {quiet}{quick}"


def _peers(result: Result) -> str:
    rows = [[peer.name, peer.version or "–", peer.missing or "measured"] for peer in result.peers]
    failed = "".join(f"\n\n{part} did not come to its end: {why}" for part, why in result.failed.items())
    return f"{documents.table(['peer', 'version', ''], rows)}{failed}"


def _targets(found: Sequence[Verdict]) -> Iterable[str]:
    head = ["figure", OWN, "peer", "ratio (spread)", "target", ""]
    for target in TARGETS:
        own = [verdict for verdict in found if verdict.target is target]
        if own:
            title = target.title + (f", beside {target.peer}" if target.peer else "")
            yield f"**{title}**\n\n{documents.table(head, [_row(verdict) for verdict in own])}"


def _row(verdict: Verdict) -> list[str]:
    figure, target = verdict.figure, verdict.target
    state = {True: "met", False: "missed", None: "not measured"}[verdict.is_met]
    ratio = peer = "–"
    if target.peer and verdict.value is not None:
        ratio = f"{verdict.value:.2f} ({verdict.spread[0]:.2f}–{verdict.spread[1]:.2f})"
        peer = _spread(figure, target.peer)
    own = f"{_spread(figure, OWN)} {figure.unit}".strip()
    return [verdict.name, own, peer, ratio, _bound(target), state]


def _missed(found: Sequence[Verdict]) -> str:
    lines = [
        f"- {verdict.name}, {verdict.target.title}: {_number(verdict.value or 0.0)}{_unit(verdict)}, target "
        f"{_bound(verdict.target)}. Where it goes: {verdict.target.where}."
        for verdict in found
        if verdict.is_met is False
    ]
    return "**Figures that miss their target**\n\n" + ("\n".join(lines) or "None.")


def _all_figures(result: Result) -> str:
    names = list(dict.fromkeys(name for figure in result.figures.values() for name in figure.values))
    rows = [
        [name, figure.unit, *(_spread(figure, server) for server in names)]
        for name, figure in result.figures.items()
    ]
    seconds = sum(result.part_seconds.values())
    return (
        f"**All figures**, median (least–most); the run took {seconds / 60:.0f} minutes\n\n"
        f"{documents.table(['figure', 'unit', *names], rows)}"
    )


def _spread(figure: Figure, server: str) -> str:
    values = figure.values.get(server)
    if not values:
        return "–"
    middle = _number(figure.median(server) or 0.0)
    return middle if len(values) == 1 else f"{middle} ({_number(min(values))}–{_number(max(values))})"


def _unit(verdict: Verdict) -> str:
    return "" if verdict.target.peer or not verdict.figure.unit else f" {verdict.figure.unit}"


def _bound(target: Target) -> str:
    return f"{'≥' if target.above else '≤'} {_number(target.bound)}{' ×' if target.peer else ''}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
