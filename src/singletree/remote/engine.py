"""An engine on a running inference server, with token ids in and out over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from time import time
from typing import Any

import msgspec
from msgspec import structs

from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, EngineInfo, GenerationJob, WeightStep, token_limit
from singletree.errors import (
    BadConfiguration,
    EngineFailed,
    EngineUnfit,
    EngineUnreachable,
    InvalidRequest,
    Overloaded,
    Rejected,
)
from singletree.pictures import PromptPicture
from singletree.remote.events import TokenId, TokenRelay
from singletree.remote.http_client import HttpTransport
from singletree.remote.pictures import count_by_generating, pictures_of, silence
from singletree.remote.transport import (
    ConnectionLost,
    InFlightRequest,
    StreamedResponse,
    Transport,
    ask,
    check_key,
    decode_as,
    read_answer,
    root_url,
)
from singletree.remote.wire import Lookup, Server, ServerOffer, Wire, WireReader

_LOG = logging.getLogger(__name__)
PROBE_ID = "singletree-probe"
"""The request id of the single token that is generated at start-up."""
_PROBE_PROMPT = (0,)  # every vocabulary has this id
_MAX_ERROR_BYTES = 65536  # of the body of an error response
_QUESTION_SECONDS = 10.0
_SLOTS = 256
_UNKNOWN_WINDOW = 2**31


class _Tokens(msgspec.Struct):
    tokens: list[TokenId]


class RemoteEngine:
    """Generate on a running inference server.

    The server's kind decides how it is looked up and which endpoints are tried, the best first. At start-up one token
    is generated, so that a server that cannot return token ids is refused before the first request.

    Args:
        server: the kind of server.
        url: address of the server, such as ``http://127.0.0.1:8000``; ``/v1`` at the end is accepted.
        api_key: the server's API key.
        slots: how many generations the server runs at once; None for what it reports, else 256.
        read_timeout: seconds without a byte after which a generation counts as lost; None for no limit. The wait in
            the server's own queue counts, too.
        transport: replaces HTTP in tests.

    Raises BadConfiguration for a malformed URL and for a key that cannot be sent in an HTTP header.
    """

    def __init__(
        self,
        server: Server,
        url: str,
        api_key: str | None = None,
        *,
        slots: int | None = None,
        read_timeout: float | None = 600.0,
        transport: Transport | None = None,
    ) -> None:
        self._server = server
        self._url = root_url(url, server.title)
        check_key(api_key)
        self._slots = slots
        self._transport = transport or HttpTransport(self._url, api_key=api_key, read_timeout=read_timeout)
        self._served = ServerOffer("", ())
        self._window = 0
        self._model_defaults: Mapping[str, Any] = {}
        self._reports_cached: bool | None = None
        self._blindness: str | None = ""
        self._in_flight: set[InFlightRequest] = set()
        self._connected_at = 0.0
        self._info: EngineInfo | None = None  # as it was made of ``_info_of``: every request asks for it
        self._info_of: tuple[Any, ...] = ()

    async def start(self) -> None:
        """Look up the model, and generate one token to check that the server returns token ids.

        Raises EngineFailed when the server cannot be reached or is not ready, BadConfiguration when it refuses the
        key, or is a server of another kind.
        """
        await self._transport.open()
        try:
            self._served = await self._server.look_up(self._url, self._get)
            self._window = self._served.window or _UNKNOWN_WINDOW
            await self._choose_wires()
            self._blindness = await self._find_blindness()
            self._connected_at = time()
        except BaseException:
            self._window = 0
            await self._transport.close()
            raise

    async def close(self) -> None:
        """Close all connections; running generations end with EngineFailed. The server itself keeps running."""
        for request in tuple(self._in_flight):
            request.end(EngineFailed("the engine was closed"))
        await self._transport.close()

    def complete(self, *, window: int | None, model_defaults: Mapping[str, Any]) -> None:
        """Add what the server does not report.

        Args:
            window: the context window in tokens, for a server that does not report its own.
            model_defaults: sampling fields that the checkpoint's authors set, by name; for a server that does not
                apply them itself.

        Raises BadConfiguration when neither knows the window.
        """
        self._model_defaults = model_defaults
        if self._served.window is None:
            if window is None:
                raise BadConfiguration(
                    f"neither {self._server.title} at {self._url} nor the checkpoint reports a context window: "
                    "give --context-window"
                )
            self._window = window

    def info(self) -> EngineInfo:
        """Return the served name, the window and the abilities.

        ``details`` has what the server reports (``version``), ``reports_cached_tokens`` (None until a generation has
        ended), ``server`` and ``endpoint``.
        """
        known = (self._served, self._window, self._reports_cached, self._blindness)
        if self._info is None or self._info_of != known:
            self._info, self._info_of = self._make_info(), known
        return self._info

    def _make_info(self) -> EngineInfo:
        served = self._served
        details = {
            **served.details,
            "server": self._server.title,
            "endpoint": served.wires[0].path if served.wires else None,
            "reports_cached_tokens": self._reports_cached,
        }
        if not served.wires:
            return EngineInfo(served.name, self._window, self._slots or 1, details)
        slots = self._slots or served.slots or _SLOTS
        best = served.wires[0].abilities
        info = best.info(
            served.name,
            self._window,
            slots,
            details,
            blindness=self._blindness,
            started_at=self._connected_at,
        )
        scores = any(wire.abilities.prompt_logprobs for wire in served.wires)
        return replace(info, returns_prompt_logprobs=scores, checkpoint=served.checkpoint)

    async def tokenize(self, text: str) -> list[int]:
        """Return the server's token ids of ``text``, without those that it adds to a prompt.

        Raises EngineUnfit when the server does not tokenize, EngineFailed when it does not answer within 10 s.
        """
        if self._served.tokenize is None:
            raise EngineUnfit(f"{self._server.title} has no endpoint that tokenizes")
        question = self._served.tokenize(text)
        body = await self._question(question)
        if (found := decode_as(_Tokens, body)) is None:
            raise EngineUnfit(f"{question.path} answers without token ids")
        return found.tokens

    async def change_weights(self, step: WeightStep, version: str = "") -> None:
        if step not in self._served.weights:
            raise EngineUnfit(f"{self._server.title} cannot hold its generations")
        path, fields = self._served.weights[step]
        body = fields | ({"new_version": version} if version else {})
        await self._question(Lookup(path, msgspec.json.encode(body)))

    async def _question(self, question: Lookup) -> bytes:
        path = question.path
        try:
            async with asyncio.timeout(_QUESTION_SECONDS):
                status, body = await self._ask(*question)
        except TimeoutError:
            raise EngineFailed(f"{path} did not answer within {_QUESTION_SECONDS:g} s") from None
        except ConnectionLost as lost:
            raise self._connection_failure(lost) from lost
        if status != 200:
            raise EngineUnfit(f"{path} answers with HTTP {status}")
        return body

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """Generate, with the contract of ``Engine.generate``. The last chunk has the token that ended the turn.

        The server refuses an invalid request before the first chunk, with InvalidRequest.
        """
        if not self._window:
            raise EngineFailed("the engine is not started")
        max_tokens = token_limit(len(job.prompt_token_ids), job.sampling.max_tokens, self._window)
        if max_tokens == 0:  # vLLM refuses max_tokens of 0
            yield Chunk((), "length")
            return
        wire = self._wire_of(job)
        if job.pictures:
            for picture in wire.uncounted(job):
                await self.count_picture_tokens(picture)
        if not wire.abilities.model_defaults:
            job = self._with_model_defaults(job)
        reader = wire.reader(job, max_tokens=max_tokens)
        request = InFlightRequest(job.request_id)
        self._in_flight.add(request)
        silence = self._limit_silence(request, wire, job) if job.pictures else None
        try:
            try:
                answer = await self._open(request, wire, job, max_tokens)
                relay = TokenRelay(reader, answer)
                while not reader.done:
                    chunk = await relay.next_chunk()
                    if silence is not None:
                        silence.cancel()
                    if reader.lookup is not None:
                        chunk = await self._resolve(reader)
                    if chunk is not None:
                        if chunk.finish is not None and job.request_id != PROBE_ID:
                            self._note_cached(chunk.cached_tokens, wire)
                        yield chunk
                        if chunk.token_ids:
                            relay.deliver = job.deliver
                if request.outcome is None and reader.failure is None and not reader.cut:
                    answer.finish()
            except ConnectionLost as lost:
                if (last := reader.close(request.outcome or self._connection_failure(lost))) is not None:
                    yield last
            if reader.failure is not None:
                raise reader.failure
        finally:
            if silence is not None:
                silence.cancel()
            self._in_flight.discard(request)
            request.hang_up()

    def _limit_silence(
        self, request: InFlightRequest, wire: Wire, job: GenerationJob
    ) -> asyncio.TimerHandle | None:
        """End the request with EngineFailed if its answer does not begin in time; None where the wire has no limit."""
        seconds = wire.first_answer_seconds(job)
        if seconds is None:
            return None
        failure = silence(self._server.title, seconds)
        return asyncio.get_running_loop().call_later(seconds, request.end, failure)

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        return await count_by_generating(self, self._server.title, picture)

    async def _open(
        self, request: InFlightRequest, wire: Wire, job: GenerationJob, max_tokens: int
    ) -> StreamedResponse:
        """Send the job and return the accepted answer. Raises ConnectionLost, and the error for a refusal."""
        while request.outcome is None:
            body = wire.encode(job, max_tokens=max_tokens)
            answer = request.response = self._transport.post(wire.path, body, wire.headers(job))
            await answer.begin()
            if answer.status == 200:
                wire.accepted(job)
                return answer
            reason = await read_answer(answer, _MAX_ERROR_BYTES)
            refusal = wire.refusal(answer.status, reason, job, answer.retry_after)
            if not wire.resends(job, refusal):
                raise refusal
            answer.finish()
        raise ConnectionLost("the generation was ended while its request was sent")

    async def _ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        return await ask(self._transport, path, body, _MAX_ERROR_BYTES)

    async def _find_blindness(self) -> str | None:
        """Return why the model takes no pictures with token ids, and the cure; None if it takes them."""
        wire = self._served.wires[0]
        probe = wire.encode_picture_probe()
        if probe is None:
            return wire.blindness(None)
        try:
            status, body = await self._ask(wire.path, probe)
        except ConnectionLost as lost:
            return f"{self._server.title} did not answer whether it takes pictures: {lost}"
        if status == 200:
            return wire.blindness(None)
        job = GenerationJob(_PROBE_PROMPT, Sampling(), PROBE_ID)
        return wire.blindness(wire.refusal(status, body, job, ""))

    async def abort(self, request_id: str) -> None:
        """Close the connection of that generation: the server drops it, and it ends with ``cancelled``."""
        for request in tuple(self._in_flight):
            if request.request_id == request_id:
                request.end("cancelled")

    def _connection_failure(self, lost: ConnectionLost) -> EngineFailed:
        kind = EngineUnreachable if lost.unreachable else EngineFailed
        failure = kind(f"the connection to {self._server.title} was lost: {lost}")
        failure.__cause__ = lost
        return failure

    def _wire_of(self, job: GenerationJob) -> Wire:
        constraint, pictures = job.constraint, pictures_of(job)
        if pictures and self._blindness is not None:
            reason = self._blindness or f"none at {self._served.wires[0].path}"
            raise InvalidRequest(
                f"{self._server.title} takes no pictures for this model ({reason}); remove them from the request"
            )
        for wire in self._served.wires:
            if pictures and not wire.abilities.pictures:
                continue
            if wire.accepts(job) and (constraint is None or constraint.kind in wire.abilities.constraints):
                return wire
        if constraint is not None:
            kinds = ", ".join(self._served.wires[0].abilities.constraints)
            raise InvalidRequest(
                f"{self._server.title} does not support constraints of kind {constraint.kind!r} here; "
                f"it supports {kinds}"
            )
        raise InvalidRequest(
            f"{self._server.title} cannot serve this request at {self._served.wires[0].path}"
        )

    def _with_model_defaults(self, job: GenerationJob) -> GenerationJob:
        unset = {
            name: value for name, value in self._model_defaults.items() if getattr(job.sampling, name) is None
        }
        return structs.replace(job, sampling=replace(job.sampling, **unset)) if unset else job

    async def _resolve(self, reader: WireReader) -> Chunk | None:
        chunk = None
        while (lookup := reader.lookup) is not None:
            chunk = reader.resolve(*await self._ask(lookup.path, lookup.body))
        return chunk

    def _note_cached(self, cached_tokens: int | None, wire: Wire) -> None:
        if self._reports_cached is None and cached_tokens is None:
            flags = [flag for flag, use in wire.abilities.options.items() if use == "cached tokens"]
            cure = f"; start it with {flags[0]}" if flags else ""
            _LOG.warning("%s does not report cached tokens%s", self._server.title, cure)
        self._reports_cached = cached_tokens is not None

    async def _get(self, path: str) -> tuple[int, bytes]:
        try:
            return await self._transport.get(path)
        except ConnectionLost as lost:
            raise EngineFailed(
                f"no answer from the {self._server.title} server at {self._url}: {lost}; {self._server.hint}"
            ) from lost

    async def _choose_wires(self) -> None:
        """Keep the first endpoint that generates a token, and those after it; log what the others would add.

        Raises BadConfiguration when none returns a token id, EngineFailed for a failure that may pass.
        """
        wires = tuple(self._served.wires)
        for at, wire in enumerate(wires):
            self._served = replace(self._served, wires=(wire,))
            try:
                await self._check(wire)
            except BadConfiguration:
                if at + 1 == len(wires):
                    raise
                if wire.path in self._served.losses:
                    _LOG.warning("%s", self._served.losses[wire.path])
            else:
                self._served = replace(self._served, wires=wires[at:])
                return

    async def _check(self, wire: Wire) -> None:
        probe = f"{self._url}{wire.path} was asked for one token"
        sampling = Sampling(max_tokens=1, temperature=0.0)
        try:
            found = [
                id
                async for chunk in self.generate(GenerationJob(_PROBE_PROMPT, sampling, PROBE_ID))
                for id in chunk.token_ids
            ]
        except (EngineUnfit, Rejected) as error:
            raise BadConfiguration(f"{probe}: {error.message}. {self._server.hint}") from error
        except (EngineFailed, Overloaded) as error:
            raise EngineFailed(
                f"{probe}: {error.message}; wait until the server is ready, and read its log"
            ) from error
        if not found:
            raise BadConfiguration(f"{probe} and returned no token id. {self._server.hint}")
