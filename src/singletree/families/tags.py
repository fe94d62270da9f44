"""Vendors with one format each, all of them parameters between tags."""

from dataclasses import replace

from singletree.families.glm import GLM45, GLM47
from singletree.families.qwen import QWEN3_CODER
from singletree.parsing.family import Family, Form

# https://huggingface.co/poolside/Laguna-XS-2.1
POOLSIDE_V1 = replace(
    GLM45,
    name="poolside_v1",
    aliases=("poolside",),
    ends=(),
    fingerprint=("<arg_key>", "<arg_value>", "<assistant>"),
    models=("Laguna",),
    source="https://huggingface.co/poolside/Laguna-XS-2.1",
)

# https://huggingface.co/openbmb/MiniCPM5-1B
MINICPM5 = Family(
    name="minicpm5",
    aliases=("minicpmv",),
    reasoning=("<think>\n", "\n</think>\n\n"),
    forms=(
        Form(
            call='<function name="{name}">{params}</function>',
            parameter='<param name="{key}">{value}</param>',
            also_parameter='<param name="{key}"><![CDATA[{value}]]></param>',
            joiner="\n",
        ),
    ),
    before_calls="\n",
    ends=("<|im_end|>",),
    fingerprint=("<function name=", "<param name="),
    models=("MiniCPM5",),
    source="https://huggingface.co/openbmb/MiniCPM5-1B",
)

# https://huggingface.co/rednote-hilab/dots.llm1.inst
DOTS = Family(
    name="dots",
    reasoning=("<think>\n", "\n</think>\n\n"),
    forms=(
        Form(
            call='<invoke name="{name}">{params}</invoke>',
            parameter='<parameter name="{key}">{value}</parameter>',
            calls=("<dots_function_call>", "</dots_function_call>"),
        ),
        Form(
            call='{"name": "{name}", "arguments": {args}}',
            calls=("<dots_function_call>", "</dots_function_call>"),
        ),
    ),
    fingerprint=("<dots_function_call>",),
    models=("dots.llm1",),
    source="https://huggingface.co/rednote-hilab/dots.llm1.inst",
)

# https://huggingface.co/LLM360/K2-Horizon
K2_HORIZON = Family(
    name="k2_horizon",
    reasoning=("<ifm|think>", "</ifm|think>"),
    forms=(
        Form(
            call="<ifm|tool_call>{name}{params}</ifm|tool_call>",
            parameter="<ifm|arg_key>{key}</ifm|arg_key><ifm|arg_value>{value}</ifm|arg_value>",
            calls=("<ifm|tool_calls>", "</ifm|tool_calls>"),
        ),
    ),
    fingerprint=("<ifm|tool_calls>",),
    models=("K2 Horizon",),
    source="https://huggingface.co/LLM360",
)

# https://huggingface.co/inclusionAI/Ling-3.0-flash
LING3 = replace(
    GLM45,
    name="ling3",
    aliases=("ling_3",),
    reasoning=("<think>", "</think>"),
    ends=("<|role_end|>",),
    forms=(
        replace(
            GLM45.forms[0],
            call="{name}{params}\n",
            parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>",
        ),
    ),
    fingerprint=("<arg_key>", "<arg_value>", "<role>"),
    models=("Ling 3.0",),
    source="https://huggingface.co/inclusionAI/Ling-3.0-flash",
)

# https://huggingface.co/iflytek/Spark-2.5
SPARK25 = replace(
    GLM47,
    name="spark25",
    aliases=(),
    ends=("<ret>", "<end>"),
    fingerprint=("<arg_key>", "<arg_value>", "<|Bot|>"),
    models=("Spark 2.5",),
    source="https://huggingface.co/iflytek",
)

# https://huggingface.co/IQuestLab/IQuest-Q1
IQUEST_Q1 = replace(
    GLM47,
    name="iquest_q1",
    aliases=(),
    starts_open=True,
    forms=(replace(GLM47.forms[0], calls=("<iquest_tool_call>", "</iquest_tool_call>")),),
    ends=("<|iquest_end|>",),
    fingerprint=("<iquest_tool_call>",),
    models=("IQuest Q1",),
    source="https://huggingface.co/IQuestLab/IQuest-Q1",
)

# https://huggingface.co/XiaomiMiMo/MiMo-V2-Flash
MIMO = replace(
    QWEN3_CODER,
    name="mimo",
    aliases=(),
    reasoning=("<think>", "</think>"),
    forms=(
        replace(
            QWEN3_CODER.forms[0],
            call="<function={name}>{params}</function>",
            parameter="<parameter={key}>{value}</parameter>",
            calls=("<tool_call>", "</tool_call>"),
        ),
    ),
    fingerprint=(),
    models=("MiMo V2",),
    source="https://huggingface.co/XiaomiMiMo/MiMo-V2-Flash",
)

# https://huggingface.co/Nanbeige/Nanbeige4.1-3B; calls may stand inside the thought
NANBEIGE = replace(
    QWEN3_CODER,
    name="nanbeige",
    aliases=(),
    starts_open=True,
    fingerprint=(),
    models=("Nanbeige 4.1",),
    source="https://huggingface.co/Nanbeige/Nanbeige4.1-3B",
)
