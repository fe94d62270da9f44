"""Vendors with one format each, all of them calls as Python writes them, between markers."""

from singletree.families.meta import PYTHON
from singletree.parsing.family import Family, Form

# https://huggingface.co/allenai/Olmo-3-7B-Instruct
OLMO3 = Family(
    name="olmo3",
    reasoning=("<think>", "</think>"),
    forms=(
        Form(
            call="{name}({literals})",
            calls=("<function_calls>\n", "\n</function_calls>"),
            joiner="\n",
            literals=PYTHON,
        ),
    ),
    ends=("<|im_end|>",),
    fingerprint=("<function_calls>",),
    not_in_template=("｜DSML｜", "atem:"),
    models=("Olmo 3",),
    source="https://huggingface.co/allenai/Olmo-3-7B-Instruct",
)

# https://huggingface.co/LiquidAI/LFM2-8B-A1B#tool-use
LFM2 = Family(
    name="lfm2",
    aliases=("lfm2_5",),
    reasoning=("<think>", "</think>"),
    forms=(
        Form(
            call="{name}({literals})",
            calls=("<|tool_call_start|>[", "]<|tool_call_end|>"),
            joiner=", ",
            literals=PYTHON,
        ),
        Form(
            call='{"name": "{name}", "arguments": {args}}',
            calls=("<|tool_call_start|>[", "]<|tool_call_end|>"),
            joiner=", ",
        ),
        Form(
            call='{"name": "{name}", "arguments": {args}}',
            calls=("<|tool_call_start|>", "<|tool_call_end|>"),
            each=True,
        ),
    ),
    ends=("<|im_end|>",),
    fingerprint=("<|tool_call_start|>",),
    also_fingerprint=("<|tool_list_start|>",),
    models=("LFM2", "LFM2.5"),
    source="https://huggingface.co/LiquidAI/LFM2-8B-A1B",
)
