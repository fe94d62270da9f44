"""Vendors with one format each: calls in Python syntax between markers."""

from dataclasses import replace

from singletree.families.meta import PYTHON, python_list
from singletree.families.shared import THINK, json_each, json_list
from singletree.parsing.family import Family

_NESTED_QUOTES = replace(PYTHON, nested_quotes=True)  # as in command="grep "x" file"

# https://huggingface.co/allenai/Olmo-3-7B-Instruct
OLMO3 = Family(
    name="olmo3",
    reasoning=THINK,
    forms=(python_list("<function_calls>\n", "\n</function_calls>", joiner="\n"),),
    stop_markers=("<|im_end|>",),
    fingerprint=("<function_calls>",),
    not_in_template=("｜DSML｜", "atem:"),
    models=("Olmo 3",),
    source="https://huggingface.co/allenai/Olmo-3-7B-Instruct",
)

# https://huggingface.co/LiquidAI/LFM2-8B-A1B#tool-use
LFM2 = Family(
    name="lfm2",
    aliases=("lfm2_5",),
    reasoning=THINK,
    forms=(
        python_list("<|tool_call_start|>[", "]<|tool_call_end|>", literals=_NESTED_QUOTES),
        json_list("<|tool_call_start|>[", "]<|tool_call_end|>"),
        json_each("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    stop_markers=("<|im_end|>",),
    fingerprint=("<|tool_call_start|>",),
    also_fingerprint=("<|tool_list_start|>",),
    models=("LFM2", "LFM2.5"),
    source="https://huggingface.co/LiquidAI/LFM2-8B-A1B",
)
