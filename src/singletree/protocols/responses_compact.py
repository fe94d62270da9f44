"""``/v1/responses/compact``: a conversation, shortened, for its client to go on with.

https://platform.openai.com/docs/api-reference/responses/compact. What users, developers and the system said comes
back as it was, and behind it one ``compaction`` item. The request is one for a response (``responses``); this answer
is never streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from singletree.conversation import Request, Turn
from singletree.events import Finished
from singletree.protocols import responses, wire
from singletree.protocols.responses_compaction import asking
from singletree.protocols.responses_output import Output, usage_of
from singletree.protocols.responses_state import with_id

__all__ = ["ID_PREFIX", "ROUTES", "Encoder", "decode", "encode", "encode_error"]

ID_PREFIX = responses.ID_PREFIX
Encoder = responses.Encoder
encode_error = responses.encode_error

_KEPT_NOWHERE = {"store": False, "background": False, "conversation": None}

ROUTES: list[tuple[str, str, str]] = [("POST", "/v1/responses/compact", "create")]


def decode(body: bytes, headers: Mapping[str, str] = {}) -> Request:
    """``body`` as a request for a summary; raises as ``responses.decode`` does."""
    return compacting(responses.decode(body, headers))


def compacting(request: Request) -> Request:
    """A request of the other route as one of this: nothing of it is streamed or stored."""
    asked = request if request.extra.get("compacts") else asking(request)
    return replace(asked, stream=False, extra={**asked.extra, **_KEPT_NOWHERE})


def encode(
    request: Request,
    turn: Turn,
    finished: Finished,
    *,
    id: str,
    created: int,
    new_id: Callable[[str], str],
    seal: Callable[[int], str] | None = None,
) -> bytes:
    """The body of the answer; ``created`` in unix seconds."""
    compaction = Output(request, id=id, created=created).compaction(
        new_id("cmp_"), (turn.extra or {})["compaction"]
    )
    said = [turn.extra for turn in request.conversation.turns if turn.role != "assistant" and turn.extra]
    messages = [with_id(item, new_id) for item in said if item.get("type", "message") == "message"]
    return wire.dump(
        {
            "id": id,
            "object": "response.compaction",
            "created_at": created,
            "output": [*({"status": "completed", **item} for item in messages), compaction],
            "usage": usage_of(finished.usage),
        }
    )
