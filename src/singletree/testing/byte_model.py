"""The scripted engine as the server loads it: with a checkpoint's tokenizer, or with a checkpoint without weights.

Of that, every byte is a token, and the template is ChatML with tools. It needs no file and no network, and its prompts
look like those of a Qwen3 model.
"""

from __future__ import annotations

from functools import partial

import msgspec
import tokenizers

from singletree.engines.engine import Engine
from singletree.engines.progress import Progress
from singletree.prompts.tokenizer.added_tokens import AddedToken
from singletree.prompts.tokenizer.definition import Pipeline, TokenizerDefinition
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.models.model_source import (
    LocalEngine,
    ModelSource,
    checkpoint_source,
    do_nothing,
    resolve_checkpoint,
    set_only,
    start_engine,
)
from singletree.server.settings.config import Config
from singletree.testing import byte_model
from singletree.testing.scripted_engine import ScriptedEngine

NAME = "scripted"
FAMILY = "qwen3"
CONTEXT_WINDOW = 1_048_576

_BYTES = 256
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHAT_TEMPLATE = r"""{#- ChatML, with tools as Qwen3 writes them -#}
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>

Answer a call in <tool_call></tool_call> as {"name": <name>, "arguments": <object>}.<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.nextitem is not defined or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role != 'system' or not loop.first %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def byte_tokenizer() -> Tokenizer:
    """Return its tokenizer. Ids below 256 are bytes; the control tokens and the tags of the format follow."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: id for id, character in enumerate(alphabet)}
    added = tuple(
        AddedToken(_BYTES + i, text, special=text in _CONTROL) for i, text in enumerate((*_CONTROL, *_TAGS))
    )
    whole = {token.text: token.id for token in added}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "vocab": vocabulary | whole, "merges": []}
    return Tokenizer(
        TokenizerDefinition(
            pipeline=Pipeline(msgspec.Raw(msgspec.json.encode(model)), None, level, level),
            added_tokens=added,
            vocabulary_size=_BYTES + len(added),
            named_tokens={"eos_token": "<|im_end|>"},
            stop_token_ids=frozenset({whole["<|im_end|>"]}),
            chat_template=CHAT_TEMPLATE,
            context_window=CONTEXT_WINDOW,
        )
    )


async def _find_source(config: Config, progress: Progress) -> ModelSource:
    def make(tokenizer: Tokenizer) -> Engine:
        return ScriptedEngine(
            tokenizer.encode,
            tokenizer.decode,
            config.script_dir,
            delay=config.script_delay,
            log_path=config.script_log,
            log_text=True,
            end_token_id=tokenizer.added_tokens.get(tokenizer.eos_token),
            **set_only(slots=config.slots, context_window=config.context_window or tokenizer.context_window),
        )

    if config.model is None:
        return ModelSource(
            (byte_model.NAME,), byte_model.byte_tokenizer, partial(start_engine, make), do_nothing
        )
    return checkpoint_source(await resolve_checkpoint(config, config.model, progress), make)


LOCAL_ENGINE = LocalEngine(_find_source, (byte_model.NAME, byte_model.byte_tokenizer))
