"""Read requests of Responses: what they refer to is looked up, and the summaries that they carry are decrypted.

The model writes the summary of a conversation, and the client carries it. The prompt for one, and how the model gets to
see it, are in ``protocols.responses.state``. A summary is encrypted with the key of the capsules: every replica with
that key can decrypt it, and nobody else.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from msgspec import structs

from singletree.conversation import Request
from singletree.errors import EngineFailed, InvalidRequest
from singletree.events import Compacted, Finished, Fold
from singletree.protocols import models, responses
from singletree.protocols.responses.compact import compaction_request
from singletree.protocols.responses.output import INCLUDE_REASONING
from singletree.protocols.responses.state import OpenSummary, no_summary, summary_of
from singletree.server.answers.observer import KnownResponses
from singletree.server.capsules import Capsules, Tampered
from singletree.server.http.service import Call, offload
from singletree.server.models.catalog import Catalog
from singletree.server.turn import pipeline
from singletree.server.turn.generation import Batches, Generation
from singletree.server.turn.protocol import COMPACT

_PURPOSE = b"compaction"


def summary_opener(catalog: Catalog, model: str) -> OpenSummary:
    """Return the function that decrypts the summaries of ``model``, and of those that may answer in its place.

    Raises ModelNotFound.
    """
    own = catalog.get(model)
    capsules = [each.capsules for each in (own, *own.others()) if each.capsules is not None]
    return partial(_open_any, capsules) if capsules else no_summary


def _open_any(several: Sequence[Capsules], sealed: str, at: str) -> str | None:
    return next((found for each in several if (found := _open(each, sealed, at)) is not None), None)


def _open(capsules: Capsules, sealed: str, at: str) -> str | None:
    """Return the summary; None if another server made it. If it was changed: InvalidRequest at ``at``, or None."""
    try:
        data = capsules.open_text(sealed, _PURPOSE)
    except Tampered:
        if not capsules.strict:
            return None
        raise InvalidRequest(
            f"{at}: it was changed since this server sent it; send the compaction item back unchanged, or leave it out",
            param=at,
        ) from None
    return None if data is None else zlib.decompress(data).decode()


def seal_summary(capsules: Capsules, summary: str) -> str:
    """Encrypt ``summary`` for the client to carry."""
    return capsules.seal_text(zlib.compress(summary.encode("utf-8", "replace")), _PURPOSE)


def with_compaction(generation: Generation) -> Generation:
    """Set up ``generation`` to send the turn as an encrypted summary.

    Raises:
        InvalidRequest: this server cannot encrypt.
    """
    if generation.model.capsules is None:
        raise InvalidRequest(
            "this server cannot compact conversations, because it cannot encrypt them; on the server: pip install "
            "cryptography"
        )
    return structs.replace(generation, runner=_run_compaction)


async def _run_compaction(generation: Generation, request_id: str) -> Batches:
    """Yield the turn as one event at its end, which carries the summary.

    A summary that the token limit cut is sent all the same: without it, a session that filled its window could not
    continue.
    """
    capsules = generation.model.capsules
    assert capsules is not None
    folding = Fold()
    async with aclosing(pipeline.run(generation, request_id)) as batches:
        async for batch in batches:
            if not isinstance(batch, Finished):
                folding.feed_all(batch)
                yield []
                continue
            summary = summary_of(folding.turn())
            if not summary:
                raise EngineFailed("the model wrote no summary of the conversation; try again")
            yield [Compacted(seal_summary(capsules, summary))]
            yield replace(batch, reason="stop")


async def read_response(call: Call, body: bytes, recent: KnownResponses | None) -> Request:
    """Decode ``body`` as a request for a response or a compaction; ``recent`` has the responses of its connection.

    Raises:
        InvalidRequest: the body is wrong, or names a response or an item that is not stored.
        NotStored: the conversation does not exist.
    """
    catalog = call.service.catalog
    if catalog.loads_later:
        # A summary in the request is opened with the keys of its model, while the request is decoded.
        await catalog.ready(await offload(len(body), partial(models.requested_model, body)))
    resolve = partial(responses.resolve_request, summaries=partial(summary_opener, catalog))

    def read(body: bytes, _: object) -> Request | responses.SentRequest:
        sent = responses.parse_body(body)
        looks_up = recent is not None or (call.service.store is not None and sent.needs_store)
        return sent if looks_up else resolve(sent, None, stores=False)

    request = await call.decode(body, read)
    if isinstance(request, responses.SentRequest):
        sent, store = request, None
        if call.service.store is not None and sent.needs_store:
            store = await call.service.store.opened()
        known = recent or store
        found = None if known is None else await known.look_up(sent.references)
        size = len(body) + (0 if found is None else sum(map(len, found.history)))
        request = await offload(size, partial(resolve, sent, found, stores=store is not None))
        state = request.options.stored_state
        if known is not None and state.background and not state.store:
            why = "background needs store: true; otherwise the response could not be retrieved"
            raise InvalidRequest(why, param="background")
    if call.service.config.raw_reasoning:
        include = (*request.options.include, INCLUDE_REASONING)
        request = replace(request, options=replace(request.options, include=include))
    return compaction_request(request) if call.api is COMPACT else request
