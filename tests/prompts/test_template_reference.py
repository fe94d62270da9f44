"""Plain conversations come out byte for byte as Hugging Face renders them, for every collected template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prompts.template_sources import HERMES, KIMI, TODAY, XML, collected, draw, label, reference
from prompts.tiny_vocabulary import byte_level, write_directory
from singletree.conversation import Conversation, Reasoning, Text, Tool, ToolCall, ToolResult, Turn
from singletree.errors import BadConfiguration, InvalidRequest
from singletree.prompts.template import CHATML, ChatTemplate, load_chat_template
from singletree.prompts.template_reads import put_reasoning
from singletree.prompts.tokenizer import load_tokenizer

OWN_SPELLING = {"vllm/tool_chat_template_granite"}
"""Print a call's arguments indented; here they keep the model's own bytes all the same (C3)."""

SOURCES = {"hermes": HERMES, "xml": XML, "kimi": KIMI, "chatml": CHATML}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where <b>&'\" é"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = (
    Tool("get_weather", "The weather", PARAMETERS),
    Tool("now", "The time", {"type": "object", "properties": {}}),
)
FUNCTIONS = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in TOOLS]
TOOL_OBJECTS = [{"type": "function", "function": function} for function in FUNCTIONS]
USER, ASKED = ("user", "What <b> & 'c'?"), ("user", "And\n\nnow? é 👍")
ANSWER = ("assistant", "It is fine.\n\n- yes")
SYSTEM = ("system", "Be brief.\nBe kind.")
ARGUMENTS = {"city": "Paris é", "days": 3}


def _template(path: Path) -> ChatTemplate:
    try:
        return ChatTemplate(
            path.read_text(encoding="utf-8"),
            bos_token="<s>",
            eos_token="</s>",
            now=lambda: TODAY,
        )
    except BadConfiguration as error:
        pytest.skip(error.message)


def _turns(*said: tuple[str, str]) -> tuple[Turn, ...]:
    return tuple(Turn(role, (Text(text),)) for role, text in said)  # type: ignore[arg-type]


def _messages(*said: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in said]


def _same(
    template: ChatTemplate, turns: tuple[Turn, ...], messages: list[dict[str, Any]], **context: Any
) -> bool | None:
    """Whether both renderings are equal; None when the template refuses the messages."""
    tools = TOOLS if context.get("tools") else ()
    arguments = {name: value for name, value in context.items() if name != "add_generation_prompt"}
    if template.reads.tools_always:
        context = {"tools": []} | context
    if template.reads.content_parts:
        messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
    try:
        expected = reference(template.source, messages, **context)
    except Exception:
        return None
    rendered = template.render(
        Conversation(turns, tools),
        draw=draw,
        template_arguments=arguments,
        add_generation_prompt=context.get("add_generation_prompt", True),
    )
    assert rendered == expected
    return True


def _check_plain(template: ChatTemplate) -> None:
    assert _same(template, _turns(USER), _messages(USER))
    for said in ([USER], [USER, ANSWER, ASKED], [SYSTEM, USER], [SYSTEM, USER, ANSWER, ASKED]):
        if said[0] == SYSTEM and not template.reads.system:
            continue
        no_header: dict[str, Any] = {"add_generation_prompt": False}
        for context in ({}, {"tools": TOOL_OBJECTS}, {"enable_thinking": False}, no_header):
            _same(template, _turns(*said), _messages(*said), **context)


def _check_ordinary(template: ChatTemplate) -> None:
    """An earlier answer with its reasoning, in a conversation without calls."""
    reads = template.reads
    if reads.reasoning is None:
        return
    answer = Turn("assistant", (Reasoning("Hm.\nWell."), Text(ANSWER[1])))
    turns = (*_turns(USER), answer, *_turns(ASKED))
    thought = put_reasoning(_messages(ANSWER)[0], reads.reasoning, "Hm.\nWell.")
    for context in ({}, {"tools": TOOL_OBJECTS}, dict(reads.history_switches)):
        _same(template, turns, [*_messages(USER), thought, *_messages(ASKED)], **context)


def _check_loop(template: ChatTemplate) -> None:
    """User, call, result, with and without reasoning; then the answer and a new question."""
    reads = template.reads
    if not (reads.calls and reads.results) or reads.call_ids == "kimi":
        return
    call = ToolCall("get_weather", '{"city": "Paris é", "days": 3}', "call12345")
    arguments = call.arguments if reads.arguments == "text" else ARGUMENTS
    called = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
    message = {"role": "assistant", "content": reads.empty_content, "tool_calls": [called]}
    result = {"role": "tool", "name": call.name, "tool_call_id": "call12345", "content": "20 °C"}
    answered = Turn("tool", (ToolResult("call12345", (Text("20 °C"),)),))
    turns = (*_turns(USER), Turn("assistant", (call,)), answered)
    messages = [*_messages(USER), message, result]
    _same(template, turns, messages, tools=TOOL_OBJECTS)
    _same(template, turns + _turns(ANSWER, ASKED), messages + _messages(ANSWER, ASKED), tools=TOOL_OBJECTS)
    _check_ordinary(template)
    if reads.reasoning is not None:
        thought = put_reasoning(message, reads.reasoning, "Hm.\nWell.")
        turns = (*_turns(USER), Turn("assistant", (Reasoning("Hm.\nWell."), call)), answered)
        messages = [*_messages(USER), thought, result]
        for context in ({}, dict(reads.history_switches), {"enable_thinking": True, "thinking": True}):
            _same(template, turns, messages, tools=TOOL_OBJECTS, **context)
            _same(template, turns + _turns(ANSWER, ASKED), messages + _messages(ANSWER, ASKED), **context)


@pytest.mark.parametrize("path", collected(), ids=label)
def test_collected_template_is_rendered_as_hugging_face_does(path: Path) -> None:  # C4
    template = _template(path)
    _check_plain(template)
    if label(path) not in OWN_SPELLING:
        _check_loop(template)


@pytest.mark.parametrize("name", SOURCES)
def test_own_template_is_rendered_as_hugging_face_does(name: str) -> None:
    template = ChatTemplate(SOURCES[name], bos_token="<s>", eos_token="</s>")
    _check_plain(template)
    _check_loop(template)


def test_the_date_is_an_argument() -> None:
    template = ChatTemplate("{{ strftime_now('%d.%m.%Y') }}{{ messages[0].content }}", now=lambda: TODAY)
    assert template.render(Conversation(_turns(("user", "x"))), draw=draw) == "21.11.2026x"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% if %}", "no valid Jinja"),
        ("{% for m in messages %}", "no valid Jinja"),
        ("{{ nobody.gave.this }}", "fails on a single user message"),
        ("{{ ''.__class__.__mro__ }}{{ messages[0].content }}", "fails on a single user message"),
    ],
)
def test_a_template_that_cannot_work_is_refused_at_load(source: str, says: str) -> None:
    with pytest.raises(BadConfiguration, match=says):
        ChatTemplate(source)


def test_what_a_template_raises_reaches_the_client() -> None:
    check = "{% if 'bad' in messages[0].content %}{{ raise_exception('nothing bad here') }}{% endif %}"
    source = check + "{{ messages[0].content }}"
    with pytest.raises(InvalidRequest, match="nothing bad here"):
        ChatTemplate(source).render(Conversation(_turns(("user", "bad"))), draw=draw)


@pytest.mark.parametrize(
    ("own", "flag", "source"), [(None, None, CHATML), ("own", None, "own"), ("own", "flag", "flag")]
)
def test_which_template_is_taken(own: str | None, flag: str | None, source: str, tmp_path: Path) -> None:
    def printing(mark: str | None) -> str | None:
        return mark and f"{mark}{{{{ messages[0].content }}}}"

    config = {"eos_token": "<|im_end|>"} | ({"chat_template": printing(own)} if own else {})
    tokenizer = load_tokenizer(write_directory(tmp_path, byte_level(), tokenizer_config=config))
    template = load_chat_template(tokenizer, printing(flag))
    assert template.source == (source if source == CHATML else printing(source))
    assert template.is_default == (source == CHATML)
