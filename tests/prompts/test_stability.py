"""What means nothing changes nothing; each rule acts alone and can be switched off."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prompts.conversations import canonicalize
from singletree.conversation import (
    Conversation,
    Image,
    Part,
    Reasoning,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolReference,
    ToolResult,
    Turn,
)
from singletree.prompts.history.canonicalization import PLACEHOLDER_TOOL, RULES, Canonicalize

HEADER = "x-anthropic-billing-header: cc_version={}; cc_entrypoint=cli; cch={};"
MAIN = "You are Claude Code.\n\nx = 1; y = 2;\nKeep  this."


def turn(role: Role, *parts: Part | str) -> Turn:
    return Turn(role, tuple(Text(part) if isinstance(part, str) else part for part in parts))


def conversation(*turns: Turn, tools: tuple[Tool, ...] = ()) -> Conversation:
    return Conversation(turns, tools)


USER = turn("user", "hi")


def call(id: str) -> ToolCall:
    return ToolCall("f", "{}", id)


def result(id: str) -> ToolResult:
    return ToolResult(id, (Text(f"result {id}"),))


@pytest.mark.parametrize(
    "shape",
    [
        lambda header: [header + MAIN],
        lambda header: [header + "\n" + MAIN],
        lambda header: [header + "\r\n" + MAIN],
        lambda header: [header, MAIN],
        lambda header: [header + "\n", MAIN],
        lambda header: [header.upper(), MAIN],
        lambda header: [header[:-1] + "\n" + MAIN],
    ],
)
def test_the_billing_header_leaves_no_trace(shape: Any) -> None:  # C2
    for version, hash in (("2.1.101.e51", "a5145"), ("2.1.329.929", "00000")):
        for role in ("system", "developer"):
            given = conversation(turn(role, *shape(HEADER.format(version, hash))), USER)
            canonical, acted = canonicalize(given)
            assert canonical == conversation(turn(role, MAIN), USER)
            assert acted[0] == "billing_header"


def test_the_billing_header_anywhere_in_system_and_nowhere_else() -> None:  # C2
    header = HEADER.format("1", "2")
    assert canonicalize(conversation(turn("system", f"A\n{header}\nB")))[0] == conversation(
        turn("system", "A\nB")
    )
    assert canonicalize(conversation(turn("system", header), USER))[0] == conversation(USER)
    quoted = conversation(turn("user", header), turn("assistant", header))
    assert canonicalize(quoted) == (quoted, ())
    given = conversation(turn("system", header + "A"))
    assert canonicalize(given, off=frozenset({"billing_header"})) == (given, ())


def test_blocks_are_one_text() -> None:
    split = conversation(turn("system", "a", "b\n", "c", "\nd"), turn("user", "a", Image(), "b", "c"))
    joined = conversation(turn("system", "a\nb\nc\nd"), turn("user", "a", Image(), "b\nc"))
    assert canonicalize(split) == (joined, ("text_blocks",))
    in_result = conversation(turn("tool", ToolResult("1", (Text("a"), Text("b")))))
    assert canonicalize(in_result)[0] == conversation(turn("tool", ToolResult("1", (Text("a\nb"),))))
    history = conversation(turn("assistant", "a", "b", Reasoning("r"), Reasoning("s")))
    assert canonicalize(history) == (history, ())


def test_results_in_call_order() -> None:
    calls = turn("assistant", call("a"), call("b"), call("c"))
    ordered = conversation(calls, turn("tool", result("a"), result("b"), result("c")), USER)
    assert (
        canonicalize(conversation(calls, turn("tool", result("c"), result("a"), result("b")), USER))[0]
        == ordered
    )
    apart = conversation(
        calls, turn("tool", result("b")), turn("tool", result("c")), turn("tool", result("a")), USER
    )
    assert canonicalize(apart) == (ordered, ("result_order",))
    strange = conversation(calls, turn("tool", result("x"), result("b"), result("y")))
    assert canonicalize(strange)[0] == conversation(
        calls, turn("tool", result("b"), result("x"), result("y"))
    )


def test_neighbouring_messages_of_the_assistant_are_one() -> None:
    thought, one, two = Reasoning("a"), call("1"), call("2")
    split = [USER, turn("assistant", thought), turn("assistant", "b"), turn("assistant", "c", one)]
    results = turn("tool", result("2"), result("1"))
    changed, rules = canonicalize(
        conversation(*split, turn("assistant", two), results, turn("assistant", "d"))
    )
    joined = turn("assistant", thought, "b\nc", one, two)
    in_order = turn("tool", result("1"), result("2"))
    assert changed.turns == (USER, joined, in_order, turn("assistant", "d"))
    assert rules == ("assistant_messages", "result_order")


def test_what_goes_on_from_part_of_a_run_is_made_as_one() -> None:
    """A prompt is made canonical in stretches, which are kept for the next one: none ends inside a turn."""
    generated = [USER, turn("assistant", "a"), turn("assistant", call("1")), turn("tool", result("1"))]
    generated += [
        turn("assistant", "b"),
        turn("assistant", "c"),
        USER,
        turn("assistant", "d"),
        turn("assistant", "e"),
    ]
    before = None
    for end in range(1, len(generated) + 1):
        given_turns = conversation(*generated[:end])
        (canonical, *_), before = Canonicalize().run(given_turns, before)
        assert canonical == canonicalize(given_turns)[0]
        roles = [t.role for t in canonical.turns]
        assert ("assistant", "assistant") not in pairwise(roles)


def test_system_between_call_and_result_waits() -> None:  # C1
    calls, nudge, results = turn("assistant", call("a")), turn("system", "n"), turn("tool", result("a"))
    assert canonicalize(conversation(USER, calls, nudge, turn("developer", "m"), results, USER)) == (
        conversation(USER, calls, results, nudge, turn("developer", "m"), USER),
        ("system_after_results",),
    )
    two = turn("assistant", call("a"), call("b"))
    apart = conversation(two, turn("tool", result("b")), nudge, turn("tool", result("a")), nudge)
    assert canonicalize(apart)[0] == conversation(two, turn("tool", result("a"), result("b")), nudge, nudge)
    unanswered = conversation(USER, calls, nudge, USER)
    assert canonicalize(unanswered) == (unanswered, ())
    elsewhere = conversation(turn("system", "s"), USER, nudge, turn("assistant", "a"), nudge, USER)
    assert canonicalize(elsewhere) == (elsewhere, ())


def test_deferred_tools_stand_where_they_are_referenced() -> None:
    head = (Tool("f", "d"), Tool(PLACEHOLDER_TOOL, deferred=True))
    web = Tool("web", "search é", {"type": "object"}, deferred=True)
    searched = turn("tool", ToolResult("a", (ToolReference("web"), ToolReference("gone"))))
    before = canonicalize(conversation(USER, turn("assistant", call("a")), tools=head))[0]
    after, acted = canonicalize(
        conversation(USER, turn("assistant", call("a")), searched, tools=(head[0], web, head[1]))
    )
    assert before.tools == after.tools == (Tool("f", "d"),)
    assert acted == ("deferred_tools", "text_blocks")
    assert after.turns[-1].parts == (
        ToolResult(
            "a",
            (
                Text(
                    '{"type": "function", "function": {"name": "web", "description": "search é", '
                    '"parameters": {"type": "object"}}}\ngone'
                ),
            ),
        ),
    )
    added = canonicalize(conversation(turn("system", ToolReference("web")), tools=(web,)))[0]
    assert added.turns[0].text.startswith('{"type"')
    assert canonicalize(conversation(USER, tools=(Tool(PLACEHOLDER_TOOL),)))[0].tools == ()


def test_what_runs_beside_a_tool_loop_asks_no_new_question() -> None:
    text = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nexec: 1\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>\n"
    context, loop = turn("user", text), (USER, turn("assistant", call("a")), turn("tool", result("a")))
    made, rules = canonicalize(conversation(*loop, context))
    assert made.turns == (*loop, turn("system", text))
    assert rules == ("harness_context",)
    for other in (turn("user", "And? " + text), turn("user", "go on")):
        assert canonicalize(conversation(*loop, other))[0].turns[-1] == other
    assert canonicalize(conversation(USER, context))[0].turns[-1] == context


def test_a_question_without_tools_gets_those_of_its_session() -> None:
    tools = (Tool("f", "d"),)
    asked: list[int] = []

    def tools_of(turns: Sequence[Turn]) -> tuple[Tool, ...]:
        asked.append(len(turns))
        return tools

    bare = conversation(USER, turn("user", "a", "b"))
    kept, acted = canonicalize(bare, tools_of=tools_of)
    assert (kept.tools, acted) == (tools, ("text_blocks", "compaction_tools"))
    assert kept.turns == canonicalize(bare)[0].turns
    own = conversation(USER, tools=(Tool("g"),))
    assert canonicalize(own, tools_of=tools_of) == (own, ())
    off = frozenset({"compaction_tools"})
    assert canonicalize(conversation(USER), off=off, tools_of=tools_of) == (conversation(USER), ())
    assert asked == [2], "a session is asked only where tools are missing"


def test_rules_have_names_and_reasons() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(len(rule.reason) > 40 for rule in RULES)


TEXTS = st.sampled_from(["a", "b\n", HEADER.format("1", "2"), ""])
PARTS = st.one_of(
    TEXTS.map(Text),
    st.sampled_from([Image(), ToolReference("web")]),
    st.builds(ToolResult, st.sampled_from(["1", "2", "3"]), st.tuples(TEXTS.map(Text), TEXTS.map(Text))),
    st.sampled_from([ToolCall("f", "{}", "1"), ToolCall("f", "{}", "2"), Reasoning("r")]),
)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
CONVERSATIONS = st.builds(
    Conversation,
    st.lists(st.builds(Turn, ROLES, st.lists(PARTS, max_size=4).map(tuple)), max_size=8).map(tuple),
    st.sampled_from([(), (Tool("web", deferred=True),), (Tool("f"),)]),
)


@settings(max_examples=150, deadline=None)
@given(given_conversation=CONVERSATIONS)
def test_any_conversation_is_made_canonical_once(given_conversation: Conversation) -> None:
    once, _ = canonicalize(given_conversation)
    assert canonicalize(once) == (once, ())
    everything_off = frozenset(rule.name for rule in RULES)
    assert canonicalize(given_conversation, off=everything_off) == (given_conversation, ())
