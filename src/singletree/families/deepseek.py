"""DeepSeek."""

from singletree.parsing.family import Family, Form

_THINK = ("<think>", "</think>")
_END = ("<｜end▁of▁sentence｜>",)

# https://huggingface.co/deepseek-ai/DeepSeek-R1
DEEPSEEK_R1 = Family(
    name="deepseek_r1",
    aliases=("deepseek-r1",),
    reasoning=("<think>\n", "\n</think>\n\n"),
    starts_open=True,
    ends=_END,
    models=("DeepSeek R1", "R1 distillations"),
    source="https://huggingface.co/deepseek-ai/DeepSeek-R1",
)

# https://huggingface.co/deepseek-ai/DeepSeek-V3.1/blob/main/assets/chat_template.jinja
DEEPSEEK_V3_1 = Family(
    name="deepseek_v3_1",
    aliases=("deepseek_v31", "deepseekv31"),
    reasoning=_THINK,
    forms=(
        Form(
            call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{args}<｜tool▁call▁end｜>",
            calls=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            optional=True,
        ),
    ),
    ends=_END,
    fingerprint=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    not_in_template=("```json", "｜DSML｜"),
    models=("DeepSeek V3.1",),
    source="https://huggingface.co/deepseek-ai/DeepSeek-V3.1",
)

# https://huggingface.co/deepseek-ai/DeepSeek-R1-0528/blob/main/tokenizer_config.json
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    aliases=("deepseek-v3", "deepseekv3"),
    reasoning=("<think>\n", "\n</think>\n\n"),
    forms=(
        Form(
            call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{args}\n```<｜tool▁call▁end｜>",
            calls=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            joiner="\n",
            optional=True,
        ),
        # The fence is left out now and then (FORMATS.md, deepseek_v3).
        Form(
            call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{args}<｜tool▁call▁end｜>",
            calls=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            joiner="\n",
            optional=True,
        ),
    ),
    ends=_END,
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
    """DSML: tags whose parameters say on the wire whether they are strings."""
    tag = f"｜{language}｜{space}"
    pair = (f"<{tag}{block}>\n", f"\n</{tag}{block}>")
    parameter = f'<{tag}parameter name="{{key}}" string="{{string}}">{{value}}</{tag}parameter>\n'
    opener, closer = f'<{tag}invoke name="{{name}}"', f"</{tag}invoke>"
    return Family(
        name=name,
        aliases=aliases,
        reasoning=("<think>", "</think>\n\n"),
        forms=(
            Form(f"{opener}>\n{{params}}{closer}", pair, joiner="\n", parameter=parameter, optional=True),
            # Without parameters the tag may close itself; now and then the body is one JSON object.
            Form(f"{opener}{{params}}/>", pair, joiner="\n", parameter=parameter, optional=True),
            Form(f"{opener}>\n{{args}}\n{closer}", pair, joiner="\n", optional=True),
        ),
        before_calls="\n\n",
        ends=_END,
        fingerprint=(f"{tag}{block}",) if space else (f"｜{language}｜", block),
        not_in_template=("function_calls",) if block == "tool_calls" else (),
        models=models,
        source=source,
    )


# https://huggingface.co/deepseek-ai/DeepSeek-V3.2/tree/main/encoding
DEEPSEEK_V3_2 = dsml(
    "deepseek_v3_2",
    ("deepseek_v32", "deepseekv32"),
    "function_calls",
    "",
    ("DeepSeek V3.2",),
    "https://huggingface.co/deepseek-ai/DeepSeek-V3.2",
)

# https://huggingface.co/deepseek-ai/DeepSeek-V4/tree/main/encoding
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
