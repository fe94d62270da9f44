"""Vendors whose calls have parameters between tags."""

from dataclasses import replace

from singletree.conversation import ThinkingVariables
from singletree.families.shared import THINK, THINK_IN_LINES, json_each, json_list
from singletree.families.vendors import QWEN3_CODER
from singletree.parsing.family import Family, Form

GLM45 = Family(
    name="glm45",
    aliases=("glm-4.5", "glm46", "glm"),
    reasoning=("<think>", "</think>\n"),
    forms=(
        Form(
            call="{name}\n{params}",
            parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
            calls=("<tool_call>", "</tool_call>"),
            wrap_each=True,
            joiner="\n",
        ),
    ),
    before_calls="\n",
    stop_markers=("<|observation|>", "<|user|>", "<|endoftext|>"),
    fingerprint=("<arg_key>", "<arg_value>", "</arg_key>\n<arg_value>"),
    models=("GLM 4.5", "GLM 4.6"),
    source="https://huggingface.co/zai-org/GLM-4.5",
)

GLM47 = replace(
    GLM45,
    name="glm47",
    aliases=("glm-4.7", "glm5"),
    reasoning=THINK,
    forms=(
        replace(
            GLM45.forms[0],
            call="{name}{params}",
            parameter="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
            joiner="",
        ),
    ),
    before_calls="",
    thinking_variables=ThinkingVariables(history=(("clear_thinking", False),)),
    fingerprint=("<arg_key>", "<arg_value>"),
    models=("GLM 4.7", "GLM 5"),
    source="https://huggingface.co/zai-org/GLM-4.7",
)

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

STEP3 = Family(
    name="step3",
    reasoning=("<think>\n", "\n</think>\n"),
    forms=(
        Form(
            call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{params}</steptml:invoke>'
            "<｜tool_call_end｜>",
            parameter='<steptml:parameter name="{key}">{value}</steptml:parameter>',
            calls=("<｜tool_calls_begin｜>\n", "\n<｜tool_calls_end｜>"),
            joiner="\n",
            optional=True,
        ),
    ),
    fingerprint=("<｜tool_calls_begin｜>", "steptml"),
    models=("Step 3",),
    source="https://huggingface.co/stepfun-ai/step3",
)

STEP3P5 = replace(
    QWEN3_CODER,
    name="step3p5",
    aliases=("step3_5", "step5"),
    reasoning=("<think>\n", "\n</think>\n"),
    starts_open=True,
    fingerprint=("<tool_call>", "<function=", "<parameter=", "<im_patch>"),
    models=("Step 3.5", "Step 5"),
    source="https://huggingface.co/stepfun-ai/Step-3.5-Flash",
)

POOLSIDE_V1 = replace(
    GLM45,
    name="poolside_v1",
    aliases=("poolside",),
    stop_markers=(),
    fingerprint=("<arg_key>", "<arg_value>", "<assistant>"),
    models=("Laguna",),
    source="https://huggingface.co/poolside/Laguna-XS-2.1",
)

_MINICPM5_PARAMETERS = (
    '<param name="{key}"><![CDATA[{value}]]></param>',
    *(
        f'<param{space}name="{{key}}">{value}</param>'
        for space in ("", "Ġ")
        for value in ("<![CDATA[{value}]]>", "{value}")
    ),
)

MINICPM5 = Family(
    name="minicpm5",
    reasoning=THINK_IN_LINES,
    forms=tuple(
        Form(
            call=f'<function{space}name="{{name}}">{{params}}</function>',
            parameter='<param name="{key}">{value}</param>',
            also_parameter=_MINICPM5_PARAMETERS,
            joiner="\n",
        )
        # The model sometimes loses the space in the opener (OpenBMB's own parser repairs the same two tags), or writes
        # the sign by which byte-level vocabularies show a space.
        for space in (" ", "", "Ġ")
    ),
    before_calls="\n",
    stop_markers=("<|im_end|>",),
    fingerprint=("<function name=", "<param name="),
    models=("MiniCPM5",),
    source="https://huggingface.co/openbmb/MiniCPM5-1B",
)

