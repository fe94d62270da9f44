"""Vendors whose calls are JSON objects between markers."""

from dataclasses import replace

from singletree.families.deepseek import dsml
from singletree.families.shared import HERMES, JSON_CALL, THINK_IN_LINES, json_each, json_list
from singletree.families.vendors import QWEN3
from singletree.parsing.family import Family, Form

JAMBA = Family(
    name="jamba",
    forms=(json_list("<tool_calls>[\n", "\n]</tool_calls>", joiner=",\n"),),
    fingerprint=("<tool_calls>", "</tool_calls>"),
    not_in_template=("<answer>", "<tool_sep>"),
    models=("Jamba 1.5", "Jamba 1.6"),
    source="https://huggingface.co/ai21labs/AI21-Jamba-Large-1.5",
)

PHI4 = Family(
    name="phi4",
    aliases=("phi4_mini_json",),
    forms=(json_list("functools[", "]"), json_list("<|tool_call|>[", "]<|/tool_call|>")),
    stop_markers=("<|end|>",),
    fingerprint=("functools",),
    models=("Phi-4-mini",),
    source="https://huggingface.co/microsoft/Phi-4-mini-instruct",
)

LONGCAT = Family(
    name="longcat",
    forms=(json_each("<longcat_tool_call>\n", "\n</longcat_tool_call>", joiner="\n"),),
    before_calls="\n",
    fingerprint=("<longcat_tool_call>",),
    models=("LongCat Flash",),
    source="https://huggingface.co/meituan-longcat/LongCat-Flash-Chat",
)

ERNIE45 = replace(
    HERMES,
    name="ernie45",
    aliases=(),
    reasoning=THINK_IN_LINES,
    starts_open=True,
    stop_markers=(),
    stray_markers=("<response>\n", "\n</response>\n"),
    fingerprint=("<tool_call>", "<response>"),
    models=("ERNIE 4.5 Thinking",),
    source="https://huggingface.co/baidu/ERNIE-4.5-21B-A3B-Thinking",
)

APERTUS = Family(
    name="apertus",
    aliases=("apertus2509",),
    reasoning=("<|inner_prefix|>", "<|inner_suffix|>"),
    forms=(Form(call='{"{name}": {args}}', calls=("<|tools_prefix|>[", "]<|tools_suffix|>"), joiner=", "),),
    stop_markers=("<|assistant_end|>",),
    fingerprint=("<|tools_prefix|>",),
    models=("Apertus",),
    source="https://huggingface.co/swiss-ai/Apertus-8B-Instruct-2509",
)

INTERNLM = Family(
    name="internlm",
    aliases=("interns1",),
    reasoning=THINK_IN_LINES,
    forms=(
        Form(
            call='{"name": "{name}", "parameters": {args}}',
            calls=("<|action_start|><|plugin|>\n", "<|action_end|>"),
            wrap_each=True,
            joiner="\n",
        ),
        Form(
            call='{"name": "{name}", "parameters": {args}}',
            calls=("<|action_start|> <|plugin|>\n", "<|action_end|>"),
            wrap_each=True,
        ),
    ),
    before_calls="\n",
    stop_markers=("<|im_end|>",),
    fingerprint=("<|action_start|>", "<|plugin|>"),
    models=("InternLM 2.5", "InternLM 3", "Intern-S1"),
    source="https://huggingface.co/internlm/internlm3-8b-instruct",
)

GIGACHAT3 = Family(
    name="gigachat3",
    forms=(
        json_each("<|function_call|>", ""),
        json_each("<|message_sep|>\n\nfunction call<|role_sep|>\n", ""),
        json_each("function call<|role_sep|>\n", ""),
    ),
    stop_markers=("</s>",),
    stray_markers=("<|message_sep|>",),  # it also comes before a call
    fingerprint=("<|role_sep|>",),
    not_in_template=("｜GCML｜",),
    models=("GigaChat 3", "GigaChat 3.1"),
    source="https://huggingface.co/ai-sage/GigaChat3.1-10B-A1.8B",
)

GIGACHAT35 = replace(
    dsml("gigachat35", (), "GigaChat 3.5", "tool_calls", language="GCML"),
    stop_markers=("</s>",),
    stray_markers=("<|message_sep|>",),  # it also comes before a call
    source="https://huggingface.co/ai-sage",
)

