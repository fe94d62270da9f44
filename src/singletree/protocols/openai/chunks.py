"""What the streams of Chat Completions, Completions and vLLM's generate have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from singletree.errors import SingletreeError
from singletree.events import FinishReason, Usage
from singletree.protocols import wire
from singletree.protocols.answer import KEEP_ALIVE, AnswerContext, Frame
from singletree.protocols.openai import errors

DONE: Frame = ("", b"[DONE]")
"""The last frame of a stream."""

# A response cut short is "length": a client must not take it for a complete one.
FINISH_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "context_overflow": "length",
    "refusal": "content_filter",
    "cancelled": "length",
    "error": "length",
}


def usage_object(usage: Usage) -> Mapping[str, Any]:
    """Return ``usage`` in the form of Chat Completions and Completions."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


class ChunkStream:
    """The frames of a stream of chunks that do not depend on its chunks.

    Attributes:
        prompt_field: the field of the request that holds the prompt, for error objects.
    """

    prompt_field = "messages"

    def keep_alive(self) -> list[Frame]:
        """Return a comment: every client skips it, while some fail on unknown events."""
        return [KEEP_ALIVE]

    def fail(self, error: SingletreeError) -> list[Frame]:
        """End the stream with an error object, on which OpenAI's SDKs raise. No finish reason is sent."""
        return [("", wire.dump({"error": errors.error_object(error, prompt=self.prompt_field)})), DONE]


class CompletionStream(ChunkStream):
    """The frames that Chat Completions and Completions have in common.

    Args:
        kind: the value of ``object`` in every chunk.
    """

    def __init__(self, context: AnswerContext, kind: bytes) -> None:
        request = context.request
        head = b'{"id":%b,"object":"%b","created":%d,"model":%b,"choices":['
        self._head = head % (wire.dump(context.id), kind, context.created, wire.dump(request.model))
        self._include_usage = request.options.include_usage

    def tail(self, usage: Usage) -> list[Frame]:
        """End the stream: the usage if requested, then ``[DONE]``."""
        if not self._include_usage:
            return [DONE]
        return [("", self._head + b'],"usage":%b}' % wire.dump(usage_object(usage))), DONE]

    def side_event(self, name: str, data: Mapping[str, Any]) -> list[Frame]:
        """Return an event that the API does not have; clients that do not know ``name`` see a chunk without choices."""
        return [(name, b"%b],%b" % (self._head, wire.dump(data)[1:]))]
