"""Alibaba: Qwen."""

from dataclasses import replace

from singletree.families.nous import HERMES
from singletree.families.shared import THINK_IN_LINES
from singletree.parsing.family import Family, Form

# https://huggingface.co/Qwen/Qwen3-8B/blob/main/tokenizer_config.json
QWEN3 = replace(
    HERMES,
    name="qwen3",
    aliases=("qwen3-thinking",),
    reasoning=THINK_IN_LINES,
    fingerprint=("<tool_call>", "</tool_call>", "arguments", "</think>"),
    models=("Qwen3", "Qwen3-Thinking-2507"),
    source="https://huggingface.co/Qwen/Qwen3-8B",
)

# https://huggingface.co/Qwen/Qwen3-Coder-480B-A35B-Instruct/blob/main/chat_template.jinja
QWEN3_CODER = Family(
    name="qwen3_coder",
    aliases=("qwen3_xml",),
    reasoning=THINK_IN_LINES,
    forms=(
        Form(
            call="<function={name}>\n{params}</function>",
            parameter="<parameter={key}>\n{value}\n</parameter>\n",
            calls=("<tool_call>\n", "\n</tool_call>"),
            wrap_each=True,
            joiner="\n",
            next_closes=True,
            optional=True,  # Qwen3-Coder forgets <tool_call> now and then (vllm#41967's thread, ollama#16686)
        ),
    ),
    before_calls="\n",
    stop_markers=("<|im_end|>",),
    fingerprint=("<tool_call>", "<function=", "<parameter="),
    not_in_template=("<seed:tool_call>",),
    models=("Qwen3-Coder", "Qwen3.5", "Qwen3.6", "Qwen3.8"),
    source="https://huggingface.co/Qwen/Qwen3-Coder-480B-A35B-Instruct",
)
