"""Read requests of Responses: what they refer to is looked up, and the summaries that they carry are decrypted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from singletree.conversation import Request
from singletree.errors import InvalidRequest
from singletree.protocols import models, responses
from singletree.protocols.responses.compact import compaction_request
from singletree.protocols.responses.output import INCLUDE_REASONING
from singletree.server.answers.observer import KnownResponses
from singletree.server.http.service import Call, offload
from singletree.server.turn.compaction import summary_opener
from singletree.server.turn.protocol import COMPACT


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
    summaries = partial(summary_opener, catalog)
    sent = await offload(len(body), partial(responses.parse_body, body))
    references, store = sent.references, None
    if sent.body.store is not False or sent.body.background or references:
        store = None if call.service.store is None else await call.service.store.opened()
    known = recent or store
    found = None if known is None else await known.look_up(references)
    size = len(body) + (0 if found is None else sum(map(len, found.history)))
    resolve = partial(responses.resolve_request, sent, found, summaries, stores=store is not None)
    request = await offload(size, resolve)
    state = request.options.stored_state
    if known is not None and state.background and not state.store:
        raise InvalidRequest(
            "background needs store: true; otherwise the response could not be retrieved", param="background"
        )
    if call.service.config.raw_reasoning:
        include = (*request.options.include, INCLUDE_REASONING)
        request = replace(request, options=replace(request.options, include=include))
    return compaction_request(request) if call.api is COMPACT else request
