"""Vendors with one format each, all of them JSON objects between markers."""

from dataclasses import replace

from singletree.families.deepseek import dsml
from singletree.families.nous import HERMES
from singletree.families.qwen import QWEN3
from singletree.parsing.family import Family, Form

_CALL = '{"name": "{name}", "arguments": {args}}'

# https://huggingface.co/ai21labs/AI21-Jamba-Large-1.5
JAMBA = Family(
    name="jamba",
    forms=(Form(call=_CALL, calls=("<tool_calls>[\n", "\n]</tool_calls>"), joiner=",\n"),),
    fingerprint=("<tool_calls>", "</tool_calls>"),
    not_in_template=("<answer>", "<tool_sep>"),
    models=("Jamba 1.5", "Jamba 1.6"),
    source="https://huggingface.co/ai21labs/AI21-Jamba-Large-1.5",
)

# https://huggingface.co/microsoft/Phi-4-mini-instruct
PHI4 = Family(
    name="phi4",
    aliases=("phi4_mini_json",),
    forms=(
        Form(call=_CALL, calls=("functools[", "]"), joiner=", "),
        Form(call=_CALL, calls=("<|tool_call|>[", "]<|/tool_call|>"), joiner=", "),
    ),
    ends=("<|end|>",),
    fingerprint=("functools",),
    models=("Phi-4-mini",),
    source="https://huggingface.co/microsoft/Phi-4-mini-instruct",
)

# https://huggingface.co/meituan-longcat/LongCat-Flash-Chat
LONGCAT = Family(
    name="longcat",
    forms=(
        Form(call=_CALL, calls=("<longcat_tool_call>\n", "\n</longcat_tool_call>"), each=True, joiner="\n"),
    ),
    before_calls="\n",
    fingerprint=("<longcat_tool_call>",),
    models=("LongCat Flash",),
    source="https://huggingface.co/meituan-longcat/LongCat-Flash-Chat",
)

# https://huggingface.co/baidu/ERNIE-4.5-21B-A3B-Thinking
ERNIE45 = replace(
    HERMES,
    name="ernie45",
    aliases=(),
    reasoning=("<think>\n", "\n</think>\n\n"),
    starts_open=True,
    ends=("<response>\n", "\n</response>\n"),
    fingerprint=("<tool_call>", "<response>"),
    models=("ERNIE 4.5 Thinking",),
    source="https://huggingface.co/baidu/ERNIE-4.5-21B-A3B-Thinking",
)

# https://huggingface.co/swiss-ai/Apertus-8B-Instruct-2509
APERTUS = Family(
    name="apertus",
    aliases=("apertus2509",),
    reasoning=("<|inner_prefix|>", "<|inner_suffix|>"),
    forms=(Form(call='{"{name}": {args}}', calls=("<|tools_prefix|>[", "]<|tools_suffix|>"), joiner=", "),),
    ends=("<|assistant_end|>",),
    fingerprint=("<|tools_prefix|>",),
    models=("Apertus",),
    source="https://huggingface.co/swiss-ai/Apertus-8B-Instruct-2509",
)

# https://huggingface.co/internlm/internlm3-8b-instruct
INTERNLM = Family(
    name="internlm",
    aliases=("interns1",),
    reasoning=("<think>\n", "\n</think>\n\n"),
    forms=(
        Form(
            call='{"name": "{name}", "parameters": {args}}',
            calls=("<|action_start|><|plugin|>\n", "<|action_end|>"),
            each=True,
            joiner="\n",
        ),
        Form(
            call='{"name": "{name}", "parameters": {args}}',
            calls=("<|action_start|> <|plugin|>\n", "<|action_end|>"),
            each=True,
        ),
    ),
    before_calls="\n",
    ends=("<|im_end|>",),
    fingerprint=("<|action_start|>", "<|plugin|>"),
    models=("InternLM 2.5", "InternLM 3", "Intern-S1"),
    source="https://huggingface.co/internlm/internlm3-8b-instruct",
)

# https://huggingface.co/ai-sage/GigaChat3.1-10B-A1.8B
GIGACHAT3 = Family(
    name="gigachat3",
    forms=(
        Form(call=_CALL, calls=("<|function_call|>", ""), each=True),
        Form(call=_CALL, calls=("<|message_sep|>\n\nfunction call<|role_sep|>\n", ""), each=True),
        Form(call=_CALL, calls=("function call<|role_sep|>\n", ""), each=True),
    ),
    ends=("<|message_sep|>", "</s>"),
    fingerprint=("<|role_sep|>",),
    not_in_template=("｜GCML｜",),
    models=("GigaChat 3", "GigaChat 3.1"),
    source="https://huggingface.co/ai-sage/GigaChat3.1-10B-A1.8B",
)

