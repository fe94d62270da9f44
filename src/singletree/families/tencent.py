"""Tencent: Hunyuan."""

from dataclasses import replace

from singletree.conversation import ThinkingVariables
from singletree.families.shared import THINK, json_list
from singletree.parsing.family import Family, Form

# https://huggingface.co/tencent/Hunyuan-A13B-Instruct
HUNYUAN_A13B = Family(
    name="hunyuan_a13b",
    reasoning=("<think>\n", "\n</think>\n"),
    forms=(json_list("<tool_calls>[", "]</tool_calls>"),),
    stray_markers=("<answer>\n", "\n</answer>"),
    fingerprint=("<tool_calls>", "</tool_calls>", "<|extra_0|>"),
    models=("Hunyuan A13B",),
    source="https://huggingface.co/tencent/Hunyuan-A13B-Instruct",
)


_OPEN = ":opensource"
"""Suffix of the markers of the open checkpoints; other checkpoints have another suffix, or none."""


def _hy(suffix: str, separator: str, line: str) -> Form:
    key, value = (
        f"<arg_key{suffix}>{{key}}</arg_key{suffix}>",
        f"<arg_value{suffix}>{{value}}</arg_value{suffix}>",
    )
    return Form(
        call=f"<tool_call{suffix}>{{name}}{separator}{line}{{params}}</tool_call{suffix}>",
        parameter=f"{key}{line}{value}{line}",
        calls=(f"<tool_calls{suffix}>\n", f"\n</tool_calls{suffix}>"),
        joiner="\n",
        optional=True,
    )


# https://huggingface.co/tencent/Hy3/blob/main/chat_template.jinja
HY_V3 = Family(
    name="hy_v3",
    aliases=("hunyuan", "hy3"),
    reasoning=THINK,
    also_reasoning=((f"<think{_OPEN}>", f"</think{_OPEN}>"),),
    forms=(_hy("", "<tool_sep>", "\n"), _hy(_OPEN, f"<tool_sep{_OPEN}>", "\n")),
    before_calls="\n",
    stop_markers=("<｜hy_eos｜>", f"<｜hy_eos{_OPEN}｜>"),
    thinking_variables=ThinkingVariables(history=(("preserved_thinking", True),)),
    fingerprint=("<tool_calls", "<tool_sep", "<arg_key"),
    variant=(_OPEN, r"HYTK = '(:[^'\s<>]+)'"),
    models=("Hunyuan 3",),
    source="https://huggingface.co/tencent/Hy3",
)

HY_V4 = replace(
    HY_V3,
    name="hy_v4",
    aliases=("hy4",),
    forms=(_hy("", "", ""), _hy(_OPEN, "", "")),
    fingerprint=("<tool_calls", "<arg_key"),
    not_in_template=("<tool_sep",),
    models=("Hunyuan 4",),
    source="https://huggingface.co/tencent",
)
