"""Make what is stored of a finished response, and of an item that a client sends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from singletree.conversation import Reasoning, Request
from singletree.events import fold
from singletree.protocols import wire
from singletree.protocols.answer import EncodedItem, EncodedResponse
from singletree.protocols.responses.state import REASONING_FIELD, StoredReasoning, input_forms, item_form
from singletree.server.ids import NewId
from singletree.server.turn.generation import Generation
from singletree.stored_responses.tables import StoredItem, StoredResponse


def stored_response(
    request: Request, response: EncodedResponse, generation: Generation | None
) -> StoredResponse:
    """Return what is stored of ``response``: the whole reasoning, even where the client gets less of it."""
    state = request.options.stored_state
    return StoredResponse(
        response.id,
        int(time.time()),
        response.json,
        input_forms(state.input_items),
        list(_output(response.items, generation)),
        state.previous_response_id,
        state.conversation_id,
    )


def _output(items: Sequence[EncodedItem], generation: Generation | None) -> Iterator[StoredItem]:
    """Yield the items of a response as they are stored: with the parts of the turn that the client did not get.

    These are the text of its reasoning and the capsules of its tokens. The last item has the tokens up to the end of
    the turn.
    """
    recorder = None if generation is None else generation.recorder
    ordinals = count()
    reasoning: list[str] | None = None
    for number, (item, encoded) in enumerate(items, 1):
        kept = StoredReasoning()
        if item["type"] == "reasoning" and generation is not None:
            if reasoning is None:
                turn = (recorder.turn if recorder else None) or fold(generation.events)
                reasoning = [part.text for part in turn.parts if isinstance(part, Reasoning)]
            ordinal = next(ordinals)
            # A capsule may be made only once, so none is made where the client already has it.
            sealed = generation.seal(ordinal) if generation.seal and not item.get("encrypted_content") else ""
            text = reasoning[ordinal] if ordinal < len(reasoning) and not item.get("content") else ""
            kept = StoredReasoning(text, sealed)
        elif number == len(items) and recorder is not None:
            kept = StoredReasoning("", recorder.seal_rest())
        if kept.text or kept.encrypted_content or item["type"] == "reasoning":
            encoded = wire.dump({**item, REASONING_FIELD: msgspec.to_builtins(kept)})
        yield StoredItem(item["id"], encoded)


def as_item(item: Mapping[str, Any], new_id: NewId) -> StoredItem:
    """Return an input item as it is stored, with a new id where it has none."""
    return StoredItem(*item_form(item).encode(new_id))
