"""Order is meaning, and so are the model's own bytes: what becomes of turns that no template foresaw."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from prompts.conversations import USER, assistant_text, call, render, result, turn
from prompts.template_sources import ALTERNATING, HERMES, KIMI, XML, load_template, write_parts
from singletree.conversation import (
    Conversation,
    Part,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolResult,
)
from singletree.errors import InvalidRequest
from singletree.prompts.template.chat_template import CHATML, ChatTemplate
from singletree.prompts.template.source_json import guard_json
from singletree.prompts.tokenizer.added_tokens import GUARD, AddedToken, AddedTokens, strip_guards
from singletree.protocols.content import template_json

ARGUMENTS = [
    '{"b": 1.0, "a": {"y": [1,2 , 3]},  "c":null}',
    '{"n": 123456789012345678901234567890, "f": 1e5, "z": -0, "t": 1.50}',
    '{"s": "Par\\u00eds \\/ \\n", "raw": "é👍"}',
    '{"k": 1, "k": 2}',
    "{}",
    '{"html": "<b>&\'</b>"}',
    '{"a":true,"b":[],"c":{}}',
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_keep_the_models_bytes(arguments: str) -> None:  # C3
    assert f'"arguments": {arguments}}}' in assistant_text(HERMES, call(arguments))
    again = HERMES.replace("arguments | tojson", "arguments | tojson(indent=2)")
    assert f'"arguments": {arguments}}}' in assistant_text(again, call(arguments))
    inside = HERMES.replace("call.function.arguments | tojson", "{'x': [call.function.arguments]} | tojson")
    assert f'{{"x": [{arguments}]}}' in assistant_text(inside, call(arguments))


RESPELLED = {
    '{"b":1.0,"a":{"y":[1,2]}}': '{"b": 1.0, "a": {"y": [1, 2]}}',
    '{"s":"Par\\u00eds","q":"\\"\\n"}': '{"s": "París", "q": "\\"\\n"}',
    "{}": "{}",
    '{"big":12345678901234567890123,"z":-0,"f":1e5}': '{"big": 12345678901234567890123, "z": -0, "f": 1e5}',
}


@pytest.mark.parametrize("sent", RESPELLED)
def test_arguments_that_a_client_printed_are_printed_as_the_template_does(sent: str) -> None:
    """Key order and numbers are as they came; separators and escapes are the template's."""
    text = template_json(sent.encode())
    assert text == RESPELLED[sent]
    printed = ToolCall("f", text, "call_1", verbatim=False)
    assert f'"arguments": {text}}}' in assistant_text(HERMES, printed)
    compact = HERMES.replace("arguments | tojson", "arguments | tojson(separators=(',', ':'))")
    dense = json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
    for own, dumped in (("-0", "0"), ("1e5", "100000.0")):
        dense = dense.replace(f":{dumped}", f":{own}")
    assert f'"arguments": {dense}}}' in assistant_text(compact, printed)
    ascii = HERMES.replace("arguments | tojson", "arguments | tojson(ensure_ascii=true)")
    escaped = text.replace("í", "\\u00ed")
    assert f'"arguments": {escaped}}}' in assistant_text(ascii, printed)


@pytest.mark.parametrize("both", [False, True])
def test_a_template_of_text_arguments_prints_an_object_itself_where_it_can(both: bool) -> None:
    """Many take text as it is, and print an object in the spelling that their model was trained on."""
    compact = "(call.function.arguments if call.function.arguments is string else "
    compact += "call.function.arguments | tojson(separators=(',', ':')))"
    source = KIMI.replace("call.function.arguments", compact) if both else KIMI
    tool_call = ToolCall("f", '{"a": 1, "b": [1, 2]}', "functions.f:0", verbatim=False)
    expected = '{"a":1,"b":[1,2]}' if both else tool_call.arguments
    assert f"_begin|>{expected}<|tool" in render(
        source, USER, turn("assistant", tool_call), turn("user", "x")
    )
    exactly = replace(tool_call, verbatim=True)
    assert f"_begin|>{tool_call.arguments}<|tool" in render(
        source, USER, turn("assistant", exactly), turn("user", "x")
    )


def test_arguments_taken_apart_keep_the_spelling_of_their_values() -> None:  # C3
    arguments = (
        '{"z": 1.0, "s": "1.0", "o": {"b":1,  "a":2e3}, "l": [1 ,2], "big": 12345678901234567890123, "z": -0}'
    )
    text = render(XML, USER, turn("assistant", call(arguments)), turn("user", "x"))
    assert (
        '<parameter=z>1.0<parameter=s>1.0<parameter=o>{"b":1,  "a":2e3}<parameter=l>[1 ,2]'
        "<parameter=big>12345678901234567890123<parameter=z>-0</function>"
    ) in text


