"""Summaries of conversations: written by the model, sealed for the client to carry, opened when they come back.

What is asked and what the model reads of a summary is in ``protocols.responses_compaction``. A summary is sealed with
the key of the capsules, so every replica that has it can open it, and whoever has not learns nothing of it.
"""

from __future__ import annotations

import zlib
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from singletree.errors import EngineFailed, InvalidRequest
from singletree.events import Compacted, Finished, Fold
from singletree.protocols.responses_compaction import OpenSummary, summary_of, unopened
from singletree.server import pipeline
from singletree.server.capsule import Capsules, Tampered
from singletree.server.catalog import Catalog
from singletree.server.pipeline import Batches, Generation

_PURPOSE = b"compaction"


def summaries_for(catalog: Catalog, model: str) -> OpenSummary:
    """What opens the summaries that ``model`` wrote. Raises ModelNotFound."""
    capsules = catalog.get(model).capsules
    return unopened if capsules is None else partial(_open, capsules)


def _open(capsules: Capsules, sealed: str, at: str) -> str | None:
    """The summary in ``sealed``; None for one that another server made, or that was changed.

    Raises:
        InvalidRequest: it was changed, and the server is to be strict about it.
    """
    try:
        data = capsules.open_text(sealed, _PURPOSE)
    except Tampered:
        if not capsules.strict:
            return None
        raise InvalidRequest(
            f"{at}: it is not as this server gave it; send the compaction item back unchanged, or leave it out",
            param=at,
        ) from None
    return None if data is None else zlib.decompress(data).decode()


def seal_summary(capsules: Capsules, summary: str) -> str:
    """``summary`` as its client carries it."""
    return capsules.seal_text(zlib.compress(summary.encode("utf-8", "replace")), _PURPOSE)


def planned(generation: Generation) -> Generation:
    """``generation``, of whose turn the client gets the summary where it asks for one.

    Raises:
        InvalidRequest: nothing could be sealed here.
    """
    if not generation.request.extra.get("compacts"):
        return generation
    if generation.model.capsules is None:
        raise InvalidRequest(
            "a conversation cannot be compacted here, as nothing can be sealed; on the server: pip install cryptography"
        )
    return replace(generation, course=_summing_up)


async def _summing_up(generation: Generation, request_id: str) -> Batches:
    """The turn as one event, its summary, at its end.

    A summary that the limit cut is given all the same: without any, a session that has filled its window is over.
    """
    capsules = generation.model.capsules
    assert capsules is not None
    folding = Fold()
    async with aclosing(pipeline.run(generation, request_id)) as batches:
        async for batch in batches:
            if not isinstance(batch, Finished):
                for event in batch:
                    folding.feed(event)
                yield []
                continue
            summary = summary_of(folding.turn())
            if not summary:
                raise EngineFailed("the model wrote no summary of the conversation; try again")
            yield [Compacted(seal_summary(capsules, summary))]
            yield replace(batch, reason="stop")
