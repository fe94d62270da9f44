"""Vendors with formats of several kinds."""

from dataclasses import replace

from singletree.conversation import ThinkingVariables
from singletree.families.shared import HERMES, JSON_CALL, THINK, THINK_IN_LINES, json_each, json_list
from singletree.parsing.family import Family, Form

# Alibaba: Qwen

QWEN3 = replace(
    HERMES,
    name="qwen3",
    aliases=("qwen3-thinking",),
    reasoning=THINK_IN_LINES,
    fingerprint=("<tool_call>", "</tool_call>", "arguments", "</think>"),
    models=("Qwen3", "Qwen3-Thinking-2507"),
    source="https://huggingface.co/Qwen/Qwen3-8B",
)

# The template shows the call with doubled braces. The models seldom write <tool_call>: they write the JSON object
# alone, in a code block, or between the tags around the list of tools (measured with the 1.5B model).
QWEN25_CODER = replace(
    HERMES,
    name="qwen25_coder",
    aliases=(),
    forms=(
        *HERMES.forms,
        json_each("<tools>\n", "\n</tools>", joiner="\n"),
        *(
            Form(call=JSON_CALL, calls=(fence, "\n```"), wrap_each=True, joiner="\n", unmarked=True)
            for fence in ("```json\n", "```\n")
        ),
        Form(call=JSON_CALL, joiner="\n", unmarked=True),
    ),
    fingerprint=("<tool_call>", "</tool_call>", "answer with the call alone"),  # as singletree corrects it
    also_fingerprint=("<tool_call>", "</tool_call>", '{{\\"name\\": <function-name>'),
    models=("Qwen2.5-Coder",),
    source="https://huggingface.co/Qwen/Qwen2.5-Coder-7B-Instruct",
)

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
            pair_ends=True,  # as in Qwen's own parser
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

# NVIDIA: Nemotron

NEMOTRON_DECI = Family(
    name="nemotron_deci",
    reasoning=THINK_IN_LINES,
    forms=(json_list("<TOOLCALL>[", "]</TOOLCALL>"),),
    stop_markers=("<|eot_id|>",),
    fingerprint=("<TOOLCALL>",),
    models=("Llama-Nemotron Super and Ultra v1", "Nemotron Nano v1"),
    source="https://huggingface.co/nvidia/Llama-3_3-Nemotron-Super-49B-v1",
)

NEMOTRON_NANO = replace(
    NEMOTRON_DECI,
    name="nemotron_nano",
    reasoning=("<think>\n", "\n</think>\n"),
    starts_open=True,
    stop_markers=("<SPECIAL_12>",),
    fingerprint=("<TOOLCALL>", "<SPECIAL_11>"),
    models=("Nemotron Nano v2",),
    source="https://huggingface.co/nvidia/NVIDIA-Nemotron-Nano-9B-v2",
)

NEMOTRON_V3 = replace(
    QWEN3_CODER,
    name="nemotron_v3",
    aliases=("nemotron3", "nemotron_3"),
    tool_aliases=("nemotron_nano",),
    starts_open=True,
    # Where other templates take a word for the effort, this one has a flag for each weaker effort.
    thinking_variables=ThinkingVariables(
        history=(("truncate_history_thinking", False),),
        effort_flags=(("minimal", "low_effort"), ("low", "low_effort"), ("medium", "medium_effort")),
    ),
    fingerprint=("<tool_call>", "<function=", "<parameter=", "truncate_history_thinking"),
    models=("Nemotron 3 Nano", "Nemotron 3 Super", "Nemotron 3 Ultra"),
    source="https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
)

# Moonshot AI: Kimi

