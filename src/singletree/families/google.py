"""Google: Gemma."""

from singletree.parsing.family import Family, Form, Literals

_GEMMA = Literals(
    assign=":",
    separator=",",
    quote='<|"|>',
    verbatim=True,
    bare_keys=True,
    bare_words=True,
    words=("true", "false", "null"),
)


def _calls(opener: str, closer: str, spelling: Literals) -> tuple[Form, ...]:
    """The call as it is meant, and what the model makes of it now and then."""
    pictures = ("call:{name}{{literals}}", ":{name}{{literals}}", "call:{name}({literals})")
    return tuple(Form(call=f"{opener}{picture}{closer}", literals=spelling) for picture in pictures)


# https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4
GEMMA4 = Family(
    name="gemma4",
    aliases=("gemma-4",),
    reasoning=("<|channel>thought\n", "<channel|>"),
    also_reasoning=(("<|channel>", "<channel|>"),),  # the label is left out now and then
    forms=_calls("<|tool_call>", "<tool_call|>", _GEMMA),
    ends=("<turn|>", "<|tool_response>", "<|channel>thought<channel|>"),
    fingerprint=("<|tool_call>call:",),
    models=("Gemma 4",),
    source="https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4",
)

# https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices
FUNCTIONGEMMA = Family(
    name="functiongemma",
    forms=_calls(
        "<start_function_call>",
        "<end_function_call>",
        Literals(
            assign=":",
            separator=",",
            quote="<escape>",
            verbatim=True,
            bare_keys=True,
            bare_words=True,
            words=("true", "false", "null"),
        ),
    ),
    ends=("<end_of_turn>", "<start_function_response>"),
    fingerprint=("<start_function_call>",),
    models=("FunctionGemma",),
    source="https://ai.google.dev/gemma/docs/functiongemma",
)
