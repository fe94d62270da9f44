"""What a request holds the model to, and what is refused or said when it cannot be held."""

from __future__ import annotations

import json
from typing import Any

import pytest

from singletree import families
from singletree.engines.engine import EngineInfo

from .serving import body, serving

MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
each_protocol = pytest.mark.parametrize("path", [MESSAGES, CHAT, RESPONSES])
FINE = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
ODD = {"type": "object", "properties": {"path": {"not": {"const": "x"}}}}
AT = {MESSAGES: "tools.0.input_schema", CHAT: "tools.0.function.parameters", RESPONSES: "tools.0.parameters"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": FINE, "strict": True}}


def tool(path: str, schema: Any = FINE, strict: bool | None = True, name: str = "ls") -> dict[str, Any]:
    strictly = {} if strict is None else {"strict": strict}
    if path == MESSAGES:
        return {"name": name, "input_schema": schema, **strictly}
    function = {"name": name, "parameters": schema, **strictly}
    return {"type": "function", "function": function} if path == CHAT else {"type": "function", **function}


def required(path: str) -> Any:
    return {"type": "any"} if path == MESSAGES else "required"


async def asked(path: str, *, kinds: Any = None, **more: Any) -> tuple[Any, Any]:
    """The reply, and the constraint that the engine was given."""
    settings = {name: more.pop(name) for name in ("family",) if name in more}
    async with serving(**settings) as served:
        if kinds is not None:
            served.engine._info = EngineInfo("scripted", 8192, constraints=kinds)
        reply = await served.client.post(path, body(path, "[[echo:x]]", **more))
        played = served.engine.log[0] if served.engine.log else None
    return reply, played and played.constraint


@each_protocol
async def test_a_strict_tool_is_held_to_and_text_stays_free(path: str) -> None:  # C42
    reply, constraint = await asked(path, tools=[tool(path)])
    assert reply.status == 200
    assert constraint.kind == "lark"
    assert "end_" in constraint.value, "text may end the turn"
    _, none = await asked(path, tools=[tool(path, strict=False)])
    assert none is None


@each_protocol
@pytest.mark.parametrize("forced", [False, True])
async def test_a_strict_schema_that_cannot_be_held_to_is_refused_by_path(
    path: str, forced: bool
) -> None:  # C42
    more = {"tool_choice": required(path)} if forced else {}
    reply, constraint = await asked(path, tools=[tool(path, ODD)], **more)
    assert (reply.status, constraint) == (400, None)
    assert f"{AT[path]}.properties.path.not" in reply.body.decode()
    reply, constraint = await asked(path, tools=[tool(path, ODD, strict=None)], tool_choice=required(path))
    assert reply.status == 200
    assert constraint is not None


@each_protocol
async def test_the_engine_gets_it_in_its_own_format(path: str) -> None:
    _, constraint = await asked(path, kinds=("structural_tag", "lark"), tools=[tool(path)])
    assert constraint.kind == "structural_tag"
    assert constraint.value["format"]["type"] == "triggered_tags"
    fifth = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 5}}}
    _, constraint = await asked(path, kinds=("structural_tag", "lark"), tools=[tool(path, fifth)])
    assert constraint.kind == "lark", "XGrammar would pass multipleOf over"


@each_protocol
async def test_an_engine_without_constraints_cannot_force_a_call(path: str) -> None:
    reply, _ = await asked(path, kinds=(), tools=[tool(path)], tool_choice=required(path))
    assert reply.status == 400
    reply, constraint = await asked(path, kinds=(), tools=[tool(path)])
    assert (reply.status, constraint) == (200, None)
    assert "not enforced" in reply.headers["x-singletree-warning"]


@each_protocol
async def test_a_format_without_a_marker_is_left_free_and_it_is_reported(path: str) -> None:
    """A user of a native API expects an answer; a refusal would cost every strict request on Llama 3."""
    reply, constraint = await asked(path, tools=[tool(path)], family=families.get("llama3_json"))
    assert (reply.status, constraint) == (200, None)
    assert "strict" in reply.headers["x-singletree-warning"]
    assert "llama3_json" in reply.headers["x-singletree-warning"]


