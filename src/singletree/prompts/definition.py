"""What a tokenizer is, whatever files it was read from: one value, filled by every reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from singletree.prompts.added_tokens import AddedToken


class Pipeline(msgspec.Struct, frozen=True):
    """The stages between text and ids, as ``tokenizer.json`` writes them, without added tokens.

    https://huggingface.co/docs/tokenizers/pipeline. ``model`` stays unparsed: it is megabytes of vocabulary.
    """

    model: msgspec.Raw
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    added_tokens: tuple[()] = ()
    version: str = "1.0"


@dataclass(frozen=True, slots=True)
class TokenizerDefinition:
    """A tokenizer and what its checkpoint says beside it.

    Attributes:
        stop_token_ids: the ids that the checkpoint itself names as ends; ``turn_enders`` finds the others.
        named_tokens: token texts by the names that templates use (``bos_token``, ``unk_token`` …).
        chat_template: Jinja source; None when the checkpoint has none.
        context_window: tokens; None when the checkpoint does not say.
        response_template: what the checkpoint says of reading a turn, as JSON; None when it says nothing.
        vocabulary_size: one more than the highest id.
    """

    pipeline: Pipeline
    added_tokens: tuple[AddedToken, ...]
    vocabulary_size: int
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    stop_token_ids: frozenset[int] = frozenset()
    chat_template: str | None = None
    context_window: int | None = None
    response_template: Any = None


TURN_ENDERS = frozenset(
    {
        "<|im_end|>",  # ChatML: Qwen, SmolLM, Nemotron, Kimi
        "<|eot_id|>",  # Llama 3
        "<|eom_id|>",  # Llama 3.1, after a call
        "<|eot|>",  # Llama 4, Muse
        "<|eom|>",
        "<|end_of_text|>",  # Llama 3, Granite
        "<|endoftext|>",
        "<|end|>",  # Phi
        "<|return|>",  # Harmony
        "<|call|>",
        "<|calls|>",  # Solar Open
        "<|flush|>",
        "<end_of_turn>",  # Gemma 1 to 3
        "<turn|>",  # Gemma 4
        "<|tool_response>",  # Gemma 4 stops where the answer to its call has to come
        "<|END_OF_TURN_TOKEN|>",  # Cohere
        "<end_of_utterance>",  # SmolVLM
        "<｜end▁of▁sentence｜>",  # DeepSeek
        "[e~[",  # MiniMax
        "[EOS]",  # Kimi
        "[EOT]",
        "<seed:eos>",  # Seed-OSS
        "</s>",
        "<eos>",
    }
)
_INNER_ENDERS = {
    "<|end|>": frozenset({"<|return|>", "<|call|>", "<|calls|>", "<|flush|>"}),
    "<|eom|>": frozenset({"<|start|>"}),  # Muse; Llama 4, whose turn it ends, has no such header
}
"""Tokens that end a part of a turn, not the turn, in a vocabulary that has one of these as well."""


def turn_enders(tokens: Iterable[AddedToken]) -> frozenset[int]:
    """The ids among ``tokens`` that end a turn by their name.

    Only special ones count: Gemma's vocabulary has ``</s>`` as an HTML tag.
    """
    special = {token.text: token.id for token in tokens if token.special}
    return frozenset(
        special[text]
        for text in TURN_ENDERS & special.keys()
        if not _INNER_ENDERS.get(text, frozenset()) & special.keys()
    )
