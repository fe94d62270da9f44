"""A tokenizer for each template: one real vocabulary with the added tokens of the template's own model.

Most models' own are not to be had here. What counts is which texts are one token, and that a prompt and what follows
it are encoded as by a real one.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from singletree.conversation import Conversation, Reasoning, Text, Tool, Turn
from singletree.errors import InvalidRequest
from singletree.parsing.family import Family, markers
from singletree.parsing.render_turn import render_turn
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.prompts.tokenizer.added_tokens import AddedToken
from singletree.prompts.tokenizer.definition import TokenizerDefinition, end_of_turn_ids
from singletree.prompts.tokenizer.tokenizer import Tokenizer

_TOKENS = re.compile(
    r"<[|｜/]?[\w▁:.|｜-]*[|｜][\w▁:.|｜-]*>|\[/?[A-Z][A-Z_]+\]|\]~!?b\[?\]?|\[e~\[|</?(?:start|end)_of_[a-z]+>"
    r"|</?(?:role|assistant|user|tool_calls|beginning_of_sentence|end_of_sentence|sep)>|<SPECIAL_\d+>|<seed:[a-z]+>"
)
"""What looks like an added token in the templates of the models."""

_BEGINNINGS = ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<bos>", "<|startoftext|>")
_ASKED = Turn("user", (Text("q"),))
_PROBE = Conversation((_ASKED, Turn("assistant", (Reasoning("r"), Text("t"))), _ASKED), (Tool("f", "d"),))


def vocabulary(definition: TokenizerDefinition, template: ChatTemplate, family: Family) -> Tokenizer:
    """The tokenizer of ``definition`` with what looks like an added token in the template and in what it prints."""
    known = {token.text for token in definition.added_tokens}
    marks = {
        *_TOKENS.findall(template.source + printed(template, family)),
        *(end for end in family.stop_markers if end in template.source),
        eos_token(family),
    }
    more = sorted(marks - known)
    first = definition.vocabulary_size
    added = tuple(AddedToken(first + i, text, special=True) for i, text in enumerate(more))
    tokens = [token for token in (*definition.added_tokens, *added) if token.text in marks]
    stops = end_of_turn_ids(tokens, family.stop_markers, markers(family))
    return Tokenizer(
        replace(
            definition,
            added_tokens=(*definition.added_tokens, *added),
            vocabulary_size=first + len(added),
            stop_token_ids=frozenset(stops),
        )
    )


def printed(template: ChatTemplate, family: Family) -> str:
    """A prompt: some templates put their tokens together from pieces."""
    try:
        return template.render(_PROBE, render_parts=partial(render_turn, family))
    except InvalidRequest:
        return ""


def bos_token(source: str) -> str:
    """What the template may call its beginning of sequence: some fail without one."""
    return next((mark for mark in _BEGINNINGS if mark in source), "<s>")


def eos_token(family: Family) -> str:
    """What the template may call its end of sequence."""
    return family.stop_markers[0] if family.stop_markers else "</s>"


def written_as(family: Family, template: ChatTemplate) -> Family:
    """``family`` with that of its spellings first in which the template prints a turn (Hunyuan 3)."""
    source = template.source + printed(template, family)
    reasoning = family.reasoning
    for pair in family.also_reasoning:
        if all(mark in source for mark in pair):
            reasoning = pair
    forms = sorted(family.forms, key=lambda form: form.opener not in source)
    others = tuple(pair for pair in (family.reasoning, *family.also_reasoning) if pair and pair != reasoning)
    return replace(family, reasoning=reasoning, also_reasoning=others, forms=tuple(forms))
