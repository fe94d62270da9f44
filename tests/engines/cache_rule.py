"""How many tokens of a prompt an engine finds in its prefix cache, as ``singletree explain`` predicts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

VLLM_BLOCK = 128
"""vLLM's prefix cache has whole blocks of so many tokens on a CPU."""


def expected_cached_tokens(step: Mapping[str, Any], block: int, *, last_token: bool = False) -> int:
    """Return how many tokens of the prompt are in the cache, if nothing was dropped from it.

    A block is in the cache once all its tokens went through the model. The last token of a turn never did: it was
    sampled, and then the turn was over. So a prompt that continues a whole turn has one token less in the cache than it
    has in common with that turn. And the last token of every prompt is computed: the first new one is sampled after it.

    Args:
        step: one request of ``singletree explain --json``, which continues another one.
        block: how many tokens a block has.
        last_token: whether the last token of the turn before went through the model, too: singletree ended the turn
            when the engine had begun to generate another token.
    """
    computed = step["matched_tokens"] - (step["course"] == "appended" and not last_token)
    return int(min(computed, step["prompt_tokens"] - 1) // block * block)


def cached_as_predicted(
    steps: Sequence[Mapping[str, Any]], block: int, *, forced: bool = False, late: bool = False
) -> None:
    """Check every request of a session that continues the one before it; there has to be one.

    Args:
        steps: the requests of ``singletree explain --json``, without a gap.
        block: how many tokens a block has.
        forced: whether the turns are forced calls, each of which singletree ends where the call does. By then the
            engine may have begun to generate another token.
        late: whether a turn that was ended so may come into the engine's cache only after the next prompt.
    """
    continuing = [(before, step) for before, step in pairwise(steps) if step["course"] != "first"]
    assert continuing
    for before, step in continuing:
        least = expected_cached_tokens(step, block)
        most = expected_cached_tokens(step, block, last_token=forced)
        if forced and late:
            least = before["prompt_tokens"] // block * block
        assert least <= step["cached_tokens"] <= most, (least, most, step)
