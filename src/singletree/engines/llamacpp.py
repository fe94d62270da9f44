"""llama.cpp as an engine: the ``xllamacpp`` wheel in a child process, driven with token ids.

Tokens travel over llama.cpp's own HTTP interface on a private UNIX socket. The wheel's in-process calls
would need a thread for each stream, tell token ids only as a by-product of log-probabilities, and cached
tokens only at the end.

llama.cpp does not tell all tokens live: of a character that several tokens spell, only the last is in the
stream (``process_token`` in tools/server/server-context.cpp), with the text of all and the count of tokens so
far. The missing ones are found by spelling that text as the vocabulary spells it. That is how a model writes
it, too; should it ever spell otherwise, the text is right all the same and the ids differ from those in the
engine's cache, which costs that tail of the cache on the next turn and nothing else. A character that is cut
before its last token is not told at all.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from singletree.conversation import Sampling
from singletree.engines import llamacpp_wire as wire
from singletree.engines.admission import Admission, Ticket
from singletree.engines.engine import Chunk, Constraint, EngineInfo, token_limit
from singletree.engines.gguf_header import GgufHeader, read_header
from singletree.engines.llamacpp_flight import Flight
from singletree.engines.llamacpp_process import LlamaProcess
from singletree.engines.machine import usable_cores, usable_memory
from singletree.engines.revival import Revival
from singletree.errors import BadConfiguration, EngineFailed, SingletreeError

_LOG = logging.getLogger(__name__)

_KV_SHARE = 8  # unless told otherwise, the KV cache takes at most one part in so many of the memory
_KV_STEP = 256  # llama.cpp rounds the cache up to multiples of this
_DEFAULT_WINDOW = 4096
_SPELLINGS_KEPT = 4096
_URL = "http://llama.cpp"
# llama.cpp looks once a second whether a client is still there, and frees the slot after the current batch.
_NOTICE_SECONDS = 1.2
_LONGEST_NOTICE_SECONDS = 60.0
_DEATH_SECONDS = 1.0


class LlamaCppEngine:
    """Runs a GGUF model. Generations share one KV cache; each reuses the longest prefix that a slot holds.

    The token that ends the turn is the last of ``token_ids``, be it the model's own or one of
    ``stop_token_ids``. How much of the prompt was cached is told by the first chunk, which has no tokens and
    comes before the prompt is read.

    Sampling: penalties look at the whole context, prompt included; log-probabilities are the model's own,
    before temperature and filters. What is None is left to the model's file, else to llama.cpp (temperature
    0.8, top_k 40, top_p 0.95, min_p 0.05).

    Args:
        path: the GGUF file; of a split model, the first part.
        name: what ``info`` calls it; None for the file's name.
        slots: how many generations run at once; more wait in line.
        context_window: longest prompt and answer together, in tokens; None for what the model was trained
            for, or less if memory is short.
        kv_tokens: room in the KV cache for all slots together, in tokens; None for a full window each, or for
            what fits in an eighth of the memory. Where full windows do not fit, generations wait for room.
        threads: None for as many as there are cores.
        batch_tokens: how many prompt tokens are read between two steps of the other generations. More makes
            the others wait longer and is hardly faster on a CPU (512: 2 % less time a token).
        cache_ram_mib: memory for prefixes that left the slots, in MiB; 0 for none.
        queue_limit: how many requests may wait in line before more are refused with Overloaded.
        verbose: let llama.cpp log to standard error.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        name: str | None = None,
        slots: int = 4,
        context_window: int | None = None,
        kv_tokens: int | None = None,
        threads: int | None = None,
        batch_tokens: int = 256,
        cache_ram_mib: int = 2048,
        queue_limit: int = 256,
        verbose: bool = False,
    ) -> None:
        self._path = Path(path)
        self._name = name or self._path.stem
        self._slots = slots
        self._wanted_window = context_window
        self._wanted_kv = kv_tokens
        self._threads = threads or usable_cores()
        self._batch_tokens = batch_tokens
        self._cache_ram_mib = cache_ram_mib
        self._queue_limit = queue_limit
        self._verbose = verbose
        self._window = 0
        self._kv_tokens = 0
        self._settings: dict[str, Any] = {}
        self._process: LlamaProcess | None = None
        self._revival = Revival()
        self._reviving = asyncio.Lock()
        self._closed = False
        self._session: aiohttp.ClientSession | None = None
        self._admission = Admission(slots, 0, queue_limit)
        self._flights: set[Flight] = set()
        self._leaving: dict[asyncio.Task[None], Sequence[int]] = {}
        self._spellings: dict[str, list[int]] = {}

    async def start(self) -> None:
        """Load the model, in the child process.

        Raises WeightsUnavailable for a file that is missing or damaged, BadConfiguration when xllamacpp is
        not installed or the window exceeds the model's, EngineFailed when llama.cpp cannot load it.
        """
        if importlib.util.find_spec("xllamacpp") is None:
            raise BadConfiguration("llama.cpp is not installed: pip install 'singletree[llamacpp]'")
        header = await asyncio.to_thread(read_header, self._path)
        self._window, self._kv_tokens = self._plan(header)
        self._admission = Admission(self._slots, self._kv_tokens, self._queue_limit)
        self._settings = {
            "path": str(self._path),
            "slots": self._slots,
            "kv_tokens": self._kv_tokens,
            "threads": self._threads,
            "batch_tokens": self._batch_tokens,
            "cache_ram_mib": self._cache_ram_mib,
            "verbosity": 3 if self._verbose else 1,
        }
        self._closed = False
        await self._spawn()

    async def _spawn(self) -> None:
        self._revival.started()
        process = await LlamaProcess.spawn(self._settings, verbose=self._verbose)
        if self._closed:
            await process.stop()
            raise EngineFailed("the engine was closed")
        self._process = process
        # llama.cpp drops connections that were idle for 5 s; a request must not meet that moment.
        connector = aiohttp.UnixConnector(process.socket, limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async def _running(self) -> aiohttp.ClientSession:
        """How llama.cpp is reached; one that died is started again, at once or after a pause if it keeps dying.

        Raises EngineFailed when it does not start or was closed, Overloaded while the pause lasts.
        """
        if self._process is not None and self._process.ended:
            async with self._reviving:
                await self._revive()
        if self._session is None:
            raise EngineFailed("the engine is not running; start it first")
        return self._session

    async def _revive(self) -> None:
        """What the dead one held is gone with it: slots, prefixes, and the generations in flight, which were told."""
        dead, session = self._process, self._session
        if dead is None or not dead.ended:
            return  # somebody else has done it, or closed the engine
        if session is not None:
            self._session = None
            self._revival.died()
            await session.close()
            await dead.stop()
        self._revival.check()
        _LOG.warning("llama.cpp died and is started again")
        try:
            await self._spawn()
        except EngineFailed:
            self._revival.died()
            raise

    def _plan(self, header: GgufHeader) -> tuple[int, int]:
        """The window, and the room for all slots, both in tokens. Raises BadConfiguration."""
        trained, wanted = header.context_window or _DEFAULT_WINDOW, self._wanted_window
        if wanted is not None and wanted > trained:
            raise BadConfiguration(
                f"{self._name} was not trained for a context window of {wanted}: give {trained} or less"
            )
        window, room = wanted or trained, self._wanted_kv
        if room is None:
            cost = header.kv_bytes_per_token
            affordable = usable_memory() // _KV_SHARE // cost if cost else window
            room = max(min(window * self._slots, affordable), wanted or 1)
        room = -(-room // _KV_STEP) * _KV_STEP
        return min(window, room), room

    async def close(self) -> None:
        """End llama.cpp; generations in flight end with EngineFailed."""
        self._closed = True
        for flight in tuple(self._flights):
            flight.end(EngineFailed("the engine was closed"))
        for task in tuple(self._leaving):
            task.cancel()
        session, self._session = self._session, None
        process, self._process = self._process, None
        if session is not None:
            await session.close()
        if process is not None:
            await process.stop()

    def info(self) -> EngineInfo:
        """``details``: ``version`` of xllamacpp, ``threads`` and ``kv_tokens``."""
        details = {
            "version": self._process.version if self._process else None,
            "threads": self._threads,
            "kv_tokens": self._kv_tokens,
        }
        return EngineInfo(self._name, self._window, self._slots, details, wire.CONSTRAINT_KINDS, goes_on=True)

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
        """Generate, as ``Engine.generate`` says."""
        await self._running()
        limit = token_limit(len(prompt_token_ids), sampling.max_tokens, self._window)
        body = wire.encode_request(prompt_token_ids, sampling, limit=limit, constraint=constraint)
        reader = wire.StreamReader(limit, stop_token_ids, logprobs=sampling.logprobs is not None)
        need = min(len(prompt_token_ids) + limit + 1, self._window)
        await self._let_go(prompt_token_ids)
        flight = Flight(request_id, self._admission.ticket(need, priority))
        self._flights.add(flight)
        last = Chunk((), "cancelled")
        try:
            response = await flight.open(self._running, f"{_URL}/completion", body)
            if response is not None:
                if response.status != 200:
                    raise wire.error_of(response.status, await response.read())
                async for data in response.content.iter_any():
                    if (chunk := reader.take(await self._events(reader, data))) is None:
                        continue
                    if chunk.finish is not None:
                        last = chunk
                        break
                    yield chunk
                else:
                    raise aiohttp.ClientPayloadError("the stream ended without its last event")
        except (aiohttp.ClientError, OSError) as error:
            if flight.outcome is None:
                raise await self._lost(error) from error
        finally:
            self._flights.discard(flight)
            flight.hang_up()
            self._release(flight.ticket, prompt_token_ids, freed=reader.ended)
        if isinstance(flight.outcome, SingletreeError):
            raise flight.outcome
        yield last

    async def abort(self, request_id: str) -> None:
        """Hang up on that generation, at which llama.cpp frees its slot; it ends with ``cancelled``."""
        for flight in tuple(self._flights):
            if flight.request_id == request_id:
                flight.end("cancelled")

    async def _events(self, reader: wire.StreamReader, data: bytes) -> list[wire.Event]:
        events = reader.feed(data)
        for event in events:
            if event.untold:
                event.tokens = await self._spelling(event.content)
        return events

    async def _spelling(self, text: str) -> list[int]:
        spelled = self._spellings.get(text)
        if spelled is None:
            if self._session is None:
                raise EngineFailed("the engine was closed")
            async with self._session.post(f"{_URL}/tokenize", data=wire.encode_spelling(text)) as answer:
                spelled = wire.decode_spelling(await answer.read(), text)
            if len(self._spellings) >= _SPELLINGS_KEPT:
                del self._spellings[next(iter(self._spellings))]
            self._spellings[text] = spelled
        return spelled

    async def _lost(self, error: Exception) -> EngineFailed:
        how = f"the connection broke ({type(error).__name__})"
        if self._process is not None and (death := await self._process.death(_DEATH_SECONDS)):
            how = f"it ended with {death}"
        return EngineFailed(f"llama.cpp was lost: {how}; the next request starts it again")

    async def _let_go(self, prompt_token_ids: Sequence[int]) -> None:
        """Wait for the slot of a generation that was ended early if this prompt goes on from its prompt.

        llama.cpp notices a hang-up only with the next token; until then it would take another slot, whose cache
        knows nothing of the conversation.
        """
        goes_on = [
            task
            for task, prompt in self._leaving.items()
            if len(prompt) <= len(prompt_token_ids) and list(prompt_token_ids[: len(prompt)]) == list(prompt)
        ]
        if goes_on:
            await asyncio.wait(goes_on)

    def _release(self, ticket: Ticket, prompt_token_ids: Sequence[int], *, freed: bool) -> None:
        """Give slot and room back: at once if that can hurt nobody, else when llama.cpp has freed them."""
        roomy = self._kv_tokens >= self._slots * self._window
        watched = not freed and ticket.is_granted and self._session is not None
        if roomy or not watched:
            ticket.release()
        if watched:
            task = asyncio.create_task(self._release_when_free(ticket))
            self._leaving[task] = prompt_token_ids
            task.add_done_callback(lambda done: self._leaving.pop(done, None))

    async def _release_when_free(self, ticket: Ticket) -> None:
        """If its KV cache overflows llama.cpp fails every generation, so be sure that there is room."""
        try:
            async with asyncio.timeout(_LONGEST_NOTICE_SECONDS):
                pause = _NOTICE_SECONDS
                while pause:
                    await asyncio.sleep(pause)
                    pause = _NOTICE_SECONDS / 10 if await self._busy_slots() > len(self._flights) else 0
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass  # Nobody is served by waiting on.
        finally:
            ticket.release()

    async def _busy_slots(self) -> int:
        if self._session is None:
            return 0
        async with self._session.get(f"{_URL}/slots") as answer:
            return sum(bool(slot.get("is_processing")) for slot in await answer.json())
