"""Plain conversations come out byte for byte as Hugging Face renders them, for every collected template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prompts.template_sources import (
    HERMES,
    KIMI,
    TODAY,
    XML,
    cached_template,
    collected,
    label,
    reference,
    write_parts,
)
from prompts.tiny_vocabulary import byte_level, write_directory
from singletree.conversation import Conversation, Reasoning, Text, Tool, ToolCall, ToolResult, Turn
from singletree.errors import BadConfiguration, InvalidRequest
from singletree.prompts.template.capabilities import put_reasoning, thinking_settings
from singletree.prompts.template.chat_template import CHATML, ChatTemplate, load_chat_template
from singletree.prompts.tokenizer.tokenizer import load_tokenizer

OWN_SPELLING = {"vllm/tool_chat_template_granite", "llama.cpp/CohereForAI-c4ai-command-r-plus-tool_use"}
"""Print a call's arguments indented; here they keep the model's own bytes all the same (C3)."""
REFUSED = {"llama.cpp/llama-cpp-deepseek-r1"}
"""Print a generator as JSON, which Hugging Face's filter does not take."""

SOURCES = {"hermes": HERMES, "xml": XML, "kimi": KIMI, "chatml": CHATML}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where <b>&'\" é"},
        "days": {"type": "integer", "description": "How many"},
    },
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
CALL = '{"city": "Paris é", "days": 3}'
THOUGHT = "Hm.\nWell."


def _template(path: Path) -> ChatTemplate:
    try:
        return cached_template(path.read_text(encoding="utf-8"))
    except BadConfiguration as error:
        pytest.skip(error.message)


def _turns(*output: tuple[str, str]) -> tuple[Turn, ...]:
    return tuple(Turn(role, (Text(text),)) for role, text in output)  # type: ignore[arg-type]


def _messages(*messages: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in messages]


def _same(
    template: ChatTemplate,
    turns: tuple[Turn, ...],
    messages: list[dict[str, Any]],
    *,
    spaces: bool = True,
    **context: Any,
) -> bool | None:
    """Whether both renderings are equal, but for white space where ``spaces`` do not count; None when the template
    refuses the messages.
    """
    tools = TOOLS if context.get("tools") else ()
    arguments = {name: value for name, value in context.items() if name != "add_generation_prompt"}
    if template.capabilities.tools_always:
        context = {"tools": []} | context
    if template.capabilities.content_parts:
        messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
    try:
        expected = reference(template.source, messages, **context)
    except Exception:
        return None
    rendered = template.render(
        Conversation(turns, tools),
        render_parts=write_parts,
        template_arguments=arguments,
        add_generation_prompt=context.get("add_generation_prompt", True),
    )
    if not spaces:
        rendered, expected = "".join(rendered.split()), "".join(expected.split())
    assert rendered == expected
    return True


def _check_plain(template: ChatTemplate) -> None:
    assert _same(template, _turns(USER), _messages(USER))
    for written in ([USER], [USER, ANSWER, ASKED], [SYSTEM, USER], [SYSTEM, USER, ANSWER, ASKED]):
        if written[0] == SYSTEM and not template.capabilities.system:
            continue
        no_header: dict[str, Any] = {"add_generation_prompt": False}
        for context in ({}, {"tools": TOOL_OBJECTS}, {"enable_thinking": False}, no_header):
            _same(template, _turns(*written), _messages(*written), **context)


def _thinking(template: ChatTemplate) -> list[dict[str, Any]]:
    """As nobody asks, with history kept, and with reasoning on and off."""
    return [{}, dict(template.capabilities.history_switches), *thinking_settings(template.capabilities)]


def _check_ordinary(template: ChatTemplate) -> None:
    """An earlier answer with its reasoning, in a conversation without calls."""
    place = template.capabilities.reasoning
    answer = Turn("assistant", (Reasoning(THOUGHT), Text(ANSWER[1])))
    turns = (*_turns(USER), answer, *_turns(ASKED))
    message = _messages(ANSWER)[0]
    written = (
        message | {"content": write_parts(answer.parts)}
        if place is None
        else put_reasoning(message, place, THOUGHT)
    )
    for context in ({"tools": TOOL_OBJECTS}, *_thinking(template)):
        _same(template, turns, [*_messages(USER), written, *_messages(ASKED)], **context)


