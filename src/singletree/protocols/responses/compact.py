"""``/v1/responses/compact``: shorten a conversation, which the client then continues.

https://platform.openai.com/docs/api-reference/responses/compact. Messages of users, developers and the system are
returned unchanged, followed by one ``compaction`` item. The request has the form of a ``responses`` request; the
response is never streamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from singletree.conversation import Request
from singletree.events import Usage
from singletree.protocols import responses, wire
from singletree.protocols.answer import FinishedChoice
from singletree.protocols.responses.output import Output, usage_of
from singletree.protocols.responses.state import summary_request, with_id

__all__ = ["ID_PREFIX", "Body", "Encoder", "decode", "encode"]

ID_PREFIX = responses.ID_PREFIX
Body = responses.Body
Encoder = responses.Encoder


def decode(body: bytes, headers: Mapping[str, str] = {}) -> Request:
    """Decode ``body`` as a request for a summary; raise as ``responses.decode`` does."""
    return compaction_request(responses.decode(body, headers))


def compaction_request(request: Request) -> Request:
    """Return ``request``, decoded by ``responses``, as a compaction request: not streamed and not stored."""
    summary = request if request.options.compacts else summary_request(request)
    not_stored = replace(summary.options.stored_state, store=False, background=False, conversation_id=None)
    return replace(summary, stream=False, options=replace(summary.options, stored_state=not_stored))


def encode(choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
    """Encode the body of the response, which is one choice."""
    [(context, turn, finished)] = choices
    new_id = context.new_id
    compaction = Output(context).compaction(new_id("cmp_"), (turn.extra or {})["compaction"])
    turns = context.request.conversation.turns
    inputs = [turn.extra for turn in turns if turn.role != "assistant" and turn.extra]
    messages = [with_id(item, new_id) for item in inputs if item.get("type", "message") == "message"]
    return wire.dump(
        {
            "id": context.id,
            "object": "response.compaction",
            "created_at": context.created,
            "output": [*({"status": "completed", **item} for item in messages), compaction],
            "usage": usage_of(finished.usage),
        }
    )
