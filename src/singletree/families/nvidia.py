"""NVIDIA: Nemotron."""

from dataclasses import replace

from singletree.conversation import ThinkingVariables
from singletree.families.qwen import QWEN3_CODER
from singletree.families.shared import THINK_IN_LINES, json_list
from singletree.parsing.family import Family

# https://huggingface.co/nvidia/Llama-3_3-Nemotron-Super-49B-v1
NEMOTRON_DECI = Family(
    name="nemotron_deci",
    reasoning=THINK_IN_LINES,
    forms=(json_list("<TOOLCALL>[", "]</TOOLCALL>"),),
    stop_markers=("<|eot_id|>",),
    fingerprint=("<TOOLCALL>",),
    models=("Llama-Nemotron Super and Ultra v1", "Nemotron Nano v1"),
    source="https://huggingface.co/nvidia/Llama-3_3-Nemotron-Super-49B-v1",
)

# https://huggingface.co/nvidia/NVIDIA-Nemotron-Nano-9B-v2
NEMOTRON_NANO = replace(
    NEMOTRON_DECI,
    name="nemotron_nano",
    reasoning=("<think>\n", "\n</think>\n"),
    starts_open=True,
    stop_markers=("<SPECIAL_12>",),
    fingerprint=("<TOOLCALL>", "<SPECIAL_11>"),
    models=("Nemotron Nano v2",),
    source="https://huggingface.co/nvidia/NVIDIA-Nemotron-Nano-9B-v2",
)

# https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
NEMOTRON_V3 = replace(
    QWEN3_CODER,
    name="nemotron_v3",
    aliases=("nemotron3", "nemotron_3"),
    tool_aliases=("nemotron_nano",),
    starts_open=True,
    # Where other templates take a word for the effort, this one has a flag for each weaker effort.
    thinking_variables=ThinkingVariables(
        history=(("truncate_history_thinking", False),),
        effort_flags=(("minimal", "low_effort"), ("low", "low_effort"), ("medium", "medium_effort")),
    ),
    fingerprint=("<tool_call>", "<function=", "<parameter=", "truncate_history_thinking"),
    models=("Nemotron 3 Nano", "Nemotron 3 Super", "Nemotron 3 Ultra"),
    source="https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
)