# https://huggingface.co/openbmb/MiniCPM-V-4_5; tool calls are those of Qwen3-Coder, and some checkpoints write
# reserved markers of their vocabulary that have no meaning.
MINICPMV = replace(
    QWEN3_CODER,
    name="minicpmv",
    aliases=("minicpm_v",),
    stray_markers=tuple(f"<{bar}reserved_{number}{bar}>" for number in range(12, 16) for bar in ("", "|")),
    fingerprint=(),
    models=("MiniCPM-V 4.5", "MiniCPM-V 4.6"),
    source="https://github.com/vllm-project/vllm (parser `minicpmv`)",
)

_DOTS_CALLS = ("<dots_function_call>", "</dots_function_call>")

DOTS = Family(
    name="dots",
    reasoning=THINK_IN_LINES,
    forms=(
        Form(
            call='<invoke name="{name}">{params}</invoke>',
            parameter='<parameter name="{key}">{value}</parameter>',
            calls=_DOTS_CALLS,
        ),
        json_list(*_DOTS_CALLS, joiner=""),
    ),
    fingerprint=("<dots_function_call>",),
    models=("dots.llm1",),
    source="https://huggingface.co/rednote-hilab/dots.llm1.inst",
)

_IFM_PAIRS = ("<ifm|tool_calls>\n<ifm|tool_call>", "<ifm|tool_call>")

# https://huggingface.co/LLM360/K2-Horizon; the marker of reasoning says with how much effort it is made, and the
# template's switch tool_call_format asks for calls in tags, in tags with types, or in JSON.
K2_HORIZON = Family(
    name="k2_horizon",
    reasoning=("<ifm|think>", "</ifm|think>"),
    also_reasoning=(("<ifm|think_fast>", "</ifm|think_fast>"), ("<ifm|think_faster>", "</ifm|think_faster>")),
    forms=(
        Form(
            call="<ifm|tool_call>{name}{params}</ifm|tool_call>",
            parameter="<ifm|arg_key>{key}</ifm|arg_key><ifm|arg_value>{value}</ifm|arg_value>",
            also_parameter=(
                "<ifm|arg_key>{key}</ifm|arg_key><ifm|arg_type>{type}</ifm|arg_type>"
                "<ifm|arg_value>{value}</ifm|arg_value>",
            ),
            calls=("<ifm|tool_calls>", "</ifm|tool_calls>"),
            optional=True,
        ),
        *(json_each(pair, "</ifm|tool_call>") for pair in _IFM_PAIRS),
        *(json_list(f"{pair}[", "]</ifm|tool_call>") for pair in _IFM_PAIRS),
    ),
    fingerprint=("<ifm|tool_calls>",),
    models=("K2 Horizon",),
    source="https://huggingface.co/LLM360",
)

LING3 = replace(
    GLM45,
    name="ling3",
    aliases=("ling_3",),
    reasoning=THINK,
    stop_markers=("<|role_end|>",),
    thinking_variables=ThinkingVariables(
        switches=(("thinking_option", "on", "off"),), history=(("preserved_thinking", True),)
    ),
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

SPARK25 = replace(
    GLM47,
    name="spark25",
    aliases=(),
    stop_markers=("<end>",),
    stray_markers=("<ret>",),
    fingerprint=("<arg_key>", "<arg_value>", "<|Bot|>"),
    models=("Spark 2.5",),
    source="https://huggingface.co/iflytek",
)

IQUEST_Q1 = replace(
    GLM47,
    name="iquest_q1",
    aliases=(),
    starts_open=True,
    forms=(replace(GLM47.forms[0], calls=("<iquest_tool_call>", "</iquest_tool_call>")),),
    stop_markers=("<|iquest_end|>",),
    fingerprint=("<iquest_tool_call>", "<arg_key>", "<arg_value>"),
    models=("IQuest Q1",),
    source="https://huggingface.co/IQuestLab/IQuest-Q1",
)

MIMO = replace(
    QWEN3_CODER,
    name="mimo",
    aliases=(),
    reasoning=THINK,
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