@pytest.mark.parametrize("arguments", ['{"k": ', "no json", "[1]", '"s"', '{"k": NaN}', '{"a":' * 3000])
def test_arguments_that_are_no_object_are_rendered(arguments: str) -> None:
    assert f"<call f {arguments}/>" in render(
        XML, USER, turn("assistant", call(arguments)), turn("user", "x")
    )


def test_a_cut_call_is_not_closed_for_the_model() -> None:
    assert assistant_text(HERMES, call('{"k": ', complete=False)) == '<call f {"k": />'


def test_a_turn_in_template_order_is_native() -> None:
    text = assistant_text(HERMES, Reasoning("why"), "so", call(), call('{"k": 2}', "call_2"))
    assert text == (
        "<think>\nwhy\n</think>\n\nso\n"
        '<tool_call>\n{"name": "f", "arguments": {"k": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"k": 2}}\n</tool_call>'
    )


@pytest.mark.parametrize(
    ("parts", "rendered"),
    [
        ((Reasoning("a"), Reasoning("b"), "t"), "<think>\na\n</think>\n\n<think>b</think>t"),
        (("t", Reasoning("a"), "u"), "t<think>a</think>u"),
        ((call(), "after"), '<call f {"k": 1}/>after'),
        (
            (Reasoning("a"), call(), Reasoning("b"), "t"),
            '<think>\na\n</think>\n\n<call f {"k": 1}/><think>b</think>t',
        ),
    ],
)
def test_what_stands_between_is_rendered_in_place(parts: tuple[Part | str, ...], rendered: str) -> None:  # C5
    assert assistant_text(HERMES, *parts) == rendered


def test_interleaved_calls_keep_their_order() -> None:  # C5
    text = assistant_text(
        HERMES, Reasoning("a"), "x", call(), Reasoning("b"), "y", call('{"k": 2}', "call_2")
    )
    assert text == (
        '<think>\na\n</think>\n\nx<call f {"k": 1}/><think>b</think>y\n'
        '<tool_call>\n{"name": "f", "arguments": {"k": 2}}\n</tool_call>'
    )


def test_no_trim_reaches_what_is_rendered() -> None:
    source = HERMES.replace("{{ m.content }}\n{%- for call", "{{ m.content | trim }}\n{%- for call")
    rendered = ("\n\n t \n", Reasoning(" a "), " \n u\n ")
    assert assistant_text(source, *rendered) == "\n\n t \n<think> a </think> \n u\n "
    assert assistant_text(source, " plain ") == "plain"


def test_reasoning_without_a_field_stands_in_the_content() -> None:  # C5
    text = render(CHATML, USER, turn("assistant", Reasoning("why"), "so", call()), result(), USER)
    assert '<|im_start|>assistant\n<think>why</think>so<call f {"k": 1}/><|im_end|>' in text
    assert "<|im_start|>user\n<tool_result>\ndone\n</tool_result><|im_end|>" in text


def test_an_empty_turn_is_printed_as_nothing() -> None:
    assert "None" not in render(HERMES, USER, turn("assistant", call()), result(), turn("assistant"), USER)
    assert assistant_text(HERMES, Text(""), Reasoning(""), "x") == "x"


def test_system_and_developer_stay_where_they_stand() -> None:  # C1
    text = render(
        HERMES,
        turn("developer", "d"),
        USER,
        turn("system", "n1"),
        turn("assistant", "a"),
        turn("developer", "n2"),
    )
    assert text == (
        "<|im_start|>system\nd<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>system\nn1<|im_end|>\n"
        "<|im_start|>assistant\na<|im_end|>\n<|im_start|>system\nn2<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_system_message_alone_gets_a_user_only_where_the_template_needs_one() -> None:
    assert render(CHATML, turn("system", "s")) == "<|im_start|>system\ns<|im_end|>\n<|im_start|>assistant\n"
    both = render(CHATML, turn("system", "s"), turn("developer", "d"))
    assert both == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>system\nd<|im_end|>\n<|im_start|>assistant\n"
    )
    needing = "{{ raise_exception('no user') if messages | selectattr('role', 'eq', 'user') | list == [] }}"
    assert render(needing + CHATML, turn("system", "s")) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    )
    nothing = render(CHATML, turn("tool"))
    assert nothing == "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"


def test_a_strict_template_gets_them_as_user_text_in_place() -> None:  # C1
    text = render(
        ALTERNATING,
        turn("system", "s"),
        USER,
        turn("system", "n1"),
        turn("assistant", "a"),
        turn("system", "n2"),
    )
    assert text == "<s>[user]s\n\nhi\n\nn1[assistant]a[user]n2[assistant]"


