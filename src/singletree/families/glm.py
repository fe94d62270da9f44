"""Zhipu AI: GLM."""

from dataclasses import replace

from singletree.conversation import ThinkingVariables
from singletree.families.shared import THINK
from singletree.parsing.family import Family, Form

# https://huggingface.co/zai-org/GLM-4.5/blob/main/chat_template.jinja
GLM45 = Family(
    name="glm45",
    aliases=("glm-4.5", "glm46", "glm"),
    reasoning=("<think>", "</think>\n"),
    forms=(
        Form(
            call="{name}\n{params}",
            parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
            calls=("<tool_call>", "</tool_call>"),
            wrap_each=True,
            joiner="\n",
        ),
    ),
    before_calls="\n",
    stop_markers=("<|observation|>", "<|user|>", "<|endoftext|>"),
    fingerprint=("<arg_key>", "<arg_value>", "</arg_key>\n<arg_value>"),
    models=("GLM 4.5", "GLM 4.6"),
    source="https://huggingface.co/zai-org/GLM-4.5",
)

# https://huggingface.co/zai-org/GLM-4.7/blob/main/chat_template.jinja
GLM47 = replace(
    GLM45,
    name="glm47",
    aliases=("glm-4.7", "glm5"),
    reasoning=THINK,
    forms=(
        replace(
            GLM45.forms[0],
            call="{name}{params}",
            parameter="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
            joiner="",
        ),
    ),
    before_calls="",
    thinking_variables=ThinkingVariables(history=(("clear_thinking", False),)),
    fingerprint=("<arg_key>", "<arg_value>"),
    models=("GLM 4.7", "GLM 5"),
    source="https://huggingface.co/zai-org/GLM-4.7",
)
