"""Every dialect's word on reasoning, as each kind of template gets it: from the wire to the prompt."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from singletree import families
from singletree.conversation import Thinking
from singletree.prompts.template.chat_template import ChatTemplate

from .serving import MODEL, TOKENIZER, body, serving

MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"

_TURNS = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_ONE_OF = """\
{%- if NAME is defined and NAME not in WORDS %}{{ raise_exception('no such word') }}{% endif %}[{{ NAME }}]"""


def _words(name: str, *words: str) -> ChatTemplate:
    return ChatTemplate(_TURNS + _ONE_OF.replace("NAME", name).replace("WORDS", str(list(words))))


KINDS = {
    "switch": ChatTemplate(
        f"{_TURNS}[{{{{ enable_thinking }}}} {{{{ truncate_history_thinking }}}}]",
        variables=families.get("nemotron_v3").thinking_variables,
    ),
    "flag": ChatTemplate(f"{_TURNS}[{{{{ thinking }}}}]"),
    "mode": _words("thinking_mode", "enabled", "disabled"),
    "effort": _words("reasoning_effort", "low", "medium", "high"),
    "off word": _words("reasoning_effort", "no_think", "low", "high"),
    "budget": ChatTemplate(f"{_TURNS}[{{{{ thinking_budget }}}}]"),
}
"""Nemotron 3; DeepSeek V3.1; MiniMax M3; gpt-oss; Hunyuan 3; Seed-OSS."""


class Printed(NamedTuple):
    """What each kind of template is told; empty where nothing is."""

    switch: str = " "
    flag: str = ""
    mode: str = ""
    effort: str = ""
    off_word: str = ""
    budget: str = ""


NOTHING = Printed()
ON = Printed("True False", "True", "enabled", "", "high")
LOW = ON._replace(effort="low", off_word="low")
MEDIUM = ON._replace(effort="medium", off_word="low")
HIGH = ON._replace(effort="high", off_word="high")
OFF = Printed("False ", "False", "disabled", "low", "no_think")

DIALECTS: list[tuple[str, dict[str, Any], Printed]] = [
    (MESSAGES, {}, NOTHING),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 4000}}, ON._replace(budget="4000")),
    (MESSAGES, {"thinking": {"type": "enabled"}}, ON),
    (MESSAGES, {"thinking": {"type": "adaptive"}}, ON),
    (MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, LOW),
    (MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, HIGH),
    (MESSAGES, {"thinking": {"type": "disabled"}}, OFF),
    (MESSAGES, {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, OFF),
    (MESSAGES, {"output_config": {"effort": "high"}}, HIGH),
    (RESPONSES, {}, NOTHING),
    (RESPONSES, {"reasoning": {}}, NOTHING),
    (RESPONSES, {"reasoning": {"summary": "auto"}}, NOTHING),
    (RESPONSES, {"reasoning": {"effort": "low"}}, LOW),
    (RESPONSES, {"reasoning": {"effort": "medium"}}, MEDIUM),
    (RESPONSES, {"reasoning": {"effort": "high"}}, HIGH),
    (RESPONSES, {"reasoning": {"effort": "xhigh"}}, HIGH),
    (RESPONSES, {"reasoning": {"effort": "none"}}, OFF),
    (RESPONSES, {"chat_template_kwargs": {"enable_thinking": False}}, OFF),
    (CHAT, {}, NOTHING),
    (CHAT, {"reasoning_effort": "minimal"}, LOW),
    (CHAT, {"reasoning_effort": "low"}, LOW),
    (CHAT, {"reasoning_effort": "high"}, HIGH),
    (CHAT, {"reasoning_effort": "none"}, OFF),
    (CHAT, {"reasoning": {"effort": "medium"}}, MEDIUM),
    (CHAT, {"reasoning": {"enabled": True}}, ON),
    (CHAT, {"reasoning": {"enabled": False}}, OFF),
    (CHAT, {"reasoning": {"max_tokens": 2000}}, ON._replace(budget="2000")),
    (CHAT, {"enable_thinking": True}, ON),
    (CHAT, {"enable_thinking": False}, OFF),
    (CHAT, {"enable_thinking": True, "thinking_budget": 77}, ON._replace(budget="77")),
    (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 500}}, ON._replace(budget="500")),
    (CHAT, {"thinking": {"type": "enabled"}}, ON),
    (CHAT, {"thinking": {"type": "disabled"}}, OFF),
    (CHAT, {"thinking": True}, ON),
    (CHAT, {"thinking": False}, OFF),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, ON),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, OFF),
    (CHAT, {"chat_template_kwargs": {"thinking": True}}, ON),
    (CHAT, {"chat_template_kwargs": {"thinking": False}}, OFF),
    (CHAT, {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, OFF),
    # A variable is what it is called, and nothing else.
    (
        CHAT,
        {"chat_template_kwargs": {"reasoning_effort": "low"}},
        NOTHING._replace(effort="low", off_word="low"),
    ),
    (CHAT, {"chat_template_kwargs": {"thinking_budget": 9}}, NOTHING._replace(budget="9")),
]


async def printed_by_kind(path: str, asked: dict[str, Any], **settings: Any) -> dict[str, str]:
    """What the template of each kind printed at the end of the prompt."""
    printed = {}
    for kind, template in KINDS.items():
        async with serving({"s": "Fine."}, template=template, **settings) as served:
            reply = await served.client.post(path, body(path, "hi", **asked))
            assert reply.status == 200, reply.body
            prompt = TOKENIZER.decode(served.engine.log[-1].prompt_token_ids)
        printed[kind] = prompt.rpartition("[")[2].removesuffix("]")
    return printed


@pytest.mark.parametrize(("path", "asked", "expected"), DIALECTS, ids=lambda value: str(value)[:70])
async def test_a_dialect_is_what_a_template_reads(
    path: str, asked: dict[str, Any], expected: Printed
) -> None:  # C4
    assert await printed_by_kind(path, asked) == dict(zip(KINDS, expected, strict=True))


SERVER: list[tuple[Thinking, dict[str, Any], Printed]] = [
    (Thinking(enabled=False), {}, OFF),
    (Thinking(enabled=False), {"reasoning_effort": "high"}, HIGH),
    (Thinking(enabled=False), {"enable_thinking": True}, ON),
    (Thinking(enabled=True), {}, ON),
    (Thinking(enabled=True), {"reasoning_effort": "none"}, OFF),
    (Thinking(effort="high"), {}, HIGH),
    (Thinking(effort="high"), {"reasoning_effort": "low"}, LOW),
    (Thinking(effort="high"), {"enable_thinking": False}, OFF),
    (Thinking(template_arguments={"enable_thinking": False}), {}, OFF),
    (Thinking(template_arguments={"enable_thinking": False}), {"reasoning_effort": "low"}, LOW),
    (
        Thinking(template_arguments={"truncate_history_thinking": True}),
        {"enable_thinking": True},
        ON._replace(switch="True True"),
    ),
]


@pytest.mark.parametrize(("default", "asked", "expected"), SERVER, ids=lambda value: str(value)[:70])
async def test_a_request_comes_before_the_server(
    default: Thinking, asked: dict[str, Any], expected: Printed
) -> None:
    assert await printed_by_kind(CHAT, asked, thinking=default) == dict(zip(KINDS, expected, strict=True))


async def test_reasoning_in_play_keeps_itself_for_that_request_only() -> None:  # C4 C5
    """A client that carries reasoning and says nothing of it; then one that carries none."""
    carried = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Fine.", "reasoning_content": "Hm."},
        {"role": "user", "content": "And?"},
    ]
    async with serving({"s": "Fine."}, template=KINDS["switch"]) as served:
        ends = []
        for messages in (carried, carried[:1], carried):
            asked: dict[str, Any] = {"model": MODEL, "messages": messages}
            assert (await served.client.post(CHAT, asked)).status == 200
            ends.append(TOKENIZER.decode(served.engine.log[-1].prompt_token_ids).rpartition("[")[2])
        asked = {"model": MODEL, "messages": carried, "enable_thinking": False}
        assert (await served.client.post(CHAT, asked)).status == 200
        ends.append(TOKENIZER.decode(served.engine.log[-1].prompt_token_ids).rpartition("[")[2])
    assert ends == ["True False]", " ]", "True False]", "False ]"]
