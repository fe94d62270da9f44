"""A turn comes back behind what it was asked for with, also where the template prints something else there later."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from singletree.prompts.template.chat_template import ChatTemplate
from singletree.testing.scripts import Script

from .carrying import ONE, THOUGHT, Client, last_prompt, server, without_words
from .serving import TOKENIZER
from .turn_stores import memory_in

_MODEL_OUTPUT = """\
{{- m.content }}{% for c in m.tool_calls %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>"""

NO_HEADER = f"""\
{{%- for m in messages %}}
{{%- if m.role == 'tool' %}}<result>{{{{ m.content }}}}</result>
{{%- elif m.role == 'assistant' %}}<|im_start|>{_MODEL_OUTPUT}
{{%- else %}}<user>{{{{ m.content }}}}{{% endif %}}{{% endfor %}}
{{%- if add_generation_prompt and messages[-1].role != 'tool' %}}<|im_start|>{{% endif %}}"""
"""In the manner of axolotl's DeepSeek V3: behind a result nothing opens the turn that is asked for, and the header
stands before it when it is over.
"""

ASKED_ONLY = f"""\
{{%- for m in messages %}}
{{%- if m.role == 'tool' %}}[{{{{ m.content }}}}]
{{%- elif m.role == 'assistant' %}}
{{{{- '<|im_start|>' if loop.previtem is undefined or loop.previtem.role != 'tool' }}}}{_MODEL_OUTPUT}
{{%- else %}}<user>{{{{ m.content }}}}{{% endif %}}{{% endfor %}}
{{%- if add_generation_prompt %}}<|im_start|>{{% endif %}}"""
"""In the manner of Apertus: the other way round."""

COUNTED = f"""\
{{%- for m in messages %}}
{{%- if m.role == 'tool' %}}<result>{{{{ m.content }}}}</result>{{{{ '</results>' if loop.index0 == 2 }}}}
{{%- elif m.role == 'assistant' %}}
{{{{- '<|im_start|>' if loop.previtem is undefined or loop.previtem.role != 'tool' }}}}{_MODEL_OUTPUT}
{{%- else %}}<user>{{{{ m.content }}}}{{% endif %}}{{% endfor %}}
{{%- if add_generation_prompt and messages[-1].role != 'tool' %}}<|im_start|>{{% endif %}}"""
"""In the manner of DeepSeek V3.2: what ends the results is not the same everywhere."""

TEMPLATES = {"no header": NO_HEADER, "asked only": ASKED_ONLY, "counted": COUNTED}
SCRIPTS: dict[str, str | Script] = {"a": ONE}
"""Said again and again."""

TURNS = 4


def settings(name: str) -> dict[str, Any]:
    template = ChatTemplate(TEMPLATES[name])
    return {"template": template, "layout": template.layout(TOKENIZER)}


def extends(prompts: list[list[int]]) -> bool:
    """Whether each prompt goes on from the one before and what was generated behind it."""
    generated = TOKENIZER.encode(ONE)
    whole = ([*before, *generated] for before in prompts)
    return all(after[: len(one)] == one for one, after in zip(whole, prompts[1:], strict=False))


@pytest.mark.parametrize("name", TEMPLATES)
async def test_in_the_memory(name: str) -> None:  # C3
    client = Client("/v1/messages", "[[script:a]] How is it?", stream=True)
    async with server(SCRIPTS, capsules=None, **settings(name)) as served:
        for _ in range(TURNS):
            client.take(await client.ask(served))
        prompts = [list(record.prompt_token_ids) for record in served.engine.log]
    assert extends(prompts)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("name", TEMPLATES)
async def test_in_capsules(name: str, path: str) -> None:  # C3 C34
    client = Client(path, "[[script:a]] How is it?", stream=False)
    prompts = []
    for _ in range(TURNS):
        async with server(SCRIPTS, **settings(name)) as served:
            client.take(without_words(await client.ask(served)))
            prompts.append(last_prompt(served))
    assert extends(prompts)


@pytest.mark.parametrize("name", TEMPLATES)
async def test_in_the_file(name: str, tmp_path: Path) -> None:  # C3
    client = Client("/v1/messages", "[[script:a]] How is it?", stream=True)
    prompts = []
    for _ in range(TURNS):
        kept = memory_in(tmp_path / "turns")
        async with server(SCRIPTS, capsules=None, memory=kept, **settings(name)) as served:
            client.take(await client.ask(served))
            prompts.append(last_prompt(served))
        kept.close()
    assert extends(prompts)


@pytest.mark.parametrize("name", TEMPLATES)
async def test_in_the_capsules_of_a_stream(name: str) -> None:  # C3 C34
    """They leave before the turn is over: what stands before it is as it was, and its beginning."""
    client = Client("/v1/messages", "[[script:a]] How is it?", stream=True)
    prompts = []
    for _ in range(TURNS):
        async with server(SCRIPTS, **settings(name)) as served:
            client.take(without_words(await client.ask(served)))
            prompts.append(last_prompt(served))
    for before, after in pairwise(prompts[1:]):
        last = TOKENIZER.decode(before).rpartition("Sunny.")[2]
        assert f"Sunny.{last}{THOUGHT}" in TOKENIZER.decode(after)
