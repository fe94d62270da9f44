"""OpenAI: gpt-oss, which writes in Harmony."""

from singletree.parsing.family import Family, Form

_TURN = "<|start|>assistant"


def _other_forms() -> tuple[Form, ...]:
    """Return the other forms of a call: the recipient in other places, the content type written or left out."""
    heads = (
        "<|channel|>{any}to=R\n<|constrain|>{any}<|message|>",
        "<|channel|>{any}to=R<|message|>",
        "<|channel|>{any}to=R {any}<|message|>",
        " to=R\n<|channel|>{any}<|constrain|>{any}<|message|>",
        " to=R\n<|channel|>{any}<|message|>",
    )
    recipients = ("functions.{name}", "{name}")
    return tuple(Form(call=head.replace("R", r) + "{args}<|call|>") for r in recipients for head in heads)


# https://cookbook.openai.com/articles/openai-harmony
GPT_OSS = Family(
    name="gpt_oss",
    aliases=("harmony", "openai", "openai_gptoss"),
    message_header=_TURN,
    reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
    text=("<|channel|>final<|message|>", "<|end|>"),
    also_text=("<|channel|>commentary<|message|>", "<|channel|>final <|constrain|>json<|message|>"),
    forms=(
        Form(call="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{args}<|call|>"),
        *_other_forms(),
    ),
    stop_markers=("<|call|>", "<|return|>"),
    stray_markers=(
        "<|channel|>commentary to=assistant",  # a prefix that the model puts before the real channel
        f"{_TURN}<|channel|>commentary to=assistant",
        _TURN,
        "<|start|>",
        "<|message|>",
        "<|end|>",
    ),
    fingerprint=("<|channel|>analysis<|message|>",),
    not_in_template=("<rfl:parameter",),
    models=("gpt-oss 20B", "gpt-oss 120B"),
    source="https://cookbook.openai.com/articles/openai-harmony",
)
