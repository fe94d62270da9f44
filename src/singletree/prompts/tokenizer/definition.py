"""The definition of a tokenizer: one value, which the readers of all file formats return."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from singletree.prompts.tokenizer.added_tokens import AddedToken


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
    """A tokenizer and the metadata of its checkpoint.

    Attributes:
        pipeline: the stages of the tokenizer.
        added_tokens: the tokens that are matched in text before the pipeline.
        stop_token_ids: the ids that the checkpoint itself names as ends; ``end_of_turn_ids`` finds the others.
        named_tokens: token texts by the names that templates use (``bos_token``, ``unk_token`` …).
        chat_template: Jinja source; None when the checkpoint has none.
        context_window: in tokens; None when the checkpoint does not specify it.
        response_template: the checkpoint's description of how a turn is parsed, as JSON; None when it has none.
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


END_OF_TURN_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|eot|>",
        "<|eom|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
        "[EOS]",
        "[EOT]",
        "</s>",
        "<eos>",
    }
)
"""Special tokens that end a turn in any vocabulary that has them. Vocabularies of many makers do, also those of
checkpoints whose format has no family, and checkpoint files often name one of several. A token that one format alone
has is a stop marker of its family (``Family.stop_markers``)."""

_MESSAGE_ENDS = frozenset({"<|end|>", "<|eom|>"})
_MESSAGE_STARTS = frozenset({"<|start|>", "<|begin|>"})
"""Where a vocabulary has one of these, a turn may be several messages, and ``_MESSAGE_ENDS`` do not end it."""


def end_of_turn_ids(
    tokens: Iterable[AddedToken], stop_markers: Collection[str] = (), markers: Iterable[str] = ()
) -> frozenset[int]:
    """Return the ids of those ``tokens`` that end a turn, which is known from their texts.

    Only special ones count: Gemma's vocabulary has ``</s>`` as an HTML tag.

    Args:
        stop_markers: further texts that end a turn, in the format of the model.
        markers: all markers of that format. A token that occurs in one of them, and is no stop marker, is written
            inside a turn, and so does not end it.
    """
    special = {token.text: token.id for token in tokens if token.special}
    inner = _MESSAGE_ENDS if _MESSAGE_STARTS & special.keys() else frozenset()
    written = "\n".join(markers)
    usual = {text for text in END_OF_TURN_TOKENS - inner if text not in written}
    return frozenset(special[text] for text in usual.union(stop_markers) & special.keys())
