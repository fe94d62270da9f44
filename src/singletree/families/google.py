"""Google: Gemma."""

from dataclasses import replace

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


def _calls(opener: str, closer: str, notation: Literals) -> tuple[Form, ...]:
    """Return the form of calls, and the malformed ones that the model writes now and then."""
    pictures = ("call:{name}{{literals}}", ":{name}{{literals}}", "call:{name}({literals})")
    return tuple(Form(call=f"{opener}{picture}{closer}", literals=notation) for picture in pictures)


# https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4
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

# https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices
FUNCTIONGEMMA = Family(
    name="functiongemma",
    forms=_calls(
        "<start_function_call>",
        "<end_function_call>",
        replace(_GEMMA, quote="<escape>"),
    ),
    stop_markers=("<end_of_turn>", "<start_function_response>"),
    fingerprint=("<start_function_call>",),
    models=("FunctionGemma",),
    source="https://ai.google.dev/gemma/docs/functiongemma",
)
