"""Cohere: Command."""

from dataclasses import replace

from singletree.parsing.family import Family, Form

# Spans that name their sources: <co: 0,1>…</co: 0,1> (Command R), <co>…</co: 0:[1,2]> (R7B and later)
_CITATIONS = ("<co>", "</co>", "<co:{sources}>", "</co:{sources}>")

# https://huggingface.co/CohereLabs/c4ai-command-r7b-12-2024
COHERE_COMMAND3 = Family(
    name="cohere_command3",
    aliases=("cohere_command", "command_r7b", "command_a"),
    reasoning=("<|START_THINKING|>", "<|END_THINKING|>"),
    text=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    also_text=("<|START_TEXT|>",),
    forms=(
        Form(
            call='{"tool_call_id": "{id}", "tool_name": "{name}", "parameters": {args}}',
            calls=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
            joiner=",\n    ",
            id_picture="{index}",
        ),
    ),
    hidden_markup=_CITATIONS,
    stop_markers=("<|END_OF_TURN_TOKEN|>",),
    stray_markers=("<|END_TEXT|>", "<|END_RESPONSE|>", "<|CHATBOT_TOKEN|>"),
    fingerprint=("<|START_ACTION|>",),
    models=("Command R7B", "Command A"),
    source="https://docs.cohere.com/docs/command-r7b-hf",
)

COHERE_COMMAND4 = replace(
    COHERE_COMMAND3,
    name="cohere_command4",
    aliases=(),
    text=("<|START_TEXT|>", "<|END_TEXT|>"),
    also_text=("<|START_RESPONSE|>",),
    fingerprint=("<|START_ACTION|>", "<|START_TEXT|>"),
    models=("Command A Reasoning", "Cohere2 MoE"),
)

# https://huggingface.co/CohereLabs/c4ai-command-r-plus
COMMAND_R = Family(
    name="command_r",
    aliases=("command_r_plus",),
    forms=(
        Form(
            call='{"tool_name": "{name}", "parameters": {args}}',
            calls=("Action:\n```json\n[", "]\n```"),
            joiner=", ",
        ),
    ),
    before_calls="\n",
    no_tools=("directly-answer", "directly_answer"),
    hidden_markup=_CITATIONS,
    stop_markers=("<|END_OF_TURN_TOKEN|>",),
    stray_markers=("<|CHATBOT_TOKEN|>",),
    fingerprint=("<|CHATBOT_TOKEN|>", '"tool_name"'),
    not_in_template=("<|START_ACTION|>",),
    models=("Command R", "Command R+"),
    source="https://docs.cohere.com/docs/command-r-plus-hf",
)
