"""Real harnesses carry a turn to a server that has forgotten it, in the capsules that they send back."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise, product, takewhile

import pytest

from clients.conftest import Perform
from clients.harness import HARNESSES, Harness
from clients.ran import Ran
from clients.scenarios import ANSWER, COMMAND
from clients.scripts import HERMES, Style
from clients.served import Play
from clients.turns import read, shell, text_for_user, thought

FORGETFUL = ("--turn-memory", "1")
"""A server that keeps nothing of a turn, as a second replica under the same key."""

OWN_SPELLING = Style(
    "own_spelling",
    (),
    lambda name, arguments: HERMES.call(name, arguments).replace('": ', '":   '),
    HERMES.breaks,
)
"""A model that writes its calls in another way than its template does."""

CARRY_NONE = {
    # They compact arguments and keep no field that could bring back a call in another spelling than the template's.
    ("qwen-chat", "own_spelling"),
    ("opencode-chat", "own_spelling"),
    ("openclaw-chat", "own_spelling"),
    ("cline-chat", "own_spelling"),
    ("kimi-chat", "own_spelling"),
    # They leave out what they are given of redacted_thinking.
    ("qwen-messages", "own_spelling"),
    ("copilot-messages", "own_spelling"),
    # They return no thoughts, and ask for none on Responses.
    *product(("cline-messages", "cline-responses", "kimi-responses"), ("hermes", "own_spelling")),
}


def share_kept(done: Ran, *, appends: bool) -> float:
    """Return how much of what was generated stands in the next prompt, by tokens, from the beginning of each turn."""
    steps = list(pairwise(done.plays))
    kept = sum(_kept(before, after, appends=appends) for before, after in steps)
    return kept / sum(len(before.token_ids) for before, _ in steps)


def _kept(before: Play, after: Play, *, appends: bool) -> int:
    generated = before.token_ids
    if appends:
        whole = before.prompt_token_ids + generated
        pairs = zip(after.prompt_token_ids, whole, strict=False)
        return max(
            0, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) - len(whole) + len(generated)
        )
    prompt = "".join(map(chr, after.prompt_token_ids))
    missing = bisect_right(
        range(len(generated) + 1), 0, key=lambda size: "".join(map(chr, generated[:size])) not in prompt
    )
    return missing - 1


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.title)
@pytest.mark.parametrize("style", [HERMES, OWN_SPELLING], ids=lambda style: style.name)
def test_a_turn_comes_back_on_another_replica(ran: Perform, harness: Harness, style: Style) -> None:
    turns = (
        (thought("I run the command first."), shell(COMMAND)),
        (thought("Now the notes."), text_for_user("I read the notes."), read()),
        (thought("I know both."), text_for_user(ANSWER)),
    )
    done = ran(harness, style, turns, FORGETFUL)
    done.went_well(ANSWER, generations=3)
    share = share_kept(done, appends=harness.appends)
    if (harness.title.removesuffix(f"-{harness.version}"), style.name) in CARRY_NONE:
        assert share < 0.9, "it carries more than it did: take it off the list"
    else:
        assert share >= 0.9, f"{share:.0%}"
