"""StepFun: Step."""

from dataclasses import replace

from singletree.families.qwen import QWEN3_CODER
from singletree.parsing.family import Family, Form

# https://huggingface.co/stepfun-ai/step3
STEP3 = Family(
    name="step3",
    reasoning=("<think>\n", "\n</think>\n"),
    forms=(
        Form(
            call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{params}</steptml:invoke>'
            "<｜tool_call_end｜>",
            parameter='<steptml:parameter name="{key}">{value}</steptml:parameter>',
            calls=("<｜tool_calls_begin｜>\n", "\n<｜tool_calls_end｜>"),
            joiner="\n",
            optional=True,
        ),
    ),
    fingerprint=("<｜tool_calls_begin｜>", "steptml"),
    models=("Step 3",),
    source="https://huggingface.co/stepfun-ai/step3",
)

# https://huggingface.co/stepfun-ai/Step-3.5-Flash/blob/main/chat_template.jinja
STEP3P5 = replace(
    QWEN3_CODER,
    name="step3p5",
    aliases=("step3_5", "step5"),
    reasoning=("<think>\n", "\n</think>\n"),
    starts_open=True,
    fingerprint=("<tool_call>", "<function=", "<parameter=", "<im_patch>"),
    models=("Step 3.5", "Step 5"),
    source="https://huggingface.co/stepfun-ai/Step-3.5-Flash",
)
