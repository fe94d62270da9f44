"""vLLM as an engine: a running ``vllm serve``, driven with token ids over HTTP.

Of vLLM's endpoints ``/v1/completions`` is the one that a plain ``vllm serve`` offers and that takes and gives
token ids (``return_token_ids``), live, with finish reasons, log-probabilities and cached-token counts.
``/inference/v1/generate`` costs vLLM's API process about a tenth less a token (150 against 167 µs, 8 streams)
but answers only under ``--enable-scale-out``; chat completions renders and parses by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, ConstraintKind, EngineInfo, StopKind, token_limit
from singletree.engines.vllm_http import AiohttpTransport, Answer, ConnectionLost, Transport
from singletree.engines.vllm_wire import CONSTRAINT_KINDS, CompletionReader, encode_request, error_of
from singletree.errors import BadConfiguration, EngineFailed, SingletreeError

_LOG = logging.getLogger(__name__)
_COMPLETIONS = "/v1/completions"
_ERROR_BYTES = 65536  # of an error's body that are read


class _ModelCard(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


class _Version(msgspec.Struct):
    version: str


class VllmEngine:
    """Drives a vLLM server (0.11 or newer; tested on 0.32).

    What to give ``vllm serve``:

    - ``--enable-prompt-tokens-details``: without it vLLM tells nobody how much of a prompt was cached, and
      ``cached_tokens`` stays None.
    - ``--structured-outputs-config '{"backend": "xgrammar"}'`` for structural tags, or ``"guidance"`` for
      Lark grammars that name special tokens, and ``constraints=("lark",)`` here. Left at ``auto``, vLLM checks
      each constraint against the backend that suits it, and then runs all on the backend of the first (0.32,
      ``v1/structured_output/__init__.py``): one that suits only the other fails with EngineFailed instead of
      being refused with InvalidRequest.
    - not ``--reasoning-parser``: with it vLLM applies constraints only once it believes reasoning to be over.
    - ``--scheduling-policy priority`` if priorities are to count; otherwise vLLM accepts and ignores them.

    ``priority`` is vLLM's: lower is earlier, 0 is usual. Sampling fields that are None are left to the
    model's ``generation_config.json``. vLLM refuses more log-probabilities than ``--max-logprobs`` (20).

    Args:
        url: where the server is, such as ``http://127.0.0.1:8000``; ``/v1`` at the end is accepted.
        model: which of the served names to use; None for the first that the server lists.
        api_key: the server's ``--api-key``.
        slots: how many generations it runs at once (``--max-num-seqs``), which vLLM tells nobody.
        constraints: the kinds that its backend takes, the ones to prefer first; vLLM tells nobody.
        read_timeout: seconds without a byte after which a generation counts as lost; None for never. It also
            bounds the wait in vLLM's own queue.
        transport: stands in for HTTP in tests.

    Raises BadConfiguration for a URL that is none and for a key that no HTTP header can hold.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        *,
        slots: int = 256,
        constraints: Sequence[ConstraintKind] = CONSTRAINT_KINDS,
        read_timeout: float | None = 600.0,
        transport: Transport | None = None,
    ) -> None:
        self._url = _root(url)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise BadConfiguration(
                "the vLLM API key has a line break or a character that no HTTP header can hold"
            )
        self._wanted = model
        self._slots = slots
        self._constraints = tuple(constraints)
        self._transport = transport or AiohttpTransport(self._url, api_key=api_key, read_timeout=read_timeout)
        self._card = _ModelCard("")
        self._window = 0
        self._version: str | None = None
        self._tells_cached: bool | None = None
        self._flights: set[_Flight] = set()

    async def start(self) -> None:
        """Ask the server what it serves.

        Raises EngineFailed when it cannot be reached or is not ready, BadConfiguration when it refuses the
        key, does not serve the model, or is no vLLM server.
        """
        await self._transport.open()
        try:
            cards = await self._models()
            self._card = self._choose(cards)
            self._window = self._window_of(self._card, cards)
            self._version = await self._ask_version()
        except BaseException:
            await self._transport.close()
            raise

    async def close(self) -> None:
        """Hang up. The server itself goes on; generations in flight end with EngineFailed."""
        for flight in tuple(self._flights):
            flight.end(EngineFailed("the engine was closed"))
        await self._transport.close()

    def info(self) -> EngineInfo:
        """The served name and ``max_model_len``.

        ``details``: ``version`` of vLLM, ``root`` (the checkpoint as the server names it: a path or a hub
        id), and ``tells_cached_tokens`` (None until a generation has ended).
        """
        details = {
            "version": self._version,
            "root": self._card.root,
            "tells_cached_tokens": self._tells_cached,
        }
        return EngineInfo(
            self._card.id, self._window, self._slots, details, self._constraints, True, goes_on=True
        )

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        *,
        stop_token_ids: Sequence[int] = (),
        constraint: Constraint | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[Chunk, None]:
        """Generate, as ``Engine.generate`` says. The last chunk has the token that ended the turn.

        vLLM refuses what it finds wrong with a request before the first chunk, with InvalidRequest.
        """
        if not self._window:
            raise EngineFailed("the engine is not started")
        max_tokens = token_limit(len(prompt_token_ids), sampling.max_tokens, self._window)
        if max_tokens == 0:  # vLLM refuses it
            yield Chunk((), "length")
            return
        body = encode_request(
            self._card.id,
            prompt_token_ids,
            sampling,
            request_id,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            constraint=constraint,
            priority=priority,
        )
        reader = CompletionReader(prompt_token_ids, echoes=sampling.prompt_logprobs is not None)
        flight = _Flight(request_id)
        self._flights.add(flight)
        try:
            try:
                answer = await flight.open(self._transport.post(_COMPLETIONS, body))
                if answer.status != 200:
                    raise await _refusal(answer, len(prompt_token_ids))
                while not reader.done:
                    data = await answer.read()
                    chunk = reader.feed(data) if data else reader.close()
                    if chunk is not None:
                        if chunk.finish is not None:
                            self._note_cached(chunk.cached_tokens)
                        yield chunk
            except ConnectionLost as lost:
                if (last := reader.close(flight.outcome(lost))) is not None:
                    yield last
            if reader.failure is not None:
                raise reader.failure
            await flight.finish()
        finally:
            self._flights.discard(flight)
            flight.hang_up()

    async def abort(self, request_id: str) -> None:
        """Hang up on that generation, at which vLLM frees it; it ends with ``cancelled``."""
        for flight in tuple(self._flights):
            if flight.request_id == request_id:
                flight.end("cancelled")

    def _note_cached(self, cached_tokens: int | None) -> None:
        if self._tells_cached is None and cached_tokens is None:
            _LOG.warning("vLLM does not tell cached tokens; start it with --enable-prompt-tokens-details")
        self._tells_cached = cached_tokens is not None

    async def _ask(self, path: str) -> tuple[int, bytes]:
        try:
            return await self._transport.get(path)
        except ConnectionLost as lost:
            raise EngineFailed(
                f"no vLLM server answers at {self._url}: {lost}; "
                "start one with `vllm serve MODEL`, or correct the URL"
            ) from lost

    async def _models(self) -> list[_ModelCard]:
        status, body = await self._ask("/v1/models")
        if status in (401, 403):
            raise BadConfiguration(
                f"{self._url} refuses the API key (HTTP {status}): give the one vLLM was started with"
            )
        if status >= 500:
            raise EngineFailed(
                f"{self._url} is not ready (HTTP {status}): wait until its /health answers 200"
            )
        try:
            cards = msgspec.json.decode(body, type=_ModelList).data
        except msgspec.DecodeError:
            cards = []
        if status != 200 or not cards:
            raise BadConfiguration(
                f"{self._url}/v1/models lists no models (HTTP {status}): it is no vLLM server"
            )
        return cards

    def _choose(self, cards: list[_ModelCard]) -> _ModelCard:
        if self._wanted is None:
            return cards[0]
        for card in cards:
            if card.id == self._wanted:
                return card
        served = ", ".join(card.id for card in cards)
        raise BadConfiguration(f"vLLM at {self._url} does not serve {self._wanted!r}; it serves: {served}")

    def _window_of(self, card: _ModelCard, cards: list[_ModelCard]) -> int:
        """``max_model_len``, which an adapter's card leaves to its parent's."""
        parents = [other for other in cards if other.id == card.parent]
        for each in (card, *parents):
            if each.max_model_len:
                return each.max_model_len
        raise BadConfiguration(f"{self._url} tells no max_model_len for {card.id!r}: it is no vLLM server")

    async def _ask_version(self) -> str | None:
        """None when a gateway in front of vLLM hides it."""
        status, body = await self._ask("/version")
        try:
            return msgspec.json.decode(body, type=_Version).version if status == 200 else None
        except msgspec.DecodeError:
            return None


