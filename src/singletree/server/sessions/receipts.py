"""Make the receipt of a turn: its ``Cost``, by what the engine, the session and the route tell at its end."""

from __future__ import annotations

from singletree.events import Usage
from singletree.server.sessions.costs import CACHE_BLOCK, Cost, CostSums, Fault
from singletree.server.sessions.sessions import Opened
from singletree.server.sessions.step import Step
from singletree.server.turn.generation import Generation


def add_cost(
    opened: Opened, generation: Generation, usage: Usage, asked: float, ended: float, sums: CostSums
) -> Cost:
    """Add to the step what it cost, and the weights of its generation. The arguments are those of ``cost_of``."""
    if generation.weight_versions:
        opened.step.weights = ", ".join(str(each.version) for each in generation.weight_versions)
    opened.step.cost = cost = cost_of(opened, generation, usage, asked, ended, sums)
    return cost


def cost_of(
    opened: Opened, generation: Generation, usage: Usage, asked: float, ended: float, sums: CostSums
) -> Cost:
    """Return what a turn cost, whose step has what the engine reported.

    Args:
        generation: the first one of the answer.
        usage: the counts of the whole answer, as the client and the metrics get them.
        asked, ended: when its generation began and ended, on the clock of ``perf_counter``.
        sums: what this process has charged before.
    """
    step, first = opened.step, generation.first_token_at
    if step.route is not None:
        asked += step.route.waited_seconds
    prompt, cached, generated = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
    if not first:
        if step.cached is None:
            # A client that left has kept the engine busy; an engine that failed has not worked.
            seconds = 0.0 if step.ended == "error" else max(0.0, ended - asked)
            return Cost(1, prompt, 0, 0, prompt, generated, seconds)
        first = ended
    if asked > first:  # It did not wait as long as its route says.
        asked = first
    cost = Cost(1, prompt, cached, prompt - cached, 0, generated, first - asked, ended - first)
    had = step.cached
    if (
        had is not None
        and not step.lost
        and opened.compared is not None
        and step.matched - had <= CACHE_BLOCK
    ):
        return cost
    in_place = step.matched or _replayed(opened, generation)
    if had is None:
        cost = cost._replace(new=cost.new - in_place, unreported=in_place)
        had = in_place
    elif in_place - had > CACHE_BLOCK:
        cost = _with_fault(cost, _engine_fault(opened, generation, sums), in_place - had)
    if step.lost:
        # Behind the break as far as the last prompt went; what the engine had of it was not read again.
        behind = step.prompt_tokens - max(in_place, had)
        cost = _with_fault(
            cost, "unknown" if step.broken is None else step.broken.fault, min(step.lost, behind)
        )
    return cost


def raw_cost(generation: Generation, usage: Usage, asked: float, ended: float) -> Cost:
    """Return what an answer to raw prompts cost, which have no session: nobody knows what was read before.

    The arguments are those of ``cost_of``.
    """
    prompt, cached, first = usage.prompt_tokens, usage.cached_tokens, generation.first_token_at
    if not first:
        return Cost(1, prompt, 0, 0, prompt, usage.completion_tokens)
    counts = (prompt, cached, prompt - cached, 0, usage.completion_tokens)
    return Cost(1, *counts, max(0.0, first - asked), ended - first)


def _with_fault(cost: Cost, fault: Fault, tokens: int) -> Cost:
    """Return ``cost`` with ``tokens`` of the new ones, as far as there are so many, as read again."""
    again = max(0, min(tokens, cost.new))
    return cost._replace(**{"new": cost.new - again, fault: getattr(cost, fault) + again})


def _replayed(opened: Opened, generation: Generation) -> int:
    """Return how many tokens of the first prompt of a session were generated or read before: where turns of it came
    back by their own tokens, from a file, from another server or from the client.
    """
    prompt = generation.prompt
    return prompt.piece_ends[-1] if opened.compared is None and prompt.replayed and prompt.piece_ends else 0


def _engine_fault(opened: Opened, generation: Generation, sums: CostSums) -> Fault:
    """Return why the engine did not have tokens that were in place."""
    before: Step | None = None if opened.compared is None else opened.compared.step
    if before is None:
        return "eviction" if sums.agents(opened.step.payer[0]) else "restart"
    route, earlier = generation.route, before.route
    if route is not None and (route.failovers or (earlier is not None and earlier.worker != route.worker)):
        return "router"
    ended = before.at + (before.seconds or 0.0)
    return "restart" if generation.model.engine.info().started_at > ended else "eviction"
