"""DeepSeek."""

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
    block: str,
    space: str,
    models: tuple[str, ...],
    source: str,
    language: str = "DSML",
) -> Family:
    """Return a DSML family: tags whose parameters have an attribute for whether they are strings.

    Args:
        name, aliases, models, source: as in ``Family``.
        block: name of the tag around calls.
        space: text after the prefix of each tag name.
        language: prefix of each tag name.
    """
    tag = f"｜{language}｜{space}"
    pair = (f"<{tag}{block}>\n", f"\n</{tag}{block}>")
    close = f"</{tag}parameter>\n"
    parameter = f'<{tag}parameter name="{{key}}" string="{{string}}">{{value}}{close}'
    untyped = (f'<{tag}parameter name="{{key}}">{{value}}{close}',)
    opener, closer = f'<{tag}invoke name="{{name}}"', f"</{tag}invoke>"
    return Family(
        name=name,
        aliases=aliases,
        reasoning=("<think>", "</think>\n\n"),
        forms=(
            Form(
                f"{opener}>\n{{params}}{closer}",
                pair,
                joiner="\n",
                parameter=parameter,
                also_parameter=untyped,
                optional=True,
            ),
            # Without parameters the tag may close itself; sometimes the body is one JSON object.
            Form(f"{opener}{{params}}/>", pair, joiner="\n", parameter=parameter, optional=True),
            Form(f"{opener}>\n{{args}}\n{closer}", pair, joiner="\n", optional=True),
        ),
        before_calls="\n\n",
        stop_markers=_END,
        thinking_variables=ThinkingVariables(history=(("drop_thinking", False),)),
        fingerprint=(f"{tag}{block}",) if space else (f"｜{language}｜", block),
        # The templates of V4.1 hold V4's words as well: there tag names begin with a space.
        not_in_template=("function_calls", f"｜{language}｜ calls") if block == "tool_calls" else (),
        models=models,
        source=source,
    )


DEEPSEEK_V3_2 = dsml(
    "deepseek_v3_2",
    ("deepseek_v32", "deepseekv32"),
    "function_calls",
    "",
    ("DeepSeek V3.2",),
    "https://huggingface.co/deepseek-ai/DeepSeek-V3.2",
)

DEEPSEEK_V4 = dsml(
    "deepseek_v4",
    ("deepseekv4",),
    "tool_calls",
    "",
    ("DeepSeek V4",),
    "https://huggingface.co/deepseek-ai/DeepSeek-V4",
)

DEEPSEEK_V4_1 = dsml(
    "deepseek_v4_1",
    ("deepseek_v41", "deepseekv41"),
    "calls",
    " ",
    ("DeepSeek V4.1",),
    "https://huggingface.co/deepseek-ai/DeepSeek-V4.1",
)
