"""The table of benchmarks/replay.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks import documents
from benchmarks.returned_turns import PROTOCOLS, Protocol


@dataclass(slots=True)
class Result:
    """One template. Counts of tokens by protocol: in place with the memory, in place without, and generated.

    ``habits`` has them by what the harness does and by protocol: (generated, in place with the memory). ``refused``
    are the turns that the template does not print without all results, so that no call can be put back.
    """

    template: str
    family: str
    generated: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    rendered: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    habits: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    reason: str = ""

    def add(self, habit: str, protocol: str, generated: int, kept: int) -> None:
        """Count one more session."""
        before = self.habits.get((habit, protocol), (0, 0))
        self.habits[habit, protocol] = (before[0] + generated, before[1] + kept)


def report(results: Sequence[Result]) -> str:
    """The table, and what has no place in it."""
    head = [
        "template",
        "family",
        *(p.name for p in PROTOCOLS),
        *(f"{p.name}, without" for p in PROTOCOLS),
        "not kept",
    ]
    measured = [result for result in results if result.generated]
    rows = [
        [
            result.template,
            result.family,
            *(share(result.kept, result, protocol) for protocol in PROTOCOLS),
            *(share(result.rendered, result, protocol) for protocol in PROTOCOLS),
            "; ".join(_not_kept(result)),
        ]
        for result in measured
    ]
    total = sum(sum(result.generated.values()) for result in measured)
    kept = sum(sum(result.kept.values()) for result in measured)
    rendered = sum(sum(result.rendered.values()) for result in measured)
    said = (
        f"{documents.today()}; {len(measured)} templates, {total:,} generated tokens: {kept:,} "
        f"({_percent(kept, total)}) stand in place with the memory, {rendered:,} ({_percent(rendered, total)}) "
        "without."
    )
    return f"{said}\n\n{_habits(measured)}\n\n{documents.table(head, rows)}\n\n{_left_out(results)}"


def _habits(measured: Sequence[Result]) -> str:
    """The table of what harnesses do to a turn, over all templates."""
    rows = []
    for habit in dict.fromkeys(habit for result in measured for habit, _ in result.habits):
        counts = [
            [result.habits.get((habit, protocol.name), (0, 0)) for result in measured]
            for protocol in PROTOCOLS
        ]
        shares = [_percent(sum(kept for _, kept in each), sum(said for said, _ in each)) for each in counts]
        rows.append([habit.replace("_", " "), *shares])
    return documents.table(["what the harness does", *(p.name for p in PROTOCOLS)], rows)


def _not_kept(result: Result) -> list[str]:
    """The turns that the template itself does not keep as they were said."""
    refused = [f"{name} without a result" for name in sorted(result.refused)]
    told = (("dropped", result.dropped), ("rewritten", result.rewritten), ("refused", refused))
    return [f"{what}: {', '.join(names)}" for what, names in told if names]


def _left_out(results: Sequence[Result]) -> str:
    """The templates without a row, by the reason."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        if not result.generated:
            reasons.setdefault(result.reason, []).append(result.template)
    return "\n".join(f"- {reason}: {', '.join(names)}" for reason, names in sorted(reasons.items()))


def share(counts: dict[str, int], result: Result, protocol: Protocol) -> str:
    """What share of what was generated on a protocol ``counts`` is."""
    return _percent(counts[protocol.name], result.generated[protocol.name])


def _percent(part: int, whole: int) -> str:
    share = 100 * part / max(1, whole)
    return "100 %" if part == whole else f"{min(share, 99.9):.1f} %"
