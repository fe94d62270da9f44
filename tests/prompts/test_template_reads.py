"""What the probes find out, on templates made for one question each and on the collected ones."""

from __future__ import annotations

from functools import cache

import pytest

from prompts.template_sources import ALTERNATING, COLLECTED, HERMES, KIMI, PARTS, XML, cached_template
from singletree.prompts.template.capabilities import TemplateCapabilities
from singletree.prompts.template.chat_template import CHATML

LOOP = "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
END = "{% endfor %}"


def reads(source: str) -> TemplateCapabilities:
    return cached_template(source).capabilities


@cache
def collected_reads(name: str) -> TemplateCapabilities:
    path = COLLECTED / f"{name}.jinja"
    if not path.is_file():
        pytest.skip("the collected templates are not at hand")
    return reads(path.read_text(encoding="utf-8"))


def test_a_full_template() -> None:
    found = reads(HERMES)
    assert found.reasoning == "reasoning_content"
    every = ("calls", "parallel_calls", "text_with_calls", "results", "system", "system_inside", "tools")
    assert {name: getattr(found, name) for name in every} == dict.fromkeys(every, True)
    assert not found.tools_always
    assert found.switches == {"enable_thinking": (True, False)}
    assert found.image is None
    assert found.variables == {"enable_thinking"}


def test_bare_templates() -> None:
    strict = reads(ALTERNATING)
    every = ("system", "system_inside", "consecutive_users", "calls", "tools")
    assert {name: getattr(strict, name) for name in every} == dict.fromkeys(every, False)
    assert reads(CHATML).system_inside
    assert reads(PARTS).content_parts
    assert reads(XML).arguments == "object"
    assert reads(KIMI).arguments == "text"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_the_reasoning_field(field: str) -> None:
    source = f"{LOOP}{{% if m.{field} %}}<{{{{ m.{field} }}}}>{{% endif %}}{END}"
    assert reads(source).reasoning == field
    named_only = f"{LOOP}{{% if m.{field} and false %}}<{{{{ m.{field} }}}}>{{% endif %}}{END}"
    assert reads(named_only).reasoning is None


def test_reasoning_behind_a_switch() -> None:
    source = LOOP + "{% if thinking and m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}" + END
    assert reads(source).reasoning == "reasoning_content"


def test_a_system_message_that_is_moved_is_not_taken_inside() -> None:  # C1
    hoisting = (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
        "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    assert reads(hoisting).system
    assert not reads(hoisting).system_inside
    sinking = (
        "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]"
        "{{ messages[0].content if loop.last and messages[0].role == 'system' }}{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    assert not reads(sinking).system
    as_assistant = LOOP.replace("m.role }}", "'user' if m.role == 'user' else 'model' }}") + END
    assert not reads(as_assistant).system_inside


def test_a_system_message_that_takes_the_head_away_is_not_taken_inside() -> None:  # C1
    own_head = "{% if messages | selectattr('role', 'eq', 'system') | list == [] %}You help.\n{% endif %}"
    assert not reads(own_head + LOOP + END).system_inside
    at_the_start_only = "{% if messages[0].role != 'system' %}You help.\n{% endif %}"
    assert reads(at_the_start_only + LOOP + END).system_inside


def test_a_system_message_alone() -> None:
    assert reads(CHATML).system_alone
    assert reads(HERMES).system_alone
    assert not reads(ALTERNATING).system_alone
    refusing = "{{ raise_exception('no user') if messages | selectattr('role', 'eq', 'user') | list == [] }}"
    silent = LOOP.replace(
        "{{ m.content", "{{ '' if messages | length == 1 and m.role == 'system' else m.content"
    )
    for source in (refusing + LOOP + END, silent + END):
        assert reads(source).system
        assert not reads(source).system_alone


def test_none_only_where_the_template_wants_it() -> None:
    source = (
        LOOP.replace("{{ m.content }}", "{{ m.content if m.content is not none }}")
        + "{% if m.content is none %}{% for c in m.tool_calls %}<{{ c.function.name }}"
        + " {{ c.function.arguments }}>{% endfor %}{% endif %}"
        + END
    )
    assert reads(source).empty_content is None
    assert not reads(source).text_with_calls
    assert reads(HERMES).empty_content == ""


def test_what_tools_need() -> None:
    source = "{% for t in tools %}{{ t.function.name + t.function.description }}{% endfor %}" + LOOP + END
    assert reads(source).tools_always
    assert reads(source).needed_descriptions == "tool"


def test_effort_words() -> None:
    strict = (
        "{% if reasoning_effort is defined and reasoning_effort not in ['no_think', 'low'] %}"
        "{{ raise_exception('no') }}{% endif %}{{ reasoning_effort }}" + LOOP + END
    )
    assert reads(strict).efforts == {"reasoning_effort": ("no_think", "low")}
    free = "{{ reasoning_effort or 'medium' }}" + LOOP + END
    assert reads(free).efforts == {"reasoning_effort": ("low", "medium", "high")}


FIELDS = {
    "llama.cpp/Qwen-Qwen3-0.6B": "reasoning_content",
    "llama.cpp/openai-gpt-oss-120b": "thinking",
    "llama.cpp/upstage-Solar-Open-100B": "reasoning",
    "llama.cpp/LFM2.5-8B-A1B": "thinking",
    "llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512": "part",
    "llama.cpp/deepseek-ai-DeepSeek-V3.2": "reasoning_content",
    "llama.cpp/Kimi-K2-Thinking": "reasoning_content",
    "dynamo/gemma4_tool": "reasoning",
    "llama.cpp/Qwen-QwQ-32B": None,
    "llama.cpp/Qwen3-Coder": None,
}


@pytest.mark.parametrize("name", FIELDS)
def test_the_reasoning_field_of_known_templates(name: str) -> None:
    assert collected_reads(name).reasoning == FIELDS[name]


def test_known_templates() -> None:
    assert collected_reads("llama.cpp/GLM-4.7-Flash").history_switches == {"clear_thinking": False}
    assert collected_reads("trl/nemotron_3_nano").history_switches == {"truncate_history_thinking": False}
    assert collected_reads("trl/qwen3_6").history_switches == {"preserve_thinking": True}
    assert collected_reads("llama.cpp/tencent-Hy3").efforts == {
        "reasoning_effort": ("no_think", "low", "high")
    }
    assert collected_reads("llama.cpp/MiniMax-M3").switches == {"thinking_mode": ("enabled", "disabled")}
    assert collected_reads("llama.cpp/MiniMax-M3").adaptive
    assert not collected_reads("llama.cpp/Qwen3.5-4B").adaptive
    assert not collected_reads("llama.cpp/google-gemma-4-31B-it").adaptive
    assert collected_reads("llama.cpp/moonshotai-Kimi-K2").call_id_format == "functions.{name}:{index}"
    assert collected_reads("llama.cpp/mistralai-Mistral-Nemo-Instruct-2407").call_ids == "nine"
    assert collected_reads("trl/gemma4_v5").results_need_calls
    assert not collected_reads("llama.cpp/Qwen3.5-4B").system_inside
    assert not collected_reads("llama.cpp/muse-glimmer").system_inside
    assert collected_reads("llama.cpp/Qwen3.5-4B").result_images
    assert not collected_reads("llama.cpp/meta-llama-Llama-3.1-8B-Instruct").parallel_calls
    assert not collected_reads("llama.cpp/google-gemma-2-2b-it").system
