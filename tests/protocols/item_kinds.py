"""Every kind of item that the Responses API has, as clients send it."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

PICTURE = "data:image/png;base64,iVBORw0KGgo="
TEXT = {"type": "input_text", "text": "Look."}
IMAGE = {"type": "input_image", "image_url": PICTURE}
PDF = {"type": "input_file", "file_data": "data:application/pdf;base64,JVBERi0=", "filename": "a.pdf"}
FOUND = {"type": "function", "name": "found", "parameters": {"type": "object"}, "strict": False}
COMMAND = {"commands": ["ls"], "timeout_ms": 1000}
PRINTED = [{"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]

KINDS: dict[str, Json] = {
    "message_text": {"role": "user", "content": "Hello."},
    "message_user": {"type": "message", "role": "user", "content": [TEXT, IMAGE, PDF]},
    "message_system": {"type": "message", "role": "system", "content": [TEXT]},
    "message_developer": {"type": "message", "role": "developer", "content": "Be brief."},
    "message_assistant_text": {"role": "assistant", "content": "Yes.", "phase": "commentary"},
    "message_assistant": {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "phase": "final_answer",
        "content": [
            {"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []},
            {"type": "refusal", "refusal": "But no."},
        ],
    },
    "reasoning": {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "In short."}],
        "content": [{"type": "reasoning_text", "text": "At length."}],
        "encrypted_content": "sealed",
        "status": "completed",
    },
    "reasoning_sealed": {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "sealed"},
    "reasoning_summary": {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "In short."}],
    },
    "function_call": {
        "type": "function_call",
        "call_id": "c1",
        "name": "f",
        "arguments": '{"b": 1.0, "a": "é"}',
    },
    "function_call_namespace": {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "c1",
        "name": "spawn",
        "namespace": "agents",
        "arguments": "{}",
        "status": "completed",
    },
    "function_call_output": {"type": "function_call_output", "call_id": "c1", "output": "done"},
    "function_call_output_parts": {
        "type": "function_call_output",
        "call_id": "c1",
        "output": [TEXT, IMAGE, PDF],
    },
    "custom_tool_call": {
        "type": "custom_tool_call",
        "call_id": "c1",
        "name": "apply_patch",
        "input": '*** Begin "Patch"\n\\é🙂',
    },
    "custom_tool_call_output": {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done!"},
    "custom_tool_call_output_parts": {
        "type": "custom_tool_call_output",
        "call_id": "c1",
        "output": [IMAGE, TEXT],
    },
    "item_reference": {"type": "item_reference", "id": "msg_known"},
    "item_reference_untyped": {"id": "msg_known"},
    "web_search_call": {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "weather", "queries": ["weather"]},
    },
    "tool_search_call": {"type": "tool_search_call", "call_id": "c1", "arguments": {"query": "agents"}},
    "tool_search_output": {
        "type": "tool_search_output",
        "call_id": "c1",
        "execution": "client",
        "status": "completed",
        "tools": [FOUND],
    },
    "additional_tools": {"type": "additional_tools", "role": "developer", "tools": [FOUND]},
    "configuration_update": {"type": "configuration_update", "reasoning": {"effort": "low"}},
    "local_shell_call": {
        "type": "local_shell_call",
        "id": "lsh_1",
        "call_id": "c1",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 5},
    },
    "local_shell_call_output": {"type": "local_shell_call_output", "id": "c1", "output": '{"stdout":"a"}'},
    "shell_call": {"type": "shell_call", "call_id": "c1", "action": COMMAND},
    "shell_call_output": {
        "type": "shell_call_output",
        "call_id": "c1",
        "output": PRINTED,
        "max_output_length": 9,
    },
    "apply_patch_call": {
        "type": "apply_patch_call",
        "call_id": "c1",
        "status": "completed",
        "operation": {"type": "update_file", "path": "a", "diff": "@@\n-a\n+b"},
    },
    "apply_patch_call_output": {
        "type": "apply_patch_call_output",
        "call_id": "c1",
        "status": "failed",
        "output": "no such file",
    },
    "file_search_call": {"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["a"]},
    "computer_call": {
        "type": "computer_call",
        "id": "cu_1",
        "call_id": "c1",
        "status": "completed",
        "pending_safety_checks": [],
        "action": {"type": "screenshot"},
    },
    "computer_call_output": {
        "type": "computer_call_output",
        "call_id": "c1",
        "output": {"type": "computer_screenshot", "image_url": PICTURE},
    },
    "image_generation_call": {
        "type": "image_generation_call",
        "id": "ig_1",
        "status": "completed",
        "result": "AAAA",
    },
    "code_interpreter_call": {
        "type": "code_interpreter_call",
        "id": "ci_1",
        "status": "completed",
        "container_id": "cntr_1",
        "code": "1",
        "outputs": [{"type": "logs", "logs": "1"}],
    },
    "mcp_list_tools": {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": []},
    "mcp_approval_request": {
        "type": "mcp_approval_request",
        "id": "mcpr_1",
        "server_label": "s",
        "name": "f",
        "arguments": "{}",
    },
    "mcp_approval_response": {
        "type": "mcp_approval_response",
        "approval_request_id": "mcpr_1",
        "approve": True,
    },
    "mcp_call": {
        "type": "mcp_call",
        "id": "mcp_1",
        "server_label": "s",
        "name": "f",
        "arguments": "{}",
        "output": "x",
    },
    "program": {"type": "program", "id": "pg_1", "call_id": "c1", "code": "f()", "fingerprint": "x"},
    "program_output": {
        "type": "program_output",
        "id": "pgo_1",
        "call_id": "c1",
        "result": "x",
        "status": "completed",
    },
    "unheard_of": {"type": "x_unheard_of", "id": "x_1", "value": [1, {"a": None}]},
}
"""By the name of their golden file. Items of a compaction are told of where those are made."""
