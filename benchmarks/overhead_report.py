"""The results of ``overhead`` as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from benchmarks import documents
from benchmarks.processor import machine
from benchmarks.prompt_cost import KINDS
from benchmarks.prompt_cost import median_of as median_prompt
from benchmarks.token_cost import Load, TokenCost
from benchmarks.token_cost import median_of as median_token
from benchmarks.wire_protocols import PROTOCOLS

if TYPE_CHECKING:
    from benchmarks.overhead import Measured, Plan

NAME = "overhead"


def report(measured: Measured, plan: Plan, names: Sequence[str]) -> str:
    """All tables, with what was measured on and how quiet it was."""
    own, *peers = names
    parts = [
        _conditions(measured, plan),
        *(
            f"**CPU µs a streamed token, {title}**\n\n"
            + _token_table(
                measured, [load for load in plan.loads() if bool(load.delay) == paced], own, peers[:1]
            )
            for title, paced in (
                ("100 tokens a second on each stream", True),
                ("as fast as they come", False),
            )
        ),
        "**From a prompt of 50,000 tokens to the first token**\n\n" + _prompt_table(measured, own, peers),
        "**Beside the tokens**\n\n" + _rest_table(measured, plan, names),
    ]
    return "\n\n".join(parts)


def write(text: str) -> None:
    """Put it into the document."""
    documents.replace(NAME, text)


def _conditions(measured: Measured, plan: Plan) -> str:
    fastest = min(measured.calibrations)
    slowest = max(measured.calibrations) / fastest
    others = statistics.median(cost.others for costs in measured.tokens.values() for cost in costs)
    return (
        f"{documents.today()}; {machine()}. Rounds: {plan.rounds}, the servers in turn; every figure is the "
        f"median. A fixed piece of work took up to {slowest:.2f} times its shortest time between the "
        f"measurements; everything else on the machine kept {others:.2f} cores busy meanwhile (median)."
    )


def _token_table(measured: Measured, loads: Sequence[Load], own: str, peers: Sequence[str]) -> str:
    head = ["protocol", "streams", own, "its engine", "without it"]
    for peer in peers:
        head += [peer, "its worker", "ratio", "ratio without engine"]
    head += ["client", "k tokens/s"]
    rows = []
    for protocol in PROTOCOLS:
        for load in loads:
            costs = [measured.tokens[name, protocol.name, load] for name in (own, *peers)]
            ours, *theirs = map(median_token, costs)
            engine = statistics.median(measured.engine[load])
            row = [
                protocol.name,
                str(load.streams),
                _spread(costs[0]),
                f"{engine:.1f}",
                f"{ours.server - engine:.1f}",
            ]
            for cost, all_costs in zip(theirs, costs[1:], strict=True):
                whole = _ratio((c.server for c in costs[0]), (c.server for c in all_costs))
                rest = _ratio((c.server - engine for c in costs[0]), (c.server for c in all_costs))
                row += [_spread(all_costs), f"{cost.engine:.1f}", whole, rest]
            row.append(" / ".join(f"{cost.client:.1f}" for cost in (ours, *theirs)))
            row.append(" / ".join(f"{cost.rate / 1e3:.1f}" for cost in (ours, *theirs)))
            rows.append(row)
    return documents.table(head, rows)


def _spread(costs: Iterable[TokenCost]) -> str:
    """The median, least and most."""
    values = sorted(cost.server for cost in costs)
    middle = f"{statistics.median(values):.1f}"
    return middle if len(values) == 1 else f"{middle} ({values[0]:.1f}–{values[-1]:.1f})"


def _prompt_table(measured: Measured, own: str, peers: Sequence[str]) -> str:
    head = ["protocol", "prompt", "tokens", "kB"]
    for name in (own, *peers):
        head += [f"{name}: ms", "CPU ms"]
    head += [f"ratio to {peer}: ms, CPU" for peer in peers]
    rows = []
    for protocol in PROTOCOLS:
        for kind in KINDS:
            ours, *theirs = (
                median_prompt(measured.prompts[name, protocol.name], kind) for name in (own, *peers)
            )
            counts = sorted({cost.tokens for cost in (ours, *theirs)})
            row = [protocol.name, kind, " / ".join(map(str, counts)), f"{ours.sent / 1e3:.0f}"]
            for cost in (ours, *theirs):
                row += [f"{cost.first:.1f}", f"{cost.cpu:.1f}"]
            row += [_prompt_ratios(measured, (own, peer), protocol.name, kind) for peer in peers]
            rows.append(row)
    return documents.table(head, rows)


def _ratio(ours: Iterable[float], theirs: Iterable[float]) -> str:
    """The median of the ratios of what was measured one after the other: noise that lasts hits both."""
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.2f}"


def _prompt_ratios(measured: Measured, names: tuple[str, str], protocol: str, kind: str) -> str:
    ours, theirs = ([c for c in measured.prompts[name, protocol] if c.kind == kind] for name in names)
    first = _ratio((c.first for c in ours), (c.first for c in theirs))
    return f"{first}, {_ratio((c.cpu for c in ours), (c.cpu for c in theirs))}"


def _rest_table(measured: Measured, plan: Plan, names: Sequence[str]) -> str:
    one = next(load for load in plan.loads() if load.streams == 1 and not load.delay)

    def of(name: str, protocol: str, field: Callable[[TokenCost], float]) -> float:
        return statistics.median(map(field, measured.tokens[name, protocol, one]))

    rows = []
    for name in names:
        row = [name]
        for protocol in PROTOCOLS:
            known = measured.tokens.get((name, protocol.name, one))
            row += [f"{of(name, protocol.name, lambda cost: cost.request):.2f}"] if known else ["–"]
        row += [f"{measured.idle[name][0] * 1e3:.1f}", f"{measured.resident[name] / 2**20:.0f}"]
        rows.append(row)
    requests = [f"CPU ms a request of 8 tokens, {protocol.name}" for protocol in PROTOCOLS]
    return documents.table(["", *requests, "CPU ms a second, idle", "resident MiB"], rows) + (
        f"\n\nsingletree's scripted engine alone took {measured.engine_first:.1f} ms of CPU for a known "
        "prompt of 50,000 tokens; it is inside singletree's figures above, Dynamo's worker outside Dynamo's."
    )
