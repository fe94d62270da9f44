"""Mistral AI."""

from singletree.families.shared import json_list
from singletree.parsing.family import Family, Form

# https://docs.mistral.ai/cookbooks/concept-deep-dive-tokenization-tool_calling
MISTRAL = Family(
    name="mistral",
    reasoning=("[THINK]", "[/THINK]"),
    forms=(
        Form(call="[TOOL_CALLS]{name}[ARGS]{args}"),
        Form(call="[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{args}"),
        Form(call="[TOOL_CALLS]{name}{args}"),
        json_list("[TOOL_CALLS][", "]"),
    ),
    stop_markers=("</s>",),
    stray_markers=(
        "[/TOOL_CALLS]",
    ),  # the array form's closer exists in v3 vocabularies, models seldom write it
    fingerprint=("[TOOL_CALLS]",),
    models=("Mistral Small", "Magistral", "Devstral", "Ministral 3", "Mistral Nemo"),
    source="https://huggingface.co/mistralai/Mistral-Small-3.2-24B-Instruct-2506",
)
