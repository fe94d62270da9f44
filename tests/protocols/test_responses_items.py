"""Responses in: every kind of input item, as parts of turns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocols.test_responses_decode import CALL, OUTPUT, USER, refused, request, turns
from singletree.conversation import (
    Document,
    Image,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
    Turn,
)
from singletree.protocols.openai import custom_tools


class TestReasoning:
    def parts_of(self, **fields: Any) -> tuple[Part, ...]:
        return tuple(p for t in turns(USER, {"type": "reasoning", "id": "rs", **fields}) for p in t.parts)[1:]

    def test_the_thought_itself_speaks(self) -> None:
        content = [{"type": "reasoning_text", "text": "a"}, {"type": "text", "text": "b"}]
        assert self.parts_of(content=content, summary=[{"type": "summary_text", "text": "s"}]) == (
            Reasoning("ab"),
        )

    def test_else_its_summary(self) -> None:
        summary = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]
        assert self.parts_of(summary=summary, content=None) == (Reasoning("a\n\nb"),)

    def test_encrypted_content_alone_is_kept_in_its_place(self) -> None:  # C34
        [thought] = self.parts_of(summary=[], encrypted_content="sealed")
        assert thought == Reasoning("")
        assert thought.extra is not None
        assert thought.extra["encrypted_content"] == "sealed"

    @pytest.mark.parametrize("content", [{}, {"content": []}, {"content": None, "encrypted_content": None}])
    def test_an_item_without_text_is_kept_in_its_place(self, content: dict[str, Any]) -> None:
        """A client that asked for nothing gets it so, and what it stands for is found by its id."""
        [thought] = self.parts_of(summary=[], **content)
        assert thought == Reasoning("")
        assert thought.extra is not None
        assert thought.extra["id"] == "rs"

    def test_what_the_server_kept_comes_before_a_summary(self) -> None:
        kept = {"text": "all of it", "encrypted_content": "sealed"}
        [thought] = self.parts_of(summary=[{"type": "summary_text", "text": "s"}], singletree_reasoning=kept)
        assert thought == Reasoning("all of it")
        assert thought.extra is not None
        assert thought.extra["encrypted_content"] == "sealed"


class TestCalls:
    @pytest.mark.parametrize(
        "arguments",
        ['{"a": 1.0, "a": 2}', '{"b":"\\u00e9", "n":123456789012345678901}', "{}", '{"a": '],
    )
    def test_arguments_are_kept_byte_for_byte(self, arguments: str) -> None:  # C3
        [turn] = turns({**CALL, "arguments": arguments})
        assert turn.parts == (ToolCall("f", arguments, "c1"),)

    def test_arguments_that_javascript_wrote_have_the_spaces_of_templates(self) -> None:
        [turn] = turns({**CALL, "arguments": '{"a":-1.50,"b":["x,y:z",null]}'})
        [call] = turn.tool_calls
        assert call.arguments == '{"a": -1.50, "b": ["x,y:z", null]}'
        assert not call.verbatim

    @pytest.mark.parametrize(
        ("sent", "read"), [("", "{}"), (None, "{}"), ("null", "{}"), ({"a": 1}, '{"a": 1}')]
    )
    def test_arguments_that_are_no_text(self, sent: Any, read: str) -> None:
        [turn] = turns({**CALL, "arguments": sent})
        assert turn.parts == (ToolCall("f", read, "c1"),)

    def test_a_call_that_was_cut(self) -> None:  # C15
        [turn] = turns({**CALL, "arguments": '{"a', "status": "incomplete"})
        assert turn.parts == (ToolCall("f", '{"a', "c1", complete=False),)

    def test_namespaced_calls_have_the_name_the_model_gave(self) -> None:  # C26
        called = {**CALL, "namespace": "ns", "name": "f"}
        assert turns(called)[0].tool_calls[0].name == "ns__f"

    def test_custom_calls(self) -> None:  # C25
        patch = '*** Begin "Patch"\n\\é🙂'
        custom = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": patch}
        output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done!"}
        decoded = turns(custom, output)
        [call] = decoded[0].tool_calls
        assert json.loads(call.arguments) == {"input": patch}
        assert custom_tools.to_input(call.arguments, complete=True) == patch
        assert decoded[1] == Turn("tool", (ToolResult("c1", (Text("Done!"),)),))

    def test_local_shell_calls(self) -> None:  # C26
        action = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 5}
        shell = {"type": "local_shell_call", "call_id": "c1", "status": "completed", "action": action}
        decoded = turns(shell, {"type": "local_shell_call_output", "id": "c1", "output": '{"out":"a"}'})
        assert decoded[0].parts == (ToolCall("local_shell", '{"command": ["ls"], "timeout_ms": 5}', "c1"),)
        assert decoded[1].parts == (ToolResult("c1", (Text('{"out":"a"}'),)),)

    def test_shell_calls(self) -> None:  # C26
        shell = {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}}
        printed = [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
        decoded = turns(shell, {"type": "shell_call_output", "call_id": "c1", "output": printed})
        assert decoded[0].parts == (ToolCall("shell", '{"commands": ["ls"]}', "c1"),)
        [result] = decoded[1].parts
        assert isinstance(result, ToolResult)
        assert json.loads("".join(p.text for p in result.parts if isinstance(p, Text))) == printed

    def test_patch_calls(self) -> None:
        operation = {"type": "delete_file", "path": "a"}
        patch = {"type": "apply_patch_call", "call_id": "c1", "status": "completed", "operation": operation}
        output = {"type": "apply_patch_call_output", "call_id": "c1", "status": "failed", "output": "no"}
        decoded = turns(patch, output)
        assert decoded[0].parts == (ToolCall("apply_patch", '{"type": "delete_file", "path": "a"}', "c1"),)
        assert decoded[1].parts == (ToolResult("c1", (Text("no"),), is_error=True),)


class TestOutputs:
    def parts_of(self, output: Any) -> ToolResult:
        [turn] = turns({**OUTPUT, "output": output})
        [result] = turn.parts
        assert isinstance(result, ToolResult)
        return result

    def test_pictures_come_with_their_text(self) -> None:  # C33 C35
        output = [
            {"type": "input_text", "text": "a"},
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"},
            {"type": "input_file", "file_data": "data:application/pdf;base64,BBBB", "filename": "x.pdf"},
        ]
        result = self.parts_of(output)
        assert result.parts == (
            Text("a"),
            Image("image/png", "AAAA"),
            Document("application/pdf", "BBBB", title="x.pdf"),
        )
        assert [p.extra for p in result.parts] == output

    @pytest.mark.parametrize(("output", "text"), [({"a": 1}, '{"a":1}'), (5, "5"), ({"content": "x"}, "x")])
    def test_other_values_are_shown_as_json(self, output: Any, text: str) -> None:
        assert self.parts_of(output).parts == (Text(text),)

    @pytest.mark.parametrize("output", [None, "", []])
    def test_empty_outputs(self, output: Any) -> None:  # C36
        assert self.parts_of(output).parts == ()

    def test_failures_are_reported(self) -> None:
        assert self.parts_of({"content": "x", "success": False}).is_error


class TestContent:
    def test_pictures(self) -> None:
        content = [
            {"type": "input_image", "image_url": "https://example.org/a.png"},
            {"type": "input_image", "image_url": {"url": "data:image/jpeg;base64,AAAA"}},
        ]
        assert turns({"role": "user", "content": content})[0].parts == (
            Image(url="https://example.org/a.png"),
            Image("image/jpeg", "AAAA"),
        )

    def test_files(self) -> None:
        content = [
            {"type": "input_file", "file_url": "https://example.org/a.pdf"},
            {"type": "input_file", "file_data": "AAAA", "filename": "a.pdf"},
        ]
        assert turns({"role": "user", "content": content})[0].parts == (
            Document(url="https://example.org/a.pdf"),
            Document(data="AAAA", title="a.pdf"),
        )

    @pytest.mark.parametrize("kind", ["input_image", "input_file"])
    def test_files_that_are_stored_elsewhere_are_refused(self, kind: str) -> None:
        error = refused(input=[{"role": "user", "content": [{"type": kind, "file_id": "file_1"}]}])
        assert error.param is not None
        assert error.param.startswith("input.0.content.0.")
        assert "files are not stored here" in error.message

    def test_refusals_are_text(self) -> None:
        messages = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
        assert turns(messages)[0].parts == (Text("No."),)

    def test_unknown_parts_are_kept_with_a_warning(self) -> None:
        decoded = request(
            input=[{"role": "user", "content": [{"type": "input_audio", "data": "A"}, USER["content"][0]]}]
        )
        assert decoded.conversation.turns[0].parts == (Text("Hello"),)
        assert decoded.warnings == (
            "input.0.content.0: type 'input_audio' is kept but not shown to the model",
        )
