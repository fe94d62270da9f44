"""ByteDance: Seed."""

from dataclasses import replace

from singletree.families.qwen import QWEN3_CODER

# https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct/blob/main/chat_template.jinja
SEED_OSS = replace(
    QWEN3_CODER,
    name="seed_oss",
    aliases=("seed-oss",),
    reasoning=("<seed:think>", "</seed:think>"),
    forms=(replace(QWEN3_CODER.forms[0], calls=("<seed:tool_call>\n", "\n</seed:tool_call>")),),
    stop_markers=("<seed:eos>",),
    fingerprint=("<seed:tool_call>", "<function="),
    not_in_template=(),
    models=("Seed-OSS 36B",),
    source="https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct",
)
