"""Vendors whose turn is several messages, each with a header that names its kind."""

from singletree.parsing.family import Family, Form

_TURN = "<|start|>assistant"


def _other_forms() -> tuple[Form, ...]:
    """Return the other forms of a call: the recipient in other places, the content type written or left out."""
    heads = (
        "<|channel|>{any}to=R\n<|constrain|>{any}<|message|>",
        "<|channel|>{any}to=R<|message|>",
        "<|channel|>{any}to=R {any}<|message|>",
        "<|channel|>{any}to=R<|channel|>{any}<|message|>",
        " to=R\n<|channel|>{any}<|constrain|>{any}<|message|>",
        " to=R\n<|channel|>{any}<|message|>",
    )
    recipients = ("functions.{name}", "{name}")
    return tuple(Form(call=head.replace("R", r) + "{args}<|call|>") for r in recipients for head in heads)


GPT_OSS = Family(
    name="gpt_oss",
    aliases=("harmony", "openai", "openai_gptoss"),
    message_header=_TURN,
    reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
    text=("<|channel|>final<|message|>", "<|end|>"),
    also_text=tuple(
        f"<|channel|>{channel}{type_}<|message|>"
        for channel in ("commentary", "final")
        for type_ in ("", " <|constrain|>json", "<|constrain|>json", " json")
    ),
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

_ATEM_CALL = (
    ' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n{params}</atem:invoke>'
    "\n</atem:function_calls>"
)

MUSE_GLIMMER = Family(
    name="muse_glimmer",
    aliases=("muse", "musespark1x"),
    message_header="<|start|>assistant",
    reasoning=(" to=self<|message|>", "<|eom|>"),
    text=(" to=user<|message|>", "<|eom|>"),
    also_text=(" to=commentary<|message|>", " to=developer<|message|>"),
    forms=(
        Form(
            call=_ATEM_CALL,
            parameter='<atem:parameter name="{key}">{value}</atem:parameter>\n',
            calls=("", "<|eom|>"),
            wrap_each=True,
        ),
    ),
    stop_markers=("<|eot|>",),
    stray_markers=("<|start|>assistant", "<|eom|>"),
    fingerprint=("atem:function_calls",),
    models=("Muse Glimmer", "Muse Spark"),
    source="https://huggingface.co/meta-models/muse-glimmer",
)

# https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/parser/beam.py
BEAM = Family(
    name="beam",
    message_header="<|start|>assistant",
    reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
    text=("<|channel|>final<|message|>", "<|end|>"),
    forms=(
        Form(
            call=" to={name}<|channel|>analysis <|constrain|>xml<|message|>{params}",
            parameter='<rfl:parameter name="{key}">\n{value}\n</rfl:parameter>',
            calls=("", "<|end|>"),
            also_close=("<|call|>",),
            wrap_each=True,
        ),
    ),
    stop_markers=("<|call|>", "<|return|>"),
    stray_markers=("<|start|>assistant", "<|end|>"),
    fingerprint=("<|channel|>", "<rfl:parameter"),
    models=("Beam",),
    source="https://github.com/sgl-project/sglang (parser `beam`)",
)

INKLING = Family(
    name="inkling",
    message_header="<|message_model|>",
    reasoning=("<|content_thinking|>", "<|end_message|>"),
    text=("<|content_text|>", "<|end_message|>"),
    also_text=("<|content_tool_error|>",),
    forms=tuple(
        Form(
            call='{"name":"{name}","args":{args}}',
            calls=(f"{name}<|content_invoke_tool_json|>", "<|end_message|>"),
            wrap_each=True,
        )
        for name in ("{name}", "")
    ),
    stop_markers=("<|content_model_end_sampling|>",),
    stray_markers=("<|message_model|>", "<|end_message|>"),
    fingerprint=("<|content_invoke_tool_json|>",),
    models=("Inkling",),
    source="https://huggingface.co/thinkingmachines",
)

FUNCTIONARY_V3_2 = Family(
    name="functionary_v3_2",
    aliases=("functionary",),
    message_header=">>>",
    text=("all\n", ""),
    forms=(Form(call="{name}\n{args}"),),
    stop_markers=("<|eot_id|>",),
    fingerprint=(">>>all",),
    models=("Functionary 3.2",),
    source="https://huggingface.co/meetkai/functionary-medium-v3.2",
)

SOLAR_OPEN = Family(
    name="solar_open",
    aliases=("solar",),
    message_header="<|begin|>assistant",
    reasoning=("<|think|>", "<|end|>"),
    text=("<|content|>", "<|end|>"),
    forms=(
        Form(
            call="<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>{args}<|tool_call:end|>",
            calls=("<|tool_calls|>", "<|calls|>"),
            optional=True,
        ),
    ),
    stop_markers=("<|calls|>", "<|flush|>"),
    stray_markers=("<|begin|>assistant", "<|end|>"),
    fingerprint=("<|tool_call:begin|>",),
    models=("Solar Open 100B",),
    source="https://huggingface.co/upstage/Solar-Open-100B",
)
