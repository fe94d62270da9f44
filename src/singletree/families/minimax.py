"""MiniMax."""

from dataclasses import replace

from singletree.families.shared import THINK_IN_LINES, json_list
from singletree.parsing.family import Family, Form

# https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/docs/tool_calling_guide.md
MINIMAX_M2 = Family(
    name="minimax_m2",
    aliases=("minimax-m2", "minimax"),
    reasoning=THINK_IN_LINES,
    forms=(
        Form(
            call='<invoke name="{name}">\n{params}</invoke>',
            parameter='<parameter name="{key}">{value}</parameter>\n',
            calls=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
            joiner="\n",
            optional=True,
        ),
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

# https://huggingface.co/MiniMaxAI/MiniMax-M3/blob/main/chat_template.jinja
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

# https://huggingface.co/MiniMaxAI/MiniMax-M1-80k/blob/main/docs/function_call_guide.md
MINIMAX_M1 = Family(
    name="minimax_m1",
    reasoning=THINK_IN_LINES,
    forms=(json_list("<tool_calls>\n", "\n</tool_calls>", joiner="\n"),),
    stop_markers=("<end_of_sentence>",),
    fingerprint=("<tool_calls>", "</tool_calls>", "<beginning_of_sentence>ai"),
    models=("MiniMax M1",),
    source="https://huggingface.co/MiniMaxAI/MiniMax-M1-80k",
)