def allowing(path: str, mode: str, *names: str) -> Any:
    tools = [{"type": "function", "name": name} for name in names]
    if path == RESPONSES:
        return {"type": "allowed_tools", "mode": mode, "tools": tools}
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_may_be_called(path: str, mode: str) -> None:  # C6 C38
    tools = [tool(path, strict=None, name=name) for name in ("ls", "cat", "rm")]
    async with serving() as served:
        for more in ({}, {"tool_choice": allowing(path, mode, "ls", "cat")}):
            assert (
                await served.client.post(path, body(path, "[[echo:x]]", tools=tools, **more))
            ).status == 200
        free, held = served.engine.log
    assert free.prompt_token_ids == held.prompt_token_ids
    assert free.constraint is None
    assert held.constraint is not None
    assert '\\"ls\\"' in held.constraint.value
    assert '\\"cat\\"' in held.constraint.value
    assert '\\"rm\\"' not in held.constraint.value


async def test_a_response_format_is_held_to_beside_tools() -> None:
    reply, constraint = await asked(CHAT, tools=[tool(CHAT, strict=None)], response_format=FORMAT)
    assert reply.status == 200
    assert "%json" in constraint.value
    assert "<tool_call>" in constraint.value
    odd = {"type": "json_schema", "json_schema": {"name": "n", "schema": ODD, "strict": True}}
    reply, _ = await asked(CHAT, response_format=odd)
    assert reply.status == 400
    assert "response_format.json_schema.schema.properties.path.not" in reply.body.decode()


FORMATS: list[tuple[str, dict[str, Any], str]] = [
    (
        MESSAGES,
        {"output_config": {"format": {"type": "json_schema", "schema": FINE}}},
        "output_config.format",
    ),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": FINE}}, "output_format"),
    (CHAT, {"response_format": FORMAT}, "response_format"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n", "schema": FINE}}}, "text.format"),
]


@pytest.mark.parametrize(("path", "asks", "field"), FORMATS, ids=[f[2] for f in FORMATS])
async def test_a_format_that_cannot_be_held_to_is_named_as_its_api_does(
    path: str, asks: dict[str, Any], field: str
) -> None:  # C44
    reply, _ = await asked(path, kinds=(), **asks)
    assert reply.status == 400
    assert reply.json["error"]["message"].startswith(f"{field}: the engine behind this model")
    reported, _ = await asked(
        path, tools=[tool(path, strict=None)], family=families.get("llama3_json"), **asks
    )
    assert reported.status == 200
    assert reported.headers["x-singletree-warning"].startswith(f"{field}: not enforced beside tools")


PATCH = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"},
}


async def test_a_custom_grammar_is_held_to_or_it_is_reported_that_it_is_not() -> None:
    reply, constraint = await asked(RESPONSES, tools=[PATCH], family=families.get("qwen3_coder"))
    assert "start: /a+/" in constraint.value
    assert "x-singletree-warning" not in reply.headers
    reply, constraint = await asked(RESPONSES, tools=[PATCH])
    assert constraint is None
    assert "patch" in reply.headers["x-singletree-warning"]


@pytest.mark.parametrize(("definition", "held"), [("start: /a+/", True), ("start: %json {}", False)])
async def test_a_custom_grammar_that_the_engine_cannot_take_is_left_out(definition: str, held: bool) -> None:
    kinds = ("structural_tag",)
    family = families.get("qwen3_coder")
    patch = PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": definition}}
    reply, constraint = await asked(
        RESPONSES, kinds=kinds, tools=[patch], tool_choice="required", family=family
    )
    assert constraint.kind == "structural_tag"
    assert ('"type": "grammar"' in json.dumps(constraint.value)) is held
    assert ("grammars" in reply.headers.get("x-singletree-warning", "")) is not held


async def test_a_model_that_must_not_think_does_not() -> None:
    tools = [tool(CHAT)]
    _, thinks = await asked(CHAT, tools=tools, tool_choice="required")
    _, silent = await asked(CHAT, tools=tools, tool_choice="required", reasoning={"enabled": False})
    assert "<think>" in thinks.value
    assert "<think>" not in silent.value


@pytest.mark.parametrize("kind", ["local_shell", "shell", "apply_patch"])
async def test_a_native_tool_is_held_to_the_shape_of_its_item(kind: str) -> None:  # C42
    for kinds in (("lark",), ("structural_tag", "lark")):
        reply, constraint = await asked(RESPONSES, kinds=kinds, tools=[{"type": kind}])
        assert reply.status == 200, reply.body
        assert constraint is not None
        assert kind in json.dumps(constraint.value)
    reply, constraint = await asked(RESPONSES, kinds=(), tools=[{"type": kind}])
    assert (reply.status, constraint) == (200, None)
    reply, constraint = await asked(RESPONSES, tools=[{"type": kind}], family=families.get("llama3_json"))
    assert (reply.status, constraint) == (200, None)