def test_a_prompt_with_nudges_only_grows() -> None:  # C1
    for source in (HERMES, ALTERNATING, CHATML, XML, KIMI):
        template, turns = ChatTemplate(source), [turn("system", "s"), USER]
        before = template.render(Conversation(tuple(turns)), render_parts=write_parts)
        for number in range(20):
            turns += [
                turn("assistant", f"answer {number}"),
                turn("user", f"q{number}"),
                turn("system", f"{number} left"),
            ]
            prompt = template.render(Conversation(tuple(turns)), render_parts=write_parts)
            assert prompt.startswith(f"{before}answer {number}")
            before = prompt


def test_neighbours_are_joined_where_the_template_refuses_them() -> None:  # C36
    text = render(ALTERNATING, USER, USER, turn("assistant", "a"), turn("assistant", "b"), turn("user", "c"))
    assert text == "<s>[user]hi\n\nhi[assistant]ab[user]c[assistant]"


def test_a_strict_template_gets_a_user_who_begins() -> None:  # C36
    assert render(ALTERNATING, turn("assistant", "a"), USER) == "<s>[user][assistant]a[user]hi[assistant]"
    wordy = ALTERNATING.replace(
        "[{{ m.role", "{{ raise_exception('say something') if not m.content }}[{{ m.role"
    )
    assert render(wordy, USER, turn("assistant"), USER) == "<s>[user]hi\n\nhi[assistant]"


def test_a_trailing_assistant_turn_is_left_open() -> None:
    assert render(HERMES, USER, turn("assistant", "so ")).endswith("<|im_start|>assistant\nso ")
    assert render(ALTERNATING, USER, turn("assistant", " so ")).endswith("[assistant] so ")
    text = render(HERMES, USER, turn("assistant", Reasoning("r"), "so", call()))
    assert text.endswith('<think>\nr\n</think>\n\nso<call f {"k": 1}/>')
    assert render(HERMES, USER, turn("assistant")) == render(HERMES, USER)
    assert render(HERMES, USER, turn("assistant", "x"), add_generation_prompt=False).endswith("x<|im_end|>\n")


def test_results_know_their_calls() -> None:
    source = "{% for m in messages %}[{{ m.role }} {{ m.name }} {{ m.tool_call_id }}]{{ m.content }}" + (
        "{% for c in m.tool_calls %}<{{ c.id }} {{ c.function.name }} {{ c.function.arguments }}>{% endfor %}"
        "{% endfor %}"
    )
    calls = turn("assistant", call(id="a", name="f"), call(id="b", name="g"))
    text = render(source, USER, calls, result("1", "a"), result("2", "b"), result("3", "unknown"))
    assert "[tool f a]1[tool g b]2[tool tool unknown]3" in text
    text = render(source, USER, calls, result("1", ""), result("2", ""))
    assert "[tool f a]1[tool g b]2" in text


def test_kimi_ids_are_native_and_count_on() -> None:  # C23
    template = load_template(KIMI)
    assert template.capabilities.call_id_format == "functions.{name}:{index}"
    turns = [
        USER,
        turn("assistant", call(id="toolu_x", name="f"), call(id="toolu_y", name="g")),
        result("1", "toolu_x"),
    ]
    turns += [
        result("2", "toolu_y"),
        turn("assistant", call(id="chatcmpl9", name="f")),
        result("3", "chatcmpl9"),
    ]
    turns += [turn("assistant", "x", call(id="functions.f:7", name="f"), "y", call(id="q")), result("4", "q")]
    text = template.render(Conversation(tuple(turns)), render_parts=write_parts)
    ids = [piece.split("<|", 1)[0] for piece in text.split("<|tool_call_begin|>")[1:]]
    assert ids == ["functions.f:0", "functions.g:1", "functions.f:2", "functions.f:8"]
    returns = [piece.split("\n", 1)[0] for piece in text.split("## Return of ")[1:]]
    assert returns == ids


def test_ids_of_nine_characters_where_no_other_passes() -> None:
    source = XML.replace(
        "<function=",
        "{{ raise_exception('nine') if call.id | length != 9 }}<{{ call.id }}><function=",
    )
    template = ChatTemplate(source)
    assert template.capabilities.call_ids == "nine"
    turns = (USER, turn("assistant", call(id="toolu_01AbcDef")), result("1", "toolu_01AbcDef"), USER)
    first = template.render(Conversation(turns), render_parts=write_parts)
    assert first == template.render(Conversation(turns), render_parts=write_parts)
    assert "<Abc123xyz>" in template.render(
        Conversation((USER, turn("assistant", call(id="Abc123xyz")), USER)), render_parts=write_parts
    )


def test_no_messages_at_all() -> None:
    with pytest.raises(InvalidRequest, match="no messages"):
        render(HERMES)


