"""Pieces of formats that several vendors share, and the formats that belong to no vendor."""

from singletree.parsing.family import Family, Form

THINK = ("<think>", "</think>")
"""Reasoning between bare tags."""

THINK_IN_LINES = ("<think>\n", "\n</think>\n\n")
"""Reasoning between tags in lines of their own, with an empty line behind them."""

JSON_CALL = '{"name": "{name}", "arguments": {args}}'
"""A call as one JSON object."""


def json_list(opener: str, closer: str, *, joiner: str = ", ") -> Form:
    """Return the form of calls as JSON objects with ``joiner`` between them, all inside one pair of texts."""
    return Form(call=JSON_CALL, calls=(opener, closer), joiner=joiner)


def json_each(opener: str, closer: str, *, joiner: str = "") -> Form:
    """Return the form of calls as JSON objects, each inside its own pair of texts."""
    return Form(call=JSON_CALL, calls=(opener, closer), wrap_each=True, joiner=joiner)


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

PLAIN = Family(name="plain", source="no markers at all: every word is text")

BASIC = Family(
    name="basic",
    reasoning_aliases=("holo2",),
    reasoning=THINK_IN_LINES,
    models=("any model that thinks between <think> and </think>",),
    source="https://docs.nvidia.com/dynamo (reasoning parser `basic`)",
)
