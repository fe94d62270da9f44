"""A template that prints the time prints that of a session's first prompt, for a day."""

from __future__ import annotations

from typing import Any

import pytest

from singletree.prompts.history.canonicalization import SESSION_CLOCK
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.server.turn import prompt
from singletree.testing import byte_model

from .carrying import ONE, Client, last_prompt, server, without_words
from .serving import TOKENIZER

TEMPLATE = ChatTemplate("Now: {{ strftime_now('%Y-%m-%d %H:%M:%S') }}\n" + byte_model.CHAT_TEMPLATE)
DAY = 86_400.0
COUNTED = f'singletree_stability_rules_total{{rule="{SESSION_CLOCK.name}"}}'


class Hours:
    """Stands in for the module ``time``, at ``now``."""

    now = 1.8e9

    def time(self) -> float:
        """See ``time``."""
        return self.now


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Hours:
    """The clock of the server."""
    made = Hours()
    monkeypatch.setattr(prompt, "time", made)
    return made


def shown(prompt: list[int]) -> str:
    return TOKENIZER.decode(prompt).partition("\n")[0]


async def times(hours: Hours, passing: list[float], **settings: Any) -> tuple[list[str], str]:
    """What each prompt of a session shows, so much later than the one before; and the counts."""
    layout = TEMPLATE.layout(TOKENIZER)
    client = Client("/v1/messages", "[[script:a]] How is it?", stream=True)
    reported = []
    async with server({"a": ONE}, capsules=None, template=TEMPLATE, layout=layout, **settings) as served:
        for seconds in passing:
            hours.now += seconds
            client.take(await client.ask(served))
            reported.append(shown(last_prompt(served)))
        counts = (await served.client.get("/metrics")).body.decode()
    return reported, counts


async def test_the_clock_stands_for_a_day(hours: Hours) -> None:
    reported, counts = await times(hours, [0, 61, 3600, DAY, 5])
    assert reported[0] == reported[1] == reported[2]
    assert reported[3] == reported[4] != reported[0]
    assert f"{COUNTED} 3.0" in counts


async def test_the_rule_has_a_switch(hours: Hours) -> None:
    reported, counts = await times(hours, [0, 61], stability_off=frozenset({SESSION_CLOCK.name}))
    assert reported[0] != reported[1]
    assert COUNTED not in counts


async def test_it_goes_from_replica_to_replica(hours: Hours) -> None:  # C34
    layout = TEMPLATE.layout(TOKENIZER)
    client = Client("/v1/messages", "[[script:a]] How is it?", stream=True)
    reported = set()
    for _ in range(3):
        hours.now += 61
        async with server({"a": ONE}, template=TEMPLATE, layout=layout) as served:
            client.take(without_words(await client.ask(served)))
            reported.add(shown(last_prompt(served)))
    assert len(reported) == 1


async def test_another_session_has_its_own(hours: Hours) -> None:
    layout = TEMPLATE.layout(TOKENIZER)
    reported = []
    async with server({"a": ONE}, template=TEMPLATE, layout=layout, capsules=None) as served:
        for question in ("How is it?", "And how is it now?"):
            hours.now += 61
            client = Client("/v1/messages", f"[[script:a]] {question}", stream=True)
            client.take(await client.ask(served))
            reported.append(shown(last_prompt(served)))
    assert reported[0] != reported[1]