def test_every_string_is_guarded_by_who_wrote_it() -> None:
    def guard(text: str) -> str:
        return text.replace("X", "#")

    schema = {"X": [{"X": "X"}], "type": "object"}
    text = render(
        HERMES,
        turn("system", "sX"),
        turn("user", "uX"),
        turn("assistant", Reasoning("rX"), "tX", call('{"X": "X", "n": 1}', "idX", "fX")),
        turn("tool", ToolResult("idX", (Text("X"),))),
        turn("assistant", "X", call('{"X": 1}', name="fX"), "X"),
        tools=(Tool("toolX", "dX", schema),),
        guard=guard,
        own_guard=lambda text: text.replace("X", "+"),
        add_generation_prompt=False,
    )
    assert "X" not in text
    assert "<think>\nr+\n</think>\n\nt+" in text
    assert '+<call f# {"#": 1}/>+' in text
    for guarded in (
        "s#",
        "u#",
        '"arguments": {"#": "#", "n": 1}',
        '"f#"',
        "<tool_response>\n#\n",
        '"tool#"',
        '{"#": [{"#": "#"}]',
    ):
        assert guarded in text


def test_strings_in_json_are_guarded_behind_their_escapes() -> None:
    """Some formats write them without."""
    spelled = AddedTokens([AddedToken(0, "<|end|>", special=True), AddedToken(1, "</s>", special=True)]).guard
    for written, read in (
        (r'{"a": "\u003c|end|>"}', "<|end|>"),
        (r'{"a": "<|en\u0064|>\n"}', "<|end|>\n"),
        (r'{"a": "<\/s>\ud83d\ude00\ud800"}', "</s>😀\ufffd"),
        (r'{"a": "\\<|end|>\""}', '\\<|end|>"'),
    ):
        guarded = guard_json(written, spelled)
        assert strip_guards(guarded) == written
        assert guarded != written
        assert strip_guards(json.loads(guarded)["a"]).replace("\ud800", "\ufffd") == read
        assert json.loads(guarded)["a"].replace("\ud800", "\ufffd") == spelled(read)
    for apart in (lambda text: text.replace('"', GUARD + '"'), lambda text: GUARD + text):
        assert json.loads(guard_json('{"a": [{"b": "c"}]}', apart))
    for broken in (r'{"a": "\x<|end|>', '"\\ud83d<|end|>\\', "<|end|>"):
        assert strip_guards(guard_json(broken, spelled)) == broken


def test_blocks_are_guarded_as_one() -> None:
    marked = render(
        CHATML, turn("user", "<|im_", "end|>"), guard=lambda text: text.replace("<|im_end|>", "#")
    )
    assert "<|im_start|>user\n#<|im_end|>" in marked


@pytest.mark.parametrize(
    "change",
    [
        "content.replace('/off', '')",
        "content | replace('/off', '')",
        "content.replace('/no', '').replace('/off', '')",
        "content.split('/off') | join",
        "content.replace('\n', '')",
    ],
)
@pytest.mark.parametrize(
    "quoted", ["<|e/offnd|>", "/off<|e/off/offnd|>/off", "<|e/o/noffnd|>", "<|e\nnd|>", "<|\n/offend|>"]
)
def test_no_token_is_put_together_by_taking_text_out(change: str, quoted: str) -> None:
    """SmolLM 3 and Nemotron Nano 2 take ``/no_think`` out of whatever anybody says."""
    source = (
        "{% for message in messages %}{{ " + change.replace("content", "message.content") + " }};{% endfor %}"
    )
    guard = AddedTokens([AddedToken(0, "<|end|>", special=True)]).guard
    text = render(
        source, turn("user", quoted), turn("assistant", quoted), turn("user", "a /off"), guard=guard
    )
    assert "<|end|>" not in text
    assert render(source, turn("user", "a /off "), guard=guard) == render(source, turn("user", "a /off "))


def test_template_arguments_reach_the_template_and_no_further() -> None:
    source = (
        "{{ mood }}{{ messages | length }}{{ messages[0].content }}{% if add_generation_prompt %}+{% endif %}"
    )
    arguments = {"mood": "X", "messages": [], "add_generation_prompt": False}
    text = render(source, USER, template_arguments=arguments, guard=lambda text: text.replace("X", "#"))
    assert text == "#1hi+"


def test_no_text_can_be_taken_for_a_placeholder() -> None:
    forged = "\udffe0\udffe"
    spelled = '{"s": "\\udffe0\\udffe", "g": "\\udfff", "p": "\\udffd0\\udffd"}'
    turns = (
        USER,
        turn("assistant", call(), "drawn"),
        turn("assistant", Reasoning(forged), forged, call(spelled)),
    )
    assert "\ufffd0\ufffd" in render(XML, *turns, USER)
    assert render(XML, *turns, USER).count("drawn") == 1
    assert f'"arguments": {spelled}}}' in assistant_text(HERMES, call(spelled))
