"""Vendors whose arguments are literals of a programming language."""

from dataclasses import replace

from singletree.families.shared import THINK, json_each, json_list
from singletree.parsing.family import Family, Form, Literals

PYTHON = Literals()


def python_list(opener: str, closer: str, *, joiner: str = ", ", literals: Literals = PYTHON) -> Form:
    """Return the form of calls in Python syntax with ``joiner`` between them, all inside one pair of texts."""
    return Form(call="{name}({literals})", calls=(opener, closer), joiner=joiner, literals=literals)


_CALL = '{"name": "{name}", "parameters": {args}}'
_BEHIND = r"[\w)*](?:[.:!?…]+ |[。：！？])"  # Llama ends a sentence and makes a call in the same line

LLAMA3_JSON = Family(
    name="llama3_json",
    aliases=("llama3", "llama4_json"),
    forms=(
        Form(call=_CALL, unmarked=True, behind=_BEHIND, joiner="; "),
        Form(
            call='{"type": "function", "name": "{name}", "parameters": {args}}',
            unmarked=True,
            behind=_BEHIND,
            joiner="; ",
        ),
        Form(call=_CALL, calls=("<|python_tag|>", ""), joiner="; "),
        Form(call=_CALL, calls=("<|python_start|><|python_end|>", ""), joiner="; "),  # Llama 4's own template
        Form(call="<|python_tag|>{name}.call({literals})", literals=PYTHON),  # the built-in tools
    ),
    before_calls="\n",
    stop_markers=("<|eom_id|>", "<|eot_id|>"),
    fingerprint=("dictionary of argument name and its value",),
    models=("Llama 3.1", "Llama 3.2", "Llama 3.3"),
    source="https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1",
)

PYTHONIC = Family(
    name="pythonic",
    forms=(
        replace(python_list("[", "]"), unmarked=True),
        python_list("<|python_start|>[", "]<|python_end|>"),
    ),
    before_calls="\n",
    stop_markers=("<|eom_id|>", "<|eot_id|>"),
    fingerprint=("[func_name1(params_name1=params_value1",),
    models=("Llama 3.2 pythonic", "ToolACE", "Gemma 3 pythonic"),
    source="https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_2",
)

LLAMA4_PYTHONIC = replace(
    PYTHONIC,
    name="llama4_pythonic",
    forms=(PYTHONIC.forms[1], PYTHONIC.forms[0]),
    before_calls="",
    stop_markers=("<|eom|>", "<|eot|>"),
    fingerprint=("<|python_start|>",),
    also_fingerprint=("[func_name1(param1=value1", "<|header_start|>"),
    models=("Llama 4",),
    source="https://www.llama.com/docs/model-cards-and-prompt-formats/llama4",
)

_NESTED_QUOTES = replace(PYTHON, nested_quotes=True)  # as in command="grep "x" file"

OLMO3 = Family(
    name="olmo3",
    reasoning=THINK,
    forms=(python_list("<function_calls>\n", "\n</function_calls>", joiner="\n"),),
    stop_markers=("<|im_end|>",),
    fingerprint=("<function_calls>",),
    not_in_template=("｜DSML｜", "atem:"),
    models=("Olmo 3",),
    source="https://huggingface.co/allenai/Olmo-3-7B-Instruct",
)

LFM2 = Family(
    name="lfm2",
    aliases=("lfm2_5",),
    reasoning=THINK,
    forms=(
        python_list("<|tool_call_start|>[", "]<|tool_call_end|>", literals=_NESTED_QUOTES),
        json_list("<|tool_call_start|>[", "]<|tool_call_end|>"),
        json_each("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    stop_markers=("<|im_end|>",),
    fingerprint=("<|tool_call_start|>",),
    also_fingerprint=("<|tool_list_start|>",),
    models=("LFM2", "LFM2.5"),
    source="https://huggingface.co/LiquidAI/LFM2-8B-A1B",
)

_GEMMA = Literals(
    assign=":",
    separator=",",
    quote='<|"|>',
    verbatim=True,
    bare_keys=True,
    bare_words=True,
    words=("true", "false", "null"),
)


def _calls(opener: str, closer: str, notation: Literals) -> tuple[Form, ...]:
    """Return the form of calls, and the malformed ones that the model writes now and then."""
    calls = ("call:{name}{{literals}}", ":{name}{{literals}}", "call:{name}({literals})")
    return tuple(Form(call=f"{opener}{call}{closer}", literals=notation) for call in calls)


GEMMA4 = Family(
    name="gemma4",
    aliases=("gemma-4",),
    reasoning=("<|channel>thought\n", "<channel|>"),
    also_reasoning=(("<|channel>", "<channel|>"),),  # the label is left out now and then
    forms=_calls("<|tool_call>", "<tool_call|>", _GEMMA),
    stop_markers=("<turn|>", "<|tool_response>"),  # the result of its call has to follow the second
    stray_markers=("<|channel>thought<channel|>",),
    fingerprint=("<|tool_call>call:",),
    models=("Gemma 4",),
    source="https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4",
)

FUNCTIONGEMMA = Family(
    name="functiongemma",
    forms=_calls("<start_function_call>", "<end_function_call>", replace(_GEMMA, quote="<escape>")),
    stop_markers=("<end_of_turn>", "<start_function_response>"),
    fingerprint=("<start_function_call>",),
    models=("FunctionGemma",),
    source="https://ai.google.dev/gemma/docs/functiongemma",
)