# K2 sometimes writes the section's name in the singular.
_K2_SINGULAR = Form(
    call="<|tool_call_begin|>{id}<|tool_call_argument_begin|>{args}<|tool_call_end|>",
    calls=("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
    id=r"(?:functions\.)?(?P<name>[^\s:]+?)(?::\d+)?",
)

KIMI_K2 = Family(
    name="kimi_k2",
    aliases=("kimi_k25", "kimi_k2.5", "kimi-k2"),
    reasoning=THINK,
    forms=(
        replace(
            _K2_SINGULAR,
            calls=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            id_format="functions.{name}:{index}",
            optional=True,
        ),
        _K2_SINGULAR,
    ),
    also_ends_reasoning=("<|tool_calls_section_begin|>",),  # K2 calls without closing its reasoning
    stop_markers=("<|im_end|>",),
    fingerprint=("<|tool_calls_section_begin|>",),
    models=("Kimi K2", "Kimi K2 Thinking", "Kimi K2.5"),
    source="https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md",
)

KIMI_K3 = Family(
    name="kimi_k3",
    aliases=("kimi-k3",),
    reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    text=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    also_ends_reasoning=("<|close|>response<|sep|>",),
    forms=(
        Form(
            call='<|open|>call tool="{name}" index="{index}"<|sep|>{params}<|close|>call<|sep|>',
            parameter='<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>',
            calls=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            escapes=(('"', "&quot;"), ("&", "&amp;")),
            optional=True,
        ),
    ),
    stop_markers=("<|end_of_msg|>",),
    stray_markers=("<|close|>message<|sep|>",),
    thinking_variables=ThinkingVariables(efforts=("thinking_effort",)),
    fingerprint=("<|open|>", "<|close|>", "<|sep|>"),
    models=("Kimi K3",),
    source="https://huggingface.co/moonshotai/Kimi-K3",
)

KIMI = Family(
    name="kimi",
    reasoning=("◁think▷", "◁/think▷"),
    stop_markers=("<|im_end|>",),
    fingerprint=("◁think▷",),
    models=("Kimi-VL Thinking",),
    source="https://huggingface.co/moonshotai/Kimi-VL-A3B-Thinking",
)

# MiniMax

MINIMAX_M2 = Family(
    name="minimax_m2",
    aliases=("minimax-m2", "minimax"),
    reasoning=THINK_IN_LINES,
    forms=tuple(
        Form(
            call=f"<invoke name={quote}{{name}}{quote}>\n{{params}}</invoke>",
            parameter='<parameter name="{key}">{value}</parameter>\n',
            also_parameter=tuple(f"<parameter name={q}{{key}}{q}>{{value}}</parameter>\n" for q in ("'", "")),
            calls=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
            joiner="\n",
            next_closes=True,
            optional=True,
        )
        for quote in ('"', "'", "")  # as MiniMax's own parser reads names (its guide to tool calls)
    ),
    before_calls="\n",
    stop_markers=("[e~[",),
    fingerprint=("<minimax:tool_call>", "<invoke name="),
    models=("MiniMax M2",),
    source="https://huggingface.co/MiniMaxAI/MiniMax-M2",
)

# The parsers with this name in other servers leave reasoning in the text after a <think>; here it is reasoning (H12).
MINIMAX_APPEND_THINK = replace(
    MINIMAX_M2,
    name="minimax_append_think",
    aliases=("minimax-append-think", "minimax_m2_append_think"),
    starts_open=True,
    fingerprint=(),
)

_NS = "]<]minimax[>["

MINIMAX_M3 = Family(
    name="minimax_m3",
    aliases=("minimax-m3", "minimax_m3_nom", "minimax-m3-nom"),
    reasoning=("<mm:think>", "</mm:think>"),
    forms=(
        Form(
            call=f'{_NS}<invoke name="{{name}}">{{params}}{_NS}</invoke>\n',
            parameter=f"{_NS}<{{key}}>{{value}}{_NS}</{{key}}>",
            calls=(f"{_NS}<tool_call>\n", f"{_NS}</tool_call>"),
            nested=True,
            optional=True,
        ),
    ),
    before_calls="\n",
    stop_markers=("[e~[",),
    fingerprint=("]<]minimax[>[", "<tool_call>", "</tool_call>", "<mm:think>"),
    models=("MiniMax M3",),
    source="https://huggingface.co/MiniMaxAI/MiniMax-M3",
)

MINIMAX_M1 = Family(
    name="minimax_m1",
    reasoning=THINK_IN_LINES,
    forms=(json_list("<tool_calls>\n", "\n</tool_calls>", joiner="\n"),),
    stop_markers=("<end_of_sentence>",),
    fingerprint=("<tool_calls>", "</tool_calls>", "<beginning_of_sentence>ai"),
    models=("MiniMax M1",),
    source="https://huggingface.co/MiniMaxAI/MiniMax-M1-80k",
)

# Tencent: Hunyuan

HUNYUAN_A13B = Family(
    name="hunyuan_a13b",
    reasoning=("<think>\n", "\n</think>\n"),
    forms=(json_list("<tool_calls>[", "]</tool_calls>"),),
    stray_markers=("<answer>\n", "\n</answer>"),
    fingerprint=("<tool_calls>", "</tool_calls>", "<|extra_0|>"),
    models=("Hunyuan A13B",),
    source="https://huggingface.co/tencent/Hunyuan-A13B-Instruct",
)


_OPEN = ":opensource"
"""Suffix of the markers of the open checkpoints; other checkpoints have another suffix, or none."""


def _hy(suffix: str, separator: str, line: str) -> Form:
    key, value = (
        f"<arg_key{suffix}>{{key}}</arg_key{suffix}>",
        f"<arg_value{suffix}>{{value}}</arg_value{suffix}>",
    )
    return Form(
        call=f"<tool_call{suffix}>{{name}}{separator}{line}{{params}}</tool_call{suffix}>",
        parameter=f"{key}{line}{value}{line}",
        calls=(f"<tool_calls{suffix}>\n", f"\n</tool_calls{suffix}>"),
        joiner="\n",
        optional=True,
    )


HY_V3 = Family(
    name="hy_v3",
    aliases=("hunyuan", "hy3"),
    reasoning=THINK,
    also_reasoning=((f"<think{_OPEN}>", f"</think{_OPEN}>"),),
    forms=(_hy("", "<tool_sep>", "\n"), _hy(_OPEN, f"<tool_sep{_OPEN}>", "\n")),
    before_calls="\n",
    stop_markers=("<｜hy_eos｜>", f"<｜hy_eos{_OPEN}｜>"),
    thinking_variables=ThinkingVariables(history=(("preserved_thinking", True),)),
    fingerprint=("<tool_calls", "<tool_sep", "<arg_key"),
    variant=(_OPEN, r"HYTK = '(:[^'\s<>]+)'"),
    models=("Hunyuan 3",),
    source="https://huggingface.co/tencent/Hy3",
)

HY_V4 = replace(
    HY_V3,
    name="hy_v4",
    aliases=("hy4",),
    forms=(_hy("", "", ""), _hy(_OPEN, "", "")),
    fingerprint=("<tool_calls", "<arg_key"),
    not_in_template=("<tool_sep",),
    models=("Hunyuan 4",),
    source="https://huggingface.co/tencent",
)

# Cohere: Command

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
            id_format="{index}",
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
