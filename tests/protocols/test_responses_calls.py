"""Responses out: each call as the item that its tool's client knows."""

from __future__ import annotations

import json

import pytest

from protocols import shapes
from protocols.grammar_responses import Grammar
from protocols.test_responses_encode import (
    Json,
    accumulated,
    body,
    encoder,
    request,
    stream,
)
from singletree.events import Finished, Usage

APPLY_PATCH: Json = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'},
}
AGENTS: Json = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Sub-agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}],
}
TOOLS: list[Json] = [APPLY_PATCH, AGENTS, {"type": "local_shell"}]


PATCH = '*** Begin Patch\n*** Add File: "é"\n+\\path\t🙂\n*** End Patch'


class TestCalls:
    """The item of a call is of its tool's own type, under its own name."""

    def seen(self, name: str, *pieces: str, ends: bool = True) -> tuple[Json, Json]:
        """The item as it streams and as it stands in the body."""
        shape = shapes.Shape("", shapes.call(0, name, *pieces, ends=ends), shapes.finished())
        of = request(tools=TOOLS)
        grammar = Grammar(stream(shape.events, of=of))
        accumulated(stream(shape.events, of=of))
        [item] = grammar.items
        assert grammar.response == body(shape, of)
        assert grammar.dispatched == ([item] if ends else [])
        return item, body(shape, of)["output"][0]

    def test_custom_input_is_raw(self) -> None:  # C25
        item, whole = self.seen("apply_patch", *json.dumps({"input": PATCH}))
        assert item == whole
        assert item == {
            "id": "ctc_1",
            "type": "custom_tool_call",
            "status": "completed",
            "input": PATCH,
            "call_id": shapes.call_id(0),
            "name": "apply_patch",
        }

    def test_custom_input_streams(self) -> None:  # C25
        encoding = encoder(request(tools=TOOLS))
        start, *deltas, _, _ = shapes.call(0, "apply_patch", *json.dumps({"input": "a\nb"}))
        encoding.feed(start)
        answer = [json.loads(s.partition(b"data: ")[2])["delta"] for d in deltas if (s := encoding.feed(d))]
        assert answer == ["a", "\n", "b"]

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ('{"why": "x", "input": "p"}', "p"),
            ('"p"', "p"),
            ('{"patch": "p"}', '{"patch": "p"}'),
            ('{"input": 1}', '{"input": 1}'),
            ("{}", "{}"),
            ('{"input": ""}', ""),
        ],
    )
    def test_custom_input_of_another_form(self, arguments: str, expected: str) -> None:  # C17 C25
        item, _ = self.seen("apply_patch", arguments)
        assert item["input"] == expected

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [('{"input": "*** Beg', "*** Beg"), ('{"inp', ""), ('{"other": 1', '{"other": 1')],
    )
    def test_custom_input_that_was_cut(self, arguments: str, expected: str) -> None:  # C15
        item, _ = self.seen("apply_patch", *arguments, ends=False)
        assert (item["input"], item["status"]) == (expected, "incomplete")

    def test_namespaced_names_are_restored(self) -> None:  # C26
        item, _ = self.seen("multi_agent_v1__spawn", '{"a":', " 1.0}")
        assert (item["namespace"], item["name"]) == ("multi_agent_v1", "spawn")
        assert item["arguments"] == '{"a": 1.0}'

    def test_a_name_the_model_gave_without_its_namespace_is_restored_too(self) -> None:  # C26
        item, _ = self.seen("spawn", "{}")
        assert (item["namespace"], item["name"]) == ("multi_agent_v1", "spawn")

    def test_a_name_of_two_namespaces_stays_as_the_model_wrote_it(self) -> None:  # C26
        spaces = [{**AGENTS, "name": name} for name in ("a", "b")]
        shape = shapes.Shape("", shapes.call(0, "spawn", "{}"), shapes.finished())
        [item] = body(shape, request(tools=spaces))["output"]
        assert (item["name"], item.get("namespace")) == ("spawn", None)

    def test_native_calls_have_their_own_item(self) -> None:  # C26
        item, _ = self.seen("local_shell", '{"command": ["ls", ', '"-la"], "timeout_ms": 1000}')
        assert item == {
            "id": "lsh_1",
            "type": "local_shell_call",
            "status": "completed",
            "call_id": shapes.call_id(0),
            "action": {"type": "exec", "env": {}, "command": ["ls", "-la"], "timeout_ms": 1000},
        }

    @pytest.mark.parametrize("arguments", ['{"command": "ls"}', "{}", "[]", '{"command": [1]}'])
    def test_native_calls_that_do_not_fit_stay_function_calls(self, arguments: str) -> None:  # C17
        item, _ = self.seen("local_shell", arguments)
        assert (item["type"], item["name"], item["arguments"]) == ("function_call", "local_shell", arguments)

    @pytest.mark.parametrize("arguments", ['{"command": ["ls"', ""])
    def test_native_calls_that_were_cut(self, arguments: str) -> None:  # C15
        item, _ = self.seen("local_shell", arguments, ends=False)
        assert (item["type"], item["arguments"]) == ("function_call", arguments)

    def test_unknown_tools_are_called_as_the_model_says(self) -> None:
        item, _ = self.seen("no such tool", "{}")
        assert (item["type"], item["name"]) == ("function_call", "no such tool")


def test_half_a_surrogate_pair_does_not_break_the_stream() -> None:
    shape = shapes.Shape(
        "",
        (*shapes.text("a\ud83d"), *shapes.call(0, "f\udc00", '{"a": "\udc00"}')),
        Finished("stop", Usage()),
    )
    seen = Grammar(stream(shape.events))
    assert seen.items[0]["content"][0]["text"] == "a\ufffd"
    assert seen.response["output"] == body(shape)["output"]
