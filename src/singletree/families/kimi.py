"""Moonshot AI: Kimi."""

from dataclasses import replace

from singletree.conversation import ThinkingVariables
from singletree.families.shared import THINK
from singletree.parsing.family import Family, Form

# K2 sometimes writes the section's name in the singular.
_K2_SINGULAR = Form(
    call="<|tool_call_begin|>{id}<|tool_call_argument_begin|>{args}<|tool_call_end|>",
    calls=("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
    id=r"(?:functions\.)?(?P<name>[^\s:]+?)(?::\d+)?",
)

# https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md
KIMI_K2 = Family(
    name="kimi_k2",
    aliases=("kimi_k25", "kimi_k2.5", "kimi-k2"),
    reasoning=THINK,
    forms=(
        replace(
            _K2_SINGULAR,
            calls=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            id_picture="functions.{name}:{index}",
            optional=True,
        ),
        _K2_SINGULAR,
    ),
    also_ends_reasoning=("<|tool_calls_section_begin|>",),  # K2 calls without closing its reasoning
    stop_markers=("<|im_end|>",),
    fingerprint=("<|tool_calls_section_begin|>",),
    models=("Kimi K2", "Kimi K2 Thinking", "Kimi K2.5"),
    source="https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md",
)

# https://huggingface.co/moonshotai/Kimi-K3
KIMI_K3 = Family(
    name="kimi_k3",
    aliases=("kimi-k3",),
    reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    text=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    also_ends_reasoning=("<|close|>response<|sep|>",),
    forms=(
        Form(
            call='<|open|>call tool="{name}" index="{index}"<|sep|>{params}<|close|>call<|sep|>',
            parameter='<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>',
            calls=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            escapes=(('"', "&quot;"), ("&", "&amp;")),
            optional=True,
        ),
    ),
    stop_markers=("<|end_of_msg|>",),
    stray_markers=("<|close|>message<|sep|>",),
    thinking_variables=ThinkingVariables(efforts=("thinking_effort",)),
    fingerprint=("<|open|>", "<|close|>", "<|sep|>"),
    models=("Kimi K3",),
    source="https://huggingface.co/moonshotai/Kimi-K3",
)

# https://huggingface.co/moonshotai/Kimi-VL-A3B-Thinking
KIMI = Family(
    name="kimi",
    reasoning=("◁think▷", "◁/think▷"),
    stop_markers=("<|im_end|>",),
    fingerprint=("◁think▷",),
    models=("Kimi-VL Thinking",),
    source="https://huggingface.co/moonshotai/Kimi-VL-A3B-Thinking",
)
