"""IBM: Granite."""

from dataclasses import replace

from singletree.families.nous import HERMES
from singletree.families.shared import json_each, json_list
from singletree.parsing.family import Family

# https://huggingface.co/ibm-granite/granite-3.1-8b-instruct
GRANITE = Family(
    name="granite",
    reasoning=("Here is my thought process:\n", "\nHere is my response:\n"),
    also_reasoning=(("Here's my thought process:\n", "\nHere's my response:\n"), ("<think>", "</think>")),
    forms=(
        json_list("<tool_call>[", "]"),
        json_list("<|tool_call|>[", "]"),
    ),
    stop_markers=("<|end_of_text|>",),
    stray_markers=("<response>", "</response>"),
    fingerprint=("<|tool_call|>", "<|start_of_role|>"),
    models=("Granite 3.0", "Granite 3.1", "Granite 3.2", "Granite 3.3"),
    source="https://huggingface.co/ibm-granite/granite-3.1-8b-instruct",
)

# https://huggingface.co/ibm-granite/granite-20b-functioncalling
GRANITE_20B_FC = Family(
    name="granite_20b_fc",
    forms=(json_each("<function_call> ", "", joiner="\n"),),
    stop_markers=("<|endoftext|>",),
    fingerprint=("<function_call>",),
    models=("Granite 20B function calling",),
    source="https://huggingface.co/ibm-granite/granite-20b-functioncalling",
)

# https://huggingface.co/ibm-granite/granite-4.0-h-small
GRANITE4 = replace(
    HERMES,
    name="granite4",
    aliases=("granite_thinking_parser",),
    reasoning=("<think>\n", "\n</think>\n"),
    stop_markers=("<|end_of_text|>",),
    fingerprint=("<tool_call>", "</tool_call>", "arguments", "<|start_of_role|>"),
    not_in_template=("<|tool_call|>",),
    models=("Granite 4",),
    source="https://huggingface.co/ibm-granite/granite-4.0-h-small",
)
