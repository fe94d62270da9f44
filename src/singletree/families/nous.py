"""NousResearch: the Hermes tool format, which Qwen2.5, Qwen3 and many others use."""

from singletree.families.shared import json_each
from singletree.parsing.family import Family

# https://huggingface.co/NousResearch/Hermes-3-Llama-3.1-8B#prompt-format-for-function-calling
HERMES = Family(
    name="hermes",
    aliases=("qwen25", "qwen2_5", "qwen", "qwen3_json", "default"),
    forms=(json_each("<tool_call>\n", "\n</tool_call>", joiner="\n"),),
    before_calls="\n",
    stop_markers=("<|im_end|>",),
    fingerprint=("<tool_call>", "</tool_call>", "arguments"),
    not_in_template=("<function=", "<arg_key>", "<tool_sep>", "<|tool_call>"),
    models=("Hermes 2 Pro", "Hermes 3", "Qwen2.5", "QwQ"),
    source="https://huggingface.co/NousResearch/Hermes-3-Llama-3.1-8B",
)