XLAM = Family(
    name="xlam",
    reasoning=THINK_IN_LINES,
    forms=(
        # Reasoning is read by another family's half, or not at all; its closer is text then.
        Form(call=JSON_CALL, calls=("[", "]"), joiner=", ", unmarked=True, behind="</think> *"),
        Form(call=JSON_CALL, calls=("```json\n[", "]\n```"), joiner=", ", unmarked=True),
        json_list("[TOOL_CALLS][", "]"),
        json_list("<tool_call>[", "]</tool_call>"),
    ),
    before_calls="\n",
    stop_markers=("<|im_end|>", "<|eot_id|>"),
    fingerprint=('[{"name": "tool_call_name"',),
    models=("xLAM 2",),
    source="https://huggingface.co/Salesforce/Llama-xLAM-2-8b-fc-r",
)

FUNCTIONARY_V3_1 = Family(
    name="functionary_v3_1",
    forms=(Form(call="<function={name}>{args}</function>"),),
    stop_markers=("<|eom_id|>", "<|eot_id|>"),
    fingerprint=("<{start_tag}={function_name}>",),
    models=("Functionary 3.1",),
    source="https://huggingface.co/meetkai/functionary-medium-v3.1",
)

FIREFUNCTION = replace(
    PHI4,
    name="firefunction",
    aliases=("firefunction_v2",),
    forms=(json_list("functools[", "]"),),
    stop_markers=("<|eot_id|>",),
    fingerprint=("functools", "<|start_header_id|>"),
    models=("Firefunction v2",),
    source="https://huggingface.co/fireworks-ai/llama-3-firefunction-v2",
)

PLAMO3 = Family(
    name="plamo3",
    reasoning=("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    forms=tuple(
        Form(
            call="<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
            f"<|plamo:begin_tool_arguments:plamo|>{marker}<|plamo:msg|>{{args}}<|plamo:end_tool_arguments:plamo|>"
            "<|plamo:end_tool_request:plamo|>",
            calls=("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"),
            optional=True,
        )
        for marker in ("<|plamo:constrain|>json", "")
    ),
    stray_markers=("<|plamo:tag|>",),
    fingerprint=("<|plamo:begin_tool_request",),
    models=("PLaMo 3",),
    source="https://huggingface.co/pfnet",
)

APRIEL = Family(
    name="apriel",
    reasoning=("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n"),
    forms=(json_list("<tool_calls>[", "]</tool_calls>"),),
    stop_markers=("<|end|>",),
    stray_markers=("[END FINAL RESPONSE]",),
    fingerprint=("[BEGIN FINAL RESPONSE]", "<tool_calls>"),
    models=("Apriel 1.5", "Apriel 1.6"),
    source="https://huggingface.co/ServiceNow-AI/Apriel-1.6-15b-Thinker",
)

EXAONE4 = replace(
    QWEN3,
    name="exaone4",
    aliases=("exaone",),
    forms=(replace(HERMES.forms[0], calls=("<tool_call>", "</tool_call>")),),
    stop_markers=("[|endofturn|]",),
    fingerprint=("<tool_call>", "</tool_call>", "arguments", "[|assistant|]"),
    models=("EXAONE 4",),
    source="https://huggingface.co/LGAI-EXAONE/EXAONE-4.0-32B",
)

REKA = replace(
    QWEN3,
    name="reka",
    aliases=("reka_edge",),
    stop_markers=("<sep>",),
    fingerprint=("<tool_call>", "</tool_call>", "arguments", "</think>", "<sep>"),
    models=("Reka Flash 3.1", "Reka Edge"),
    source="https://huggingface.co/RekaAI/reka-flash-3.1",
)

TRINITY = replace(
    QWEN3,
    name="trinity",
    aliases=(),
    fingerprint=(),
    models=("Trinity",),
    source="https://huggingface.co/arcee-ai/Trinity-Mini",
)

GRANITE = Family(
    name="granite",
    reasoning=("Here is my thought process:\n", "\nHere is my response:\n"),
    also_reasoning=(("Here's my thought process:\n", "\nHere's my response:\n"), ("<think>", "</think>")),
    forms=(json_list("<tool_call>[", "]"), json_list("<|tool_call|>[", "]")),
    stop_markers=("<|end_of_text|>",),
    stray_markers=("<response>", "</response>"),
    fingerprint=("<|tool_call|>", "<|start_of_role|>"),
    models=("Granite 3.0", "Granite 3.1", "Granite 3.2", "Granite 3.3"),
    source="https://huggingface.co/ibm-granite/granite-3.1-8b-instruct",
)

GRANITE_20B_FC = Family(
    name="granite_20b_fc",
    forms=(json_each("<function_call> ", "", joiner="\n"),),
    stop_markers=("<|endoftext|>",),
    fingerprint=("<function_call>",),
    models=("Granite 20B function calling",),
    source="https://huggingface.co/ibm-granite/granite-20b-functioncalling",
)

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
