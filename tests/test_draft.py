"""Drafts of a declaration from what a chat template renders: they compile, and parse it again."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from prompts.template_sources import COLLECTED, HERMES, collected, label
from singletree import families
from singletree.cli import main
from singletree.conversation import Reasoning, Text, ToolCall
from singletree.drafting.draft import sample_of, source_of
from singletree.drafting.template_turns import TemplateTurns, draft_from_template, try_family
from singletree.errors import BadConfiguration, BadFamily
from singletree.parsing.family import Family, Form, Literals
from singletree.parsing.parser import parse
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.server.models.chat_format import template_alone

HEAD = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{%- for m in messages %}{%- if m.role != 'assistant' %}<|{{ m.role }}|>{{ m.content }}<|end|>"
    "{% else %}<|assistant|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
)
TAIL = "<|end|>{% endif %}{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
EACH = "{%- for c in m.tool_calls or [] %}{%- set f = c.function %}"
COMMA = "{{ ', ' if not loop.last }}"
FORMATS = {
    "json in a list": "{% if m.tool_calls %}[CALLS][" + EACH
    + '{"id": "{{ c.id }}", "name": "{{ f.name }}", "input": {{ f.arguments | tojson }}}' + COMMA
    + "{% endfor %}]{% endif %}",
    "json in tags": EACH + "<call>{{ f.name }}<args>{{ f.arguments | tojson }}</call>{% endfor %}",
    "calls that are counted": EACH + '<call to="{{ f.name }}" no="{{ loop.index }}">'
    + "{{ f.arguments | tojson }}</call>{% endfor %}",
    "tags": "{% if m.tool_calls %}<calls>\n" + EACH
    + '<call name="{{ f.name }}">\n{%- for k, v in f.arguments | items %}\n<arg name="{{ k }}">'
    + "{{ v if v is string else v | tojson }}</arg>{% endfor %}\n</call>\n{% endfor %}</calls>{% endif %}",
    "tags that say the type": EACH + '<call={{ f.name }}>{%- for k, v in f.arguments | items %}'
    + '<arg key="{{ k }}" string="{{ \'true\' if v is string else \'false\' }}">'
    + "{{ v if v is string else v | tojson }}</arg>{% endfor %}</call>{% endfor %}",
    "literals": "{% if m.tool_calls %}<|calls|>[" + EACH + "{{ f.name }}({%- for k, v in f.arguments | items %}"
    + "{{ k }}={{ v | tojson if v is string or v is mapping else v }}" + COMMA + "{% endfor %})" + COMMA
    + "{% endfor %}]<|done|>{% endif %}",
}  # fmt: skip
"""Formats for which no family is declared, written for these tests."""

# Templates of the collection whose draft reads some of their turns otherwise, and why.
BEYOND = {
    "axolotl/exaone4": "prints a stray </think> before text",
    "axolotl/llama4": "prints <|python_start|><|python_end|> before the call, not around it",
    "llama.cpp/Apriel-1.6-15b-Thinker-fixed": "its reasoning begins behind a sentence, in some turns only",
    "llama.cpp/ByteDance-Seed-OSS": "prints values as Python does",
    "llama.cpp/Cohere2MoE": "prints the words and the call of a turn as two messages",
    "llama.cpp/CohereForAI-c4ai-command-r-plus-tool_use": "writes text as a call of directly-answer",
    "llama.cpp/Kimi-K3": "an empty response stands before calls",
    "llama.cpp/LFM2.5-8B-A1B": "puts strings in quotes without escapes",
    "trl/lfm2_2_5": "puts strings in quotes without escapes",
    "trl/lfm2_2_5_v2": "puts strings in quotes without escapes",
    "trl/lfm2_2_5_vl": "puts strings in quotes without escapes",
    "llama.cpp/MiniMax-M3": "nests elements",
    "llama.cpp/NVIDIA-Nemotron-Nano-v2": "asks with an open <think> that its turns do not show",
    "llama.cpp/deepseek-ai-DeepSeek-V3.1": "prints a </think> that nothing opened before text",
    "llama.cpp/meetkai-functionary-medium-v3.2": "text is a call of all",
    "llama.cpp/openai-gpt-oss-120b": "shows text before a call as reasoning",
    "trl/gptoss": "shows text before a call as reasoning",
    "llama.cpp/openbmb-MiniCPM5-1B": "wraps some values in CDATA, and prints others as Python does",
    "vllm/tool_chat_template_deepseekv31": "prints white space of its own source",
    "vllm/tool_chat_template_functiongemma": "prints values as Python does",
    "vllm/tool_chat_template_gemma3_pythonic": "forgets the comma between arguments",
    "vllm/tool_chat_template_granite_20b_fc": "prints a line break before the call, not before text",
    "vllm/tool_chat_template_llama3.2_pythonic": "forgets the quotes around strings",
    "vllm/tool_chat_template_llama4_json": "prints its header twice",
    "vllm/tool_chat_template_llama4_pythonic": "prints values as Python does",
    "vllm/tool_chat_template_mistral_parallel": "moves the tools to the last question",
    "vllm/tool_chat_template_toolace": "forgets the quotes around strings",
}


def test_a_marker_that_also_closes_reasoning_is_no_stop_marker() -> None:
    head = HEAD.replace("<think>", "<|think|>").replace("</think>", "<|end|>")
    family = draft_from_template(ChatTemplate(head + FORMATS["json in tags"] + "<|stop|>" + TAIL))
    assert family.reasoning == ("<|think|>", "<|end|>")
    assert family.stop_markers == ("<|stop|>",)
    assert family.stray_markers == ("<|end|>",)


def executed(source: str) -> Family:
    """Return the family that a drafted module declares."""
    defined: dict[str, Any] = {}
    exec(compile(source, "drafted.py", "exec"), defined)
    (family,) = (value for value in defined.values() if isinstance(value, Family))
    return family


@pytest.mark.parametrize("name", FORMATS)
def test_the_draft_of_an_unknown_format_compiles_and_reads_it_back(name: str) -> None:
    template = ChatTemplate(HEAD + FORMATS[name] + TAIL)
    family = executed(source_of(draft_from_template(template, "new-one")))
    trials = try_family(family, template)
    assert len(trials) == 10
    assert [trial.rendered.case for trial in trials if not trial.agrees] == []
    assert family.reasoning == ("<think>", "</think>")
    assert "<|end|>" in family.stop_markers
    assert family.fingerprint
    assert all(mark in template.source for mark in family.fingerprint)


def test_a_declared_format_is_drafted_as_it_is_declared() -> None:
    family = draft_from_template(ChatTemplate(HERMES))
    assert family.reasoning == ("<think>\n", "\n</think>\n\n")
    assert family.forms[0].is_json
    assert family.forms[0].calls == ("<tool_call>\n", "\n</tool_call>")


def test_turns_that_a_family_parses_differently_are_shown() -> None:
    template = ChatTemplate(HERMES)
    wrong = Family(name="x", forms=(Form("<call>{name}{args}</call>"),))
    failed = [trial.rendered.case for trial in try_family(wrong, template) if not trial.agrees]
    assert "single" in failed
    assert "text" not in failed


@pytest.mark.parametrize(
    "family",
    [
        Family(name="a-b", reasoning=("<t>\n", "\n</t>"), stop_markers=("<|e|>",)),
        Family(forms=(Form("f({literals}){name}", literals=Literals(quote="'", words=("t", "f", "n"))),)),
        Family(name="q", forms=(Form('{"name": "{name}", "it\'s": {args}}', ("[", "]"), joiner=",\n"),)),
    ],
)
def test_source_declares_the_same_family(family: Family) -> None:
    assert executed(source_of(family)) == family
    assert "also_close" not in source_of(family)


@pytest.mark.parametrize("text", ["a", "it's", "a\nb", "\nit's\\\n", "x'''y\n", '\x00\u2028"', "a\n'"])
def test_a_sample_says_the_same_in_toml(text: str) -> None:
    parts = (Reasoning(text), Text(text), ToolCall("f", '{"k": 1}', "id"))
    (row,) = tomllib.loads(sample_of("case", text, text, parts))["sample"]
    call = {"call": "f", "arguments": '{"k": 1}'}
    assert row == {
        "case": "case",
        "tail": text,
        "text": text,
        "parts": [{"reasoning": text}, {"text": text}, call],
    }


def run(*arguments: str) -> int:
    try:
        main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_command_prints_source_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "My-Model.jinja"
    path.write_text(HEAD + FORMATS["tags"] + TAIL)
    assert run("families", "draft", str(path), "--samples") == 0
    source, _, samples = capsys.readouterr().out.partition("[[sample]]")
    family = executed(source)
    assert family.name == "my_model"
    assert "# Parses 10 of 10 turns" in source
    rows = tomllib.loads("[[sample]]" + samples)["sample"]
    single = next(row for row in rows if row["case"] == "single")
    assert (
        parse(family, single["text"], prompt_tail=single["tail"]).tool_calls[0].name
        == single["parts"][0]["call"]
    )


def test_the_command_says_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / "odd.jinja"
    odd.write_text(
        HEAD + EACH + "<do>{{ f.arguments | tojson | replace('\"', '`') }} {{ f.name }}{% endfor %}" + TAIL
    )
    assert run("families", "draft", str(odd)) == 1
    printed = capsys.readouterr().out
    assert "single: the template rendered" in printed
    assert executed(printed).name == "odd"
    bare = tmp_path / "bare.jinja"
    bare.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    assert run("families", "draft", str(bare)) == 0
    assert "prints no tool calls" in capsys.readouterr().out
    assert run("families", "draft", str(tmp_path / "nowhere.jinja")) == 1


def test_what_would_mark_nothing_is_no_family() -> None:
    template = ChatTemplate(HEAD + EACH + "{{ f.name }} {{ f.arguments | tojson }}{% endfor %}" + TAIL)
    with pytest.raises(BadFamily, match="no marker"):
        draft_from_template(template)


def test_the_table_of_families_is_still_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("families") == 0
    assert "kimi_k2" in capsys.readouterr().out


def one_a_family() -> dict[str, Path]:
    """Return a template of the collection for each family."""
    found = {families.find(path.read_text(encoding="utf-8")).family.name: path for path in collected()}
    return {label(path): path for path in found.values()}


def test_drafts_of_the_collection_read_what_their_templates_write() -> None:
    if not COLLECTED.is_dir():
        pytest.skip("the collection of chat templates is not here")
    failed, calling = set(), 0
    for name, path in one_a_family().items():
        try:
            template = template_alone(path.read_text(encoding="utf-8"))
        except BadConfiguration:
            continue
        if template.capabilities.calls:
            calling += 1
            family = executed(source_of(draft_from_template(template)))
            if not all(trial.agrees for trial in try_family(family, template)):
                failed.add(name)
    assert failed <= BEYOND.keys()
    assert calling - len(failed) >= 30


def test_a_turn_of_which_a_part_is_not_printed_is_no_case() -> None:
    silent = HEAD.replace('"{{ m.content }}"', "")[: -len("{{ m.content }}")]
    template = ChatTemplate(silent + FORMATS["tags"] + TAIL)
    assert {written.case for written in TemplateTurns(template).cases()} & {
        "single",
        "text",
        "text around",
    } == {"single"}
