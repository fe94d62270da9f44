"""Meta: Llama, and other formats with calls in Python syntax."""

from dataclasses import replace

from singletree.parsing.family import Family, Form, Literals

PYTHON = Literals()


def python_list(opener: str, closer: str, *, joiner: str = ", ", literals: Literals = PYTHON) -> Form:
    """Return the form of calls in Python syntax with ``joiner`` between them, all inside one pair of texts."""
    return Form(call="{name}({literals})", calls=(opener, closer), joiner=joiner, literals=literals)


_CALL = '{"name": "{name}", "parameters": {args}}'
_BEHIND = r"[\w)*](?:[.:!?…]+ |[。：！？])"  # Llama ends a sentence and makes a call in the same line

# https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/#json-based-tool-calling
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

# https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_2/#zero-shot-function-calling
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

# https://www.llama.com/docs/model-cards-and-prompt-formats/llama4/
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
