"""The definition of a tokenizer: one value, which the readers of all file formats return."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from singletree.errors import BadConfiguration
from singletree.prompts.tokenizer.added_tokens import AddedToken
from singletree.prompts.tokenizer.detokenizer import ByteEncoding


class Pipeline(msgspec.Struct, frozen=True):
    """The stages of ``tokenizer.json``, the model unparsed (https://huggingface.co/docs/tokenizers/pipeline)."""

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
        added_tokens: the tokens that are matched in text before the pipeline.
        stop_token_ids: the ids that the checkpoint itself names as ends; ``end_of_turn_ids`` finds the others.
        named_tokens: token texts by the names that templates use (``bos_token``, ``unk_token`` …).
        chat_template: Jinja source; None when the checkpoint has none, as for the next two.
        context_window: in tokens.
        response_template: the checkpoint's description of how a turn is parsed, as JSON.
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


def byte_encoding_of(pipeline: Pipeline) -> ByteEncoding:
    """Return how the vocabulary represents bytes, by its decoder. Raises BadConfiguration for an unknown decoder."""
    kinds = {stage.get("type") for stage in _stages(pipeline.decoder, "decoders")}
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return "byte_fallback"
    raise BadConfiguration(
        f"the tokenizer's decoder ({', '.join(map(str, kinds)) or 'none'}) does not support streaming; "
        "use a checkpoint with a byte-level or SentencePiece vocabulary"
    )


def without_first_prefix(pipeline: Pipeline) -> Pipeline | None:
    """Return the pipeline for later segments; None where it is the same, without ``prepend_scheme: first``."""
    stages = _stages(pipeline.pre_tokenizer, "pretokenizers")
    if not any(stage.get("prepend_scheme") == "first" for stage in stages):
        return None
    later = [stage | ({"prepend_scheme": "never"} if "prepend_scheme" in stage else {}) for stage in stages]
    sequence = {"type": "Sequence", "pretokenizers": later}
    return msgspec.structs.replace(pipeline, pre_tokenizer=sequence)


def _stages(stage: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(stage, dict):
        return []
    return list(stage[key]) if key in stage else [stage]
