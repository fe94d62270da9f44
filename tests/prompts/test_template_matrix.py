"""Whatever the sequence of roles, every template renders it, loses none of it, or says why not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from prompts.conversations import turn
from prompts.template_sources import (
    ALTERNATING,
    HERMES,
    KIMI,
    PARTS,
    XML,
    cached_template,
    collected,
    label,
    write_parts,
)
from singletree.conversation import (
    Conversation,
    Image,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
)
from singletree.errors import BadConfiguration
from singletree.prompts.template.chat_template import CHATML, ChatTemplate


def call(number: int, arguments: str = '{"k": 1}', complete: bool = True) -> ToolCall:
    return ToolCall("qtool", arguments, f"toolu_{number}", complete)


def results(*numbers: int) -> Turn:
    return turn("tool", *(ToolResult(f"toolu_{number}", (Text(f"qresult{number}"),)) for number in numbers))


USER, AGAIN, ANSWER = turn("user", "quser"), turn("user", "qagain"), turn("assistant", "qanswer")
SYSTEM, NUDGE, DEVELOPER = (
    turn("system", "qsystem"),
    turn("system", "qnudge"),
    turn("developer", "qdeveloper"),
)
CALLING = turn("assistant", Reasoning("why"), "qbefore", call(1))
PICTURE = Image("image/png", "aGk=")

SEQUENCES: dict[str, tuple[Turn, ...]] = {
    "user": (USER,),
    "system": (SYSTEM,),
    "assistant": (ANSWER,),
    "empty user": (turn("user"),),
    "system twice": (SYSTEM, DEVELOPER, USER),
    "two users": (USER, AGAIN),
    "two assistants": (USER, ANSWER, turn("assistant", "qmore"), AGAIN),
    "assistant first": (SYSTEM, ANSWER, USER),
    "prefill": (USER, ANSWER),
    "prefill of reasoning": (USER, turn("assistant", Reasoning("why"))),
    "prefill of a call": (USER, CALLING),
    "empty assistant": (USER, turn("assistant"), AGAIN),
    "empty last assistant": (USER, turn("assistant")),
    "nudge": (SYSTEM, USER, NUDGE, ANSWER, DEVELOPER, AGAIN),
    "nudge last": (USER, ANSWER, AGAIN, NUDGE),
    "loop": (SYSTEM, USER, CALLING, results(1)),
    "loop then user": (USER, CALLING, results(1), AGAIN),
    "loop then nudge": (USER, CALLING, results(1), NUDGE),
    "nudge in a loop": (USER, CALLING, NUDGE, results(1)),
    "second loop": (USER, CALLING, results(1), turn("assistant", call(2)), results(2), ANSWER, AGAIN),
    "parallel": (USER, turn("assistant", call(1), call(2)), results(1, 2)),
    "interleaved": (
        USER,
        turn("assistant", Reasoning("a"), "qone", call(1), Reasoning("b"), "qtwo", call(2)),
        results(1, 2),
    ),
    "text after a call": (USER, turn("assistant", call(1), "qafter"), results(1), AGAIN),
    "cut call": (USER, turn("assistant", call(1, '{"k": ', complete=False)), AGAIN),
    "empty result": (USER, CALLING, turn("tool", ToolResult("toolu_1")), AGAIN),
    "result without a call": (USER, results(1), AGAIN),
    "result first": (results(1), ANSWER, AGAIN),
    "call first": (CALLING, results(1)),
    "image": (turn("user", "quser", PICTURE, "qagain"),),
    "image in a result": (USER, CALLING, turn("tool", ToolResult("toolu_1", (Text("qresult1"), PICTURE)))),
}
TOOLS = (Tool("qtool", "d", {"type": "object", "properties": {"k": {"type": "integer"}}}), Tool("bare"))
OWN = {
    "hermes": HERMES,
    "xml": XML,
    "alternating": ALTERNATING,
    "parts": PARTS,
    "kimi": KIMI,
    "chatml": CHATML,
}
DROPS_THOUGHTS_BEFORE_CALLS = {"llama.cpp/openai-gpt-oss-120b", "trl/gptoss"}
"""Harmony's template has one place for text and reasoning before a call, and drops it from finished loops. A text is
kept in the model's own format only, which the tests' own parts are not in."""
MOVES_TOOLS = "mistral", "command"
"""Their templates print the tools before the last user message, so that a new one moves them."""
MOVES_RULES = "command_r_plus", "command-r-plus", "mistral_parallel"
"""Their templates print instructions behind the last message, or in the last one of the user."""


def _words(turns: tuple[Turn, ...]) -> Iterator[str]:
    for written in turns:
        for part in written.parts:
            inner = part.parts if isinstance(part, ToolResult) else (part,)
            yield from (text.text for text in inner if isinstance(text, Text))


@cache
def _loaded(source: str) -> ChatTemplate:
    try:
        return cached_template(source)
    except BadConfiguration as error:
        pytest.skip(error.message)


def _check(name: str, source: str) -> None:
    template = _loaded(source)
    for title, turns in SEQUENCES.items():
        for tools in ((), TOOLS):
            text = template.render(Conversation(turns, tools), render_parts=write_parts)
            places = [text.find(word) for word in _words(turns)]
            if name in DROPS_THOUGHTS_BEFORE_CALLS and title == "second loop":
                continue
            assert -1 not in places, f"{title}: something was lost"
            assert places == sorted(places), f"{title}: something was moved"


@pytest.mark.parametrize("path", collected(), ids=label)
def test_a_conversation_with_nudges_only_grows(path: Path) -> None:  # C1
    template = _loaded(path.read_text(encoding="utf-8"))
    if any(name in label(path) for name in MOVES_RULES):
        pytest.skip("the template moves its instructions")
    moves = any(vendor in label(path).lower() for vendor in MOVES_TOOLS)
    for loop, head in product((True,) if moves else (False, True), ((SYSTEM,), ())):
        turns, before = [*head, USER], ""
        for number in range(4):
            conversation = Conversation(tuple(turns), TOOLS)
            text = template.render(conversation, render_parts=write_parts, add_generation_prompt=False)
            assert text.startswith(before[:-30]), "more than the end of the last turn has changed"
            before = text
            answer = (turn("assistant", call(number)), results(number)) if loop else (ANSWER, AGAIN)
            turns += [*answer, turn("system", f"{number} tokens left")]


@pytest.mark.parametrize("path", collected(), ids=label)
def test_collected_template_takes_every_sequence(path: Path) -> None:  # C36
    _check(label(path), path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", OWN)
def test_own_template_takes_every_sequence(name: str) -> None:  # C36
    _check(name, OWN[name])