class _Flight:
    """One generation under way: what ``abort`` and ``close`` need to end it."""

    __slots__ = ("_opening", "_outcome", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._opening: asyncio.Task[Answer] | None = None
        self._outcome: SingletreeError | StopKind | None = None

    async def open(self, sending: Coroutine[Any, Any, Answer]) -> Answer:
        """The answer to the request being sent. Raises ConnectionLost, also when it was ended meanwhile."""
        self._opening = asyncio.create_task(sending)
        # Unlike awaiting the task, this tells our caller's cancellation from one by ``hang_up``.
        await asyncio.wait((self._opening,))
        if self._outcome is not None:
            raise ConnectionLost("it was ended while it was sent")
        return self._opening.result()

    def end(self, outcome: SingletreeError | StopKind) -> None:
        """Hang up; what reads will find ``outcome``."""
        self._outcome = self._outcome or outcome
        self.hang_up()

    def outcome(self, lost: ConnectionLost) -> SingletreeError | StopKind:
        """What it means that the connection is gone."""
        if self._outcome is not None:
            return self._outcome
        failure = EngineFailed(f"vLLM was lost: {lost}")
        failure.__cause__ = lost
        return failure

    async def finish(self) -> None:
        """All is read: leave the connection fit for the next request."""
        if self._opening is not None and self._outcome is None:
            await self._opening.result().finish()

    def hang_up(self) -> None:
        """Close the connection, wherever the request is; nothing happens to one that was finished."""
        opening = self._opening
        if opening is None:
            return
        if not opening.done():
            opening.cancel()
        elif not opening.cancelled() and opening.exception() is None:
            opening.result().close()


async def _refusal(answer: Answer, prompt_tokens: int) -> SingletreeError:
    body = b""
    while len(body) < _ERROR_BYTES and (data := await answer.read()):
        body += data
    return error_of(answer.status, body, prompt_tokens=prompt_tokens, retry_after=answer.retry_after)


def _root(url: str) -> str:
    """The URL without the ``/v1`` and slashes that may end it. Raises BadConfiguration."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits:
        raise BadConfiguration(f"{url!r} is not the URL of a vLLM server: write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
