"""DeepSeek."""

from dataclasses import replace

from singletree.conversation import ThinkingVariables
from singletree.families.shared import THINK, THINK_IN_LINES
from singletree.parsing.family import Family, Form

_END = ("<｜end▁of▁sentence｜>",)
_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

DEEPSEEK_R1 = Family(
    name="deepseek_r1",
    aliases=("deepseek-r1",),
    reasoning=THINK_IN_LINES,
    starts_open=True,
    stop_markers=_END,
    models=("DeepSeek R1", "R1 distillations"),
    source="https://huggingface.co/deepseek-ai/DeepSeek-R1",
)

DEEPSEEK_V3_1 = Family(
    name="deepseek_v3_1",
    aliases=("deepseek_v31", "deepseekv31"),
    reasoning=THINK,
    forms=(
        Form(
            call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{args}<｜tool▁call▁end｜>",
            calls=_CALLS,
            optional=True,
        ),
    ),
    stop_markers=_END,
    fingerprint=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    not_in_template=("```json", "｜DSML｜"),
    models=("DeepSeek V3.1",),
    source="https://huggingface.co/deepseek-ai/DeepSeek-V3.1",
)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    aliases=("deepseek-v3", "deepseekv3"),
    reasoning=THINK_IN_LINES,
    forms=tuple(
        Form(
            call=f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{name}}\n{arguments}<｜tool▁call▁end｜>",
            calls=_CALLS,
            joiner="\n",
            optional=True,
        )
        for arguments in ("```json\n{args}\n```", "{args}")  # The model sometimes leaves out the fence.
    ),
    stop_markers=_END,
    fingerprint=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json"),
    models=("DeepSeek V3", "DeepSeek R1-0528"),
    source="https://huggingface.co/deepseek-ai/DeepSeek-R1-0528",
)


def dsml(
    name: str,
    aliases: tuple[str, ...],
    model: str,
    block: str,
    *,
    also_blocks: tuple[str, ...] = (),
    language: str = "DSML",
) -> Family:
    """Return a DSML family: tags whose parameters have an attribute for whether they are strings.

    Args:
        name, aliases: as in ``Family``.
        model: the vendor's name of the model.
        block: name of the tag around calls. Where it begins with a space, each tag name does.
        also_blocks: other names that the model gives it now and then.
        language: prefix of each tag name.
    """
    space = " " * block.startswith(" ")
    tag = f"｜{language}｜{space}"
    close = f"</{tag}parameter>\n"
    parameter = f'<{tag}parameter name="{{key}}" string="{{string}}">{{value}}{close}'
    untyped = (f'<{tag}parameter name="{{key}}">{{value}}{close}',)
    opener, closer = f'<{tag}invoke name="{{name}}"', f"</{tag}invoke>"
    own, *others = (
        (f"<｜{language}｜{each}>\n", f"\n</｜{language}｜{each}>") for each in (block, *also_blocks)
    )
    forms: tuple[Form, ...] = (
        Form(
            f"{opener}>\n{{params}}{closer}",
            own,
            parameter=parameter,
            also_parameter=untyped,
            next_closes=True,
        ),
        # Without parameters the tag may close itself; sometimes the body is one JSON object.
        Form(f"{opener}{{params}}/>", own, parameter=parameter),
        Form(f"{opener}>\n{{args}}\n{closer}", own),
    )
    forms += tuple(replace(form, calls=pair, also_close=(own[1],)) for pair in others for form in forms)
    return Family(
        name=name,
        aliases=aliases,
        reasoning=("<think>", "</think>\n\n"),
        forms=tuple(replace(form, joiner="\n", optional=True) for form in forms),
        before_calls="\n\n",
        stop_markers=_END,
        thinking_variables=ThinkingVariables(history=(("drop_thinking", False),)),
        fingerprint=(f"｜{language}｜{block}",) if space else (f"｜{language}｜", block),
        # The templates of V4.1 hold V4's words as well: there tag names begin with a space.
        not_in_template=("function_calls", f"｜{language}｜ calls") if block == "tool_calls" else (),
        models=(model,),
        source="https://huggingface.co/deepseek-ai/" + model.replace(" ", "-"),
    )


DEEPSEEK_V3_2 = dsml("deepseek_v3_2", ("deepseek_v32", "deepseekv32"), "DeepSeek V3.2", "function_calls")

DEEPSEEK_V4 = dsml(
    "deepseek_v4",
    ("deepseekv4",),
    "DeepSeek V4",
    "tool_calls",
    also_blocks=("toolcalls", "tool"),  # vLLM's parser has them as seen in production
)

DEEPSEEK_V4_1 = dsml("deepseek_v4_1", ("deepseek_v41", "deepseekv41"), "DeepSeek V4.1", " calls")