GIGACHAT35 = replace(
    dsml(
        "gigachat35",
        (),
        "tool_calls",
        "",
        ("GigaChat 3.5",),
        "https://huggingface.co/ai-sage",
        language="GCML",
    ),
    ends=("<|message_sep|>", "</s>"),
)

# https://huggingface.co/Salesforce/Llama-xLAM-2-8b-fc-r
XLAM = Family(
    name="xlam",
    reasoning=("<think>\n", "\n</think>\n\n"),
    forms=(
        Form(call=_CALL, calls=("[", "]"), joiner=", ", bare=True),
        Form(call=_CALL, calls=("```json\n[", "]\n```"), joiner=", ", bare=True),
        Form(call=_CALL, calls=("[TOOL_CALLS][", "]"), joiner=", "),
        Form(call=_CALL, calls=("<tool_call>[", "]</tool_call>"), joiner=", "),
    ),
    before_calls="\n",
    ends=("<|im_end|>", "<|eot_id|>"),
    fingerprint=('[{"name": "tool_call_name"',),
    models=("xLAM 2",),
    source="https://huggingface.co/Salesforce/Llama-xLAM-2-8b-fc-r",
)

# https://huggingface.co/meetkai/functionary-medium-v3.1
FUNCTIONARY_V3_1 = Family(
    name="functionary_v3_1",
    forms=(Form(call="<function={name}>{args}</function>"),),
    ends=("<|eom_id|>", "<|eot_id|>"),
    fingerprint=("<{start_tag}={function_name}>",),
    models=("Functionary 3.1",),
    source="https://huggingface.co/meetkai/functionary-medium-v3.1",
)

# https://huggingface.co/fireworks-ai/llama-3-firefunction-v2
FIREFUNCTION = replace(
    PHI4,
    name="firefunction",
    aliases=("firefunction_v2",),
    forms=(Form(call=_CALL, calls=("functools[", "]"), joiner=", "),),
    ends=("<|eot_id|>",),
    fingerprint=("functools", "<|start_header_id|>"),
    models=("Firefunction v2",),
    source="https://huggingface.co/fireworks-ai/llama-3-firefunction-v2",
)

# https://huggingface.co/pfnet/plamo-3-nict-31b-base
PLAMO3 = Family(
    name="plamo3",
    reasoning=("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    forms=tuple(
        Form(
            call="<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
            f"<|plamo:begin_tool_arguments:plamo|>{said}<|plamo:msg|>{{args}}<|plamo:end_tool_arguments:plamo|>"
            "<|plamo:end_tool_request:plamo|>",
            calls=("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"),
            optional=True,
        )
        for said in ("<|plamo:constrain|>json", "")
    ),
    ends=("<|plamo:tag|>",),
    fingerprint=("<|plamo:begin_tool_request",),
    models=("PLaMo 3",),
    source="https://huggingface.co/pfnet",
)

# https://huggingface.co/ServiceNow-AI/Apriel-1.6-15b-Thinker
APRIEL = Family(
    name="apriel",
    reasoning=("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n"),
    forms=(Form(call=_CALL, calls=("<tool_calls>[", "]</tool_calls>"), joiner=", "),),
    ends=("[END FINAL RESPONSE]", "<|end|>"),
    fingerprint=("[BEGIN FINAL RESPONSE]", "<tool_calls>"),
    models=("Apriel 1.5", "Apriel 1.6"),
    source="https://huggingface.co/ServiceNow-AI/Apriel-1.6-15b-Thinker",
)

# https://huggingface.co/LGAI-EXAONE/EXAONE-4.0-32B
EXAONE4 = replace(
    QWEN3,
    name="exaone4",
    aliases=("exaone",),
    forms=(replace(HERMES.forms[0], calls=("<tool_call>", "</tool_call>")),),
    ends=("[|endofturn|]",),
    fingerprint=("<tool_call>", "</tool_call>", "arguments", "[|assistant|]"),
    models=("EXAONE 4",),
    source="https://huggingface.co/LGAI-EXAONE/EXAONE-4.0-32B",
)

# https://huggingface.co/RekaAI/reka-flash-3.1
REKA = replace(
    QWEN3,
    name="reka",
    aliases=("reka_edge",),
    ends=("<sep>",),
    fingerprint=("<tool_call>", "</tool_call>", "arguments", "</think>", "<sep>"),
    models=("Reka Flash 3.1", "Reka Edge"),
    source="https://huggingface.co/RekaAI/reka-flash-3.1",
)

# https://huggingface.co/arcee-ai/Trinity-Mini
TRINITY = replace(
    QWEN3,
    name="trinity",
    aliases=(),
    fingerprint=(),
    models=("Trinity",),
    source="https://huggingface.co/arcee-ai/Trinity-Mini",
)