def _called(template: ChatTemplate, *calls: ToolCall) -> list[dict[str, Any]]:
    arguments = (
        c.arguments if template.capabilities.arguments == "text" else json.loads(c.arguments) for c in calls
    )
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": given}}
        for call, given in zip(calls, arguments, strict=True)
    ]


def _loops(template: ChatTemplate) -> Iterator[tuple[tuple[Turn, ...], list[dict[str, Any]]]]:
    """A question, a turn of calls and their results: as turns and as messages."""
    reads = template.capabilities
    ids = (
        ["functions.get_weather:0", "functions.now:1"] if reads.call_id_format else ["call12345", "call12346"]
    )
    calls = ToolCall("get_weather", CALL, ids[0]), ToolCall("now", "{}", ids[1])
    for made in (calls[:1], calls) if reads.parallel_calls else (calls[:1],):
        results = tuple(ToolResult(call.id, (Text(f"{call.name}: 20 °C"),)) for call in made)
        answered = [
            {"role": "tool", "name": c.name, "tool_call_id": c.id, "content": f"{c.name}: 20 °C"}
            for c in made
        ]
        for text in ("", "I look.") if reads.text_with_calls else ("",):
            content = text or reads.empty_content
            message = {"role": "assistant", "content": content, "tool_calls": _called(template, *made)}
            written = (*((Text(text),) if text else ()), *made)
            for thought in (
                ("", THOUGHT) if reads.reasoning and (reads.text_beside_reasoning or not text) else ("",)
            ):
                parts = (Reasoning(thought), *written) if thought else written
                thinks = (
                    put_reasoning(message, reads.reasoning, thought)
                    if thought and reads.reasoning
                    else message
                )
                turns = (*_turns(USER), Turn("assistant", parts), Turn("tool", results))
                yield turns, [*_messages(USER), thinks, *answered]


def _check_loop(template: ChatTemplate, *, spaces: bool = True) -> int:
    """In the loop, once it is over, and when the next one has begun. How many prompts the template takes."""
    if not (template.capabilities.calls and template.capabilities.results):
        return 0
    took = 0
    for turns, messages in _loops(template):
        for context in _thinking(template):
            context = {"tools": TOOL_OBJECTS} | context
            over = turns + _turns(ANSWER, ASKED), messages + _messages(ANSWER, ASKED)
            for written in ((turns, messages), over):
                took += _same(template, *written, spaces=spaces, **context) is not None
    return took


@pytest.mark.parametrize("path", collected(), ids=label)
def test_collected_template_is_rendered_as_hugging_face_does(path: Path) -> None:  # C4
    template = _template(path)
    _check_plain(template)
    _check_ordinary(template)
    loops = template.capabilities.calls and template.capabilities.results and label(path) not in REFUSED
    assert bool(_check_loop(template, spaces=label(path) not in OWN_SPELLING)) is loops


@pytest.mark.parametrize("name", SOURCES)
def test_own_template_is_rendered_as_hugging_face_does(name: str) -> None:
    template = cached_template(SOURCES[name])
    _check_plain(template)
    _check_ordinary(template)
    _check_loop(template)


def test_the_date_is_an_argument() -> None:
    template = ChatTemplate("{{ strftime_now('%d.%m.%Y') }}{{ messages[0].content }}", now=lambda: TODAY)
    assert template.render(Conversation(_turns(("user", "x"))), render_parts=write_parts) == "21.11.2026x"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% if %}", "not valid Jinja: .* --chat-template"),
        ("{% for m in messages %}", "not valid Jinja"),
        ("{{ nobody.gave.this }}", "cannot render a single user message"),
        ("{{ ''.__class__.__mro__ }}{{ messages[0].content }}", "cannot render a single user message"),
    ],
)
def test_a_template_that_cannot_work_is_refused_at_load(source: str, says: str) -> None:
    with pytest.raises(BadConfiguration, match=says):
        ChatTemplate(source)


def test_what_a_template_raises_reaches_the_client() -> None:
    check = "{% if 'bad' in messages[0].content %}{{ raise_exception('nothing bad here') }}{% endif %}"
    source = check + "{{ messages[0].content }}"
    with pytest.raises(InvalidRequest, match="nothing bad here"):
        ChatTemplate(source).render(Conversation(_turns(("user", "bad"))), render_parts=write_parts)


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
