"""llama.cpp as an engine: the ``xllamacpp`` wheel in a child process, with token ids in and out.

Tokens travel over llama.cpp's own HTTP interface on a private UNIX socket. The wheel's in-process calls would need a
thread for each stream, return token ids only as a by-product of log-probabilities, and report cached tokens only at
the end.

llama.cpp does not stream all token ids. Where several tokens form one character, the stream contains only the id of
the last one (``process_token`` in tools/server/server-context.cpp), with the text of all of them and the count of
tokens so far. The missing ids are recovered by tokenizing that text. A model normally writes the same tokens; if it
does not, the text is still right, but the ids differ from those in the engine's cache, so that the cache does not
match from there on in the next turn, and nothing else happens. A character that is cut before its last token is not
streamed at all.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from singletree.engines.abilities import ABILITIES
from singletree.engines.devices import KV_SHARE, usable_cores, usable_memory
from singletree.engines.engine import Chunk, EngineInfo, GenerationJob, token_limit
from singletree.engines.lifetime import RestartBackoff
from singletree.errors import BadConfiguration, EngineFailed, EngineUnfit, SingletreeError
from singletree.gguf import GgufHeader, read_header
from singletree.llamacpp import wire
from singletree.llamacpp.admission import Admission, Ticket
from singletree.llamacpp.picture_prompt import NO_PROJECTOR, MarkupDecoder, PictureSession
from singletree.llamacpp.prefix_cache import (
    PrefillEstimator,
    PrefillSpeed,
    PrefixFolder,
    SlotStates,
    keep_seconds,
)
from singletree.llamacpp.prefix_files import pack_ids
from singletree.llamacpp.process import LlamaProcess
from singletree.llamacpp.slots import Claim, ParkedStates, SlotActions, parking_root
from singletree.lru import LruCache
from singletree.model_files.saved_cache import open_folder
from singletree.pictures import PromptPicture, comparable_tokens
from singletree.remote.http_client import HttpTransport, over_unix
from singletree.remote.transport import ConnectionLost, InFlightRequest, Pieces, StreamedResponse, ask, begun

_LOG = logging.getLogger(__name__)

_KV_STEP = 256  # llama.cpp rounds the size of the cache up to a multiple of this
_DEFAULT_WINDOW = 4096
_TOKENIZATIONS_KEPT = 4096
# llama.cpp checks once a second whether a client is still connected, and frees the slot after the current batch.
_FREE_SLOT_SECONDS = 1.2
_MAX_FREE_SLOT_SECONDS = 60.0
_EXIT_SECONDS = 1.0
_SAVE_SECONDS = 15.0


class LlamaCppEngine:
    """Run a GGUF model. Generations share one KV cache; each reuses the longest prefix that a slot holds.

    A conversation keeps its slot between its turns for some seconds. When another one takes the slot, its state is
    parked, and restored for its next turn.

    The token that ends the turn is the last of ``token_ids``, whether it is the model's own or one of
    ``stop_token_ids``. The first chunk reports how much of the prompt was cached; it has no tokens and comes before
    the prompt is read.

    Sampling: penalties apply to the whole context, including the prompt; log-probabilities are the model's own,
    before temperature and filters. Fields that are None are left to the model's file, else to llama.cpp
    (temperature 0.8, top_k 40, top_p 0.95, min_p 0.05).

    Args:
        path: the GGUF file; for a split model, its first part.
        name: the model's name in ``info``; None for the file's name.
        slots: how many generations run at once; more are queued.
        context_window: longest prompt and answer together, in tokens; None for the window the model was
            trained for, or less if memory is short.
        kv_tokens: room in the KV cache for all slots together, in tokens; None for a full window for each slot, or
            for what fits in an eighth of the memory. Where full windows do not fit, generations wait for room.
        threads: how many threads compute; None for one for each physical core.
        batch_tokens: how many prompt tokens are read between two steps of the other generations. A larger number
            makes the others wait longer and is hardly faster on a CPU (512: 2 % less time for a token).
        cache_ram_mib: memory for parked states, in MiB; 0 for none. They are in a folder for temporary files where
            the system has no file system in memory, or too small a one.
        prefix_cache_path: folder in which sessions are saved after each turn, so that a restarted engine need not
            read them again; None for none.
        prefix_cache_limit: largest size of the saved sessions, in bytes; the least recently used are removed.
        prefix_cache_key: encrypts the saved sessions; None for plain files.
        queue_limit: how many requests may wait; more are refused with Overloaded.
        mmproj: the GGUF file of the vision projector; None if the model gets no pictures.
        decoder: the model's tokenizer, which prompts with pictures need; None if the model gets no pictures.
        temperature: that of requests that set none; None for llama.cpp's own.
        verbose: whether llama.cpp logs to standard error.
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
        prefix_cache_path: Path | None = None,
        prefix_cache_limit: int = 8 * 2**30,
        prefix_cache_key: str | None = None,
        queue_limit: int = 256,
        mmproj: Path | None = None,
        decoder: MarkupDecoder | None = None,
        temperature: float | None = None,
        verbose: bool = False,
    ) -> None:
        self._path = Path(path)
        self._name = name or self._path.stem
        self._slots = slots
        self._wanted_window = context_window
        self._wanted_kv = kv_tokens
        self._threads = threads or usable_cores()
        self._batch_tokens, self._cache_ram_mib = batch_tokens, cache_ram_mib
        # A saved state is found by token ids alone, and two pictures have the same placeholder.
        self._saved: PrefixFolder | None = None
        if prefix_cache_path is not None and (mmproj is None or decoder is None):
            self._saved = PrefixFolder(prefix_cache_path, prefix_cache_limit, prefix_cache_key)
        self._states: SlotStates | None = None
        self._token_bytes: int | None = None
        self._queue_limit = queue_limit
        self._mmproj = mmproj if decoder is not None else None
        self._pictures = (
            PictureSession(decoder, self._post_pictures) if decoder is not None and mmproj else None
        )
        if prefix_cache_path is not None and self._saved is None:
            _LOG.warning("prompts are not saved in %s: this model sees pictures", prefix_cache_path)
        self._temperature, self._verbose = temperature, verbose
        self._speed = PrefillSpeed()
        self._window = 0
        self._kv_tokens = 0
        self._settings: dict[str, Any] = {}
        self._process: LlamaProcess | None = None
        self._backoff = RestartBackoff()
        self._restarting = asyncio.Lock()
        self._closed = False
        self._transport: HttpTransport | None = None
        self._admission = self._new_admission()
        self._in_flight: set[InFlightRequest] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._tokenizations: LruCache[str, list[int]] = LruCache(entries=_TOKENIZATIONS_KEPT)

    async def start(self) -> None:
        """Load the model in the child process.

        Raises WeightsUnavailable for a file that is missing or damaged, BadConfiguration when xllamacpp is
        not installed or the window exceeds the model's, EngineFailed when llama.cpp cannot load the model.
        """
        if importlib.util.find_spec("xllamacpp") is None:
            raise BadConfiguration("llama.cpp is not installed: pip install 'singletree[llamacpp]'")
        header = await asyncio.to_thread(read_header, self._path)
        self._window, self._kv_tokens = self._plan(header)
        self._token_bytes = header.kv_bytes_per_token
        if self._saved is not None:
            await asyncio.to_thread(open_folder, self._saved.folder)
        self._admission = self._new_admission()
        self._settings = {
            "path": str(self._path),
            "slots": self._slots,
            "kv_tokens": self._kv_tokens,
            "threads": self._threads,
            "batch_tokens": self._batch_tokens,
            "temperature": self._temperature,
            # llama.cpp's own cache copies every idle slot whenever a request starts; it is used only with pictures.
            "cache_ram_mib": self._cache_ram_mib if self._pictures else 0,
            "cache_idle_slots": self._pictures is not None,
            "verbosity": 3 if self._verbose else 1,
            "mmproj": str(self._mmproj) if self._mmproj else None,
            "media_marker": self._pictures.marker if self._pictures else "",
            "parking_root": await asyncio.to_thread(parking_root, self._parking_limit),
        }
        self._closed = False
        await self._spawn()
        if self._pictures is not None:
            try:
                await self._pictures.calibrate()
            except BaseException:
                await self.close()
                raise

    def _new_admission(self) -> Admission:
        return Admission(
            self._slots,
            self._kv_tokens,
            self._queue_limit,
            copies=self._parking_limit > 0,
            keep_seconds=self._keep_seconds,
            known=lambda packed_ids: self._states.known(packed_ids) if self._states else 0,
            speed=lambda: self._speed.tokens_per_second,
        )

    @property
    def _parking_limit(self) -> int:
        """The largest size of all parked states in bytes; 0 for a model with pictures: llama.cpp cannot save them."""
        return 0 if self._pictures is not None else self._cache_ram_mib * 2**20

    def _keep_seconds(self, tokens: int) -> float:
        if self._pictures is not None:
            return 0.0  # llama.cpp chooses the slots.
        size = tokens * (self._token_bytes or 0)
        is_parked = self._parking_limit >= size > 0
        return keep_seconds(tokens, size if is_parked else None, self._speed.tokens_per_second)

    async def _spawn(self) -> None:
        self._backoff.record_start()
        process = await LlamaProcess.spawn(self._settings, verbose=self._verbose)
        if self._closed:
            await process.stop()
            raise EngineFailed("the engine was closed")
        self._process = process
        # An idle connection keeps one of llama.cpp's threads, and a new one over a UNIX socket costs next to nothing.
        transport = HttpTransport("http://llama.cpp", connect=over_unix(process.socket), keep_alive=False)
        await transport.open()
        self._transport = transport
        actions = SlotActions(transport, process.states)
        limit = self._parking_limit
        parked = ParkedStates(actions, limit, self._token_bytes) if limit else None
        prefixes = None
        if (saved := self._saved) is not None:
            prefixes = await saved.open(self._path, process, actions, self._token_bytes, self._admission)
        self._states = SlotStates(self._admission, actions, parked, prefixes)
        self._admission.forget_states()

    async def _running(self) -> HttpTransport:
        """Return the client that reaches llama.cpp. If the process died, start it again first.

        Raises EngineFailed when it does not start or was closed, Overloaded while a process that keeps dying has to
        pause before its next start.
        """
        if self._process is not None and self._process.ended:
            async with self._restarting:
                await self._restart()
        if self._transport is None:
            raise EngineFailed("the engine is not running: start it first")
        return self._transport

    async def _restart(self) -> None:
        """Start llama.cpp again, once for each death. Slots and cached prefixes are lost; generations have failed."""
        dead, transport = self._process, self._transport
        if dead is None or not dead.ended:
            return  # another request has restarted it, or the engine was closed
        if transport is not None:
            self._transport = None
            self._backoff.record_death()
            await transport.close()
            if self._states is not None:
                await self._states.close(0)
            await dead.stop()
        self._backoff.check()
        _LOG.warning("llama.cpp ended unexpectedly; starting it again")
        try:
            await self._spawn()
        except EngineFailed:
            self._backoff.record_death()
            raise

    def _plan(self, header: GgufHeader) -> tuple[int, int]:
        """Return the context window and the size of the KV cache, in tokens. Raises BadConfiguration."""
        trained, wanted = header.context_window or _DEFAULT_WINDOW, self._wanted_window
        if wanted is not None and wanted > trained:
            raise BadConfiguration(
                f"a context window of {wanted} tokens is more than {self._name} was trained for: give {trained} or less"
            )
        window, room = wanted or trained, self._wanted_kv
        if room is None:
            cost = header.kv_bytes_per_token
            affordable = usable_memory() // KV_SHARE // cost if cost else window
            room = max(min(window * self._slots, affordable), wanted or 1)
        room = -(-room // _KV_STEP) * _KV_STEP
        return min(window, room), room

    async def close(self) -> None:
        self._closed = True
        for request in tuple(self._in_flight):
            request.end(EngineFailed("the engine was closed"))
        for task in tuple(self._ending):
            task.cancel()
        if self._states is not None:
            await self._states.close(_SAVE_SECONDS)
        transport, self._transport = self._transport, None
        process, self._process = self._process, None
        if transport is not None:
            await transport.close()
        if process is not None:
            await process.stop()

    def info(self) -> EngineInfo:
        """Return name and limits.

        ``details`` has the ``version`` of xllamacpp, ``threads``, ``kv_tokens``, and ``prompt_tokens_per_second``
        (None until a prompt has been read).
        """
        details: dict[str, Any] = {
            "version": self._process.version if self._process else None,
            "threads": self._threads,
            "kv_tokens": self._kv_tokens,
            "prompt_tokens_per_second": self._speed.tokens_per_second,
        }
        if self._pictures is not None:
            details["retokenized_tokens"] = self._pictures.prompts.changed_tokens
            details["neutralized_sections"] = self._pictures.prompts.neutralized_sections
        return ABILITIES["llamacpp"].info(
            self._name,
            self._window,
            self._slots,
            details,
            blindness=NO_PROJECTOR if self._pictures is None else None,
            salts=self._pictures is None,  # with pictures llama.cpp chooses the slots
            started_at=self._backoff.started_at,
        )

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        await self._running()
        prompt, sampling = comparable_tokens(job.prompt_token_ids, job.pictures), job.sampling
        text, counts = await self._with_pictures(job)
        length = len(prompt) - len(counts) + sum(counts)
        limit = token_limit(length, sampling.max_tokens, self._window)
        body = wire.encode_llamacpp_request(job, limit=limit, prompt=text)
        reader = wire.StreamReader(limit, job.stop_token_ids, logprobs=sampling.logprobs is not None)
        need = min(length + limit + 1, self._window)
        ids, salt = pack_ids(prompt, job.cache_salt), job.cache_salt
        claim = Claim(ids, need, job.priority, job.session, job.is_subagent, salt, job.outlook)
        ticket = self._admission.ticket(claim)
        request = InFlightRequest(job.request_id)
        self._in_flight.add(request)
        reading = PrefillEstimator(self._speed)
        last = Chunk((), "cancelled")
        generated: list[int] = []
        try:
            response = await request.open(self._send(ticket, body))
            if response is not None:
                if response.status != 200:
                    refusal = b"".join([data async for data in Pieces(response)])
                    raise wire.decode_llamacpp_error(response.status, refusal)
                async for data in Pieces(response):
                    events = await self._events(reader, data)
                    _log_reading_time(job.request_id, reading, events)
                    if (chunk := reader.take(events)) is None:
                        continue
                    if counts and chunk.cached_tokens is not None:
                        chunk.prompt_tokens, chunk.picture_tokens = reader.prompt_tokens, counts
                    generated += chunk.token_ids
                    if chunk.finish is not None:
                        last = chunk
                        break
                    yield chunk
                else:
                    raise ConnectionLost("the stream ended without its last event")
        except (ConnectionLost, OSError) as error:
            if request.outcome is None:
                raise await self._connection_error(error) from error
        finally:
            self._in_flight.discard(request)
            request.hang_up()
            self._release(ticket, reader, generated)
        if isinstance(request.outcome, SingletreeError):
            raise request.outcome
        yield last

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        """Return how many tokens llama.cpp's own processor makes of the picture; it is not encoded for that."""
        if self._pictures is None:
            raise EngineUnfit(NO_PROJECTOR)
        await self._running()
        return await self._pictures.count(picture)

    async def _with_pictures(self, job: GenerationJob) -> tuple[dict[str, Any] | None, list[int]]:
        """Return the prompt as text and pictures, and the length of each picture; None where it has none."""
        if not job.pictures:
            return None, []
        counts = [await self.count_picture_tokens(picture) for picture in job.pictures]
        assert self._pictures is not None
        return await self._pictures.write(job), counts

    async def _post_pictures(self, path: str, body: bytes) -> tuple[int, bytes]:
        try:
            return await self._ask(path, body)
        except ConnectionLost as lost:
            raise await self._connection_error(lost) from lost

    async def _ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        if self._transport is None:
            raise EngineFailed("the engine was closed")
        return await ask(self._transport, path, body)

    async def _send(self, ticket: Ticket, body: bytes) -> StreamedResponse:
        """Wait for the ticket and send the request. The process that ran before may have died meanwhile."""
        await ticket.granted()
        transport = await self._running()
        found = ticket.found
        if self._states is not None:
            found = await self._states.prepare(ticket)
        if self._pictures is None:
            reuses = not ticket.is_salted_anew or found > 0
            body = wire.with_slot(body, ticket.slot, reuses=reuses)
        return await begun(transport.post("/completion", body))

    async def abort(self, request_id: str) -> None:
        """Close the connection of that generation: llama.cpp frees its slot, and it ends with ``cancelled``."""
        for request in tuple(self._in_flight):
            if request.request_id == request_id:
                request.end("cancelled")

    async def _events(self, reader: wire.StreamReader, data: bytes) -> list[wire.StreamEvent]:
        events = reader.feed(data)
        for event in events:
            if event.tokens_missing:
                event.tokens = await self._tokenize(event.content)
        return events

    async def _tokenize(self, text: str) -> list[int]:
        token_ids = self._tokenizations.get(text)
        if token_ids is None:
            _, answer = await self._ask("/tokenize", wire.encode_tokenize_request(text))
            token_ids = wire.decode_tokenize_response(answer, text)
            self._tokenizations.put(text, token_ids)
        return token_ids

    async def _connection_error(self, error: Exception) -> EngineFailed:
        reason = str(error)
        if self._process and (ending := await self._process.exit_reason(_EXIT_SECONDS)):
            reason = f"its process ended with {ending}"
        return EngineFailed(
            f"llama.cpp failed during the generation: {reason}; the next request starts it again"
        )

    def _release(self, ticket: Ticket, reader: wire.StreamReader, generated: Sequence[int]) -> None:
        """Return slot and room: at once, or when llama.cpp has noticed that the request was left early."""
        prompt = ticket.claim.packed_ids
        if reader.ended:
            # The last token of an answer is sampled, and not yet in the cache.
            held = prompt + pack_ids(generated[:-1], ticket.claim.salt)
            ticket.release(held, len(prompt) // 4, is_kept=True)
            if self._states is not None and self._transport is not None:
                self._states.turn_ended(ticket.slot)
            return
        held = prompt[: reader.read_tokens * 4]
        if not ticket.is_granted or self._transport is None:
            ticket.release()
            return
        self._admission.leave_early(ticket, held, len(held) // 4)
        task = asyncio.create_task(self._release_when_free(ticket, held))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _release_when_free(self, ticket: Ticket, held: bytes) -> None:
        """Release the ticket when llama.cpp has freed the slot: if its KV cache overflows, every generation fails."""
        try:
            async with asyncio.timeout(_MAX_FREE_SLOT_SECONDS):
                pause = _FREE_SLOT_SECONDS
                while pause:
                    await asyncio.sleep(pause)
                    pause = _FREE_SLOT_SECONDS / 10 if await self._is_busy(ticket.slot) else 0
        except (TimeoutError, ConnectionLost):
            held = b""  # Waiting longer would help nobody.
        finally:
            ticket.release(held, len(held) // 4)
            if held and self._states is not None:
                self._states.turn_ended(ticket.slot)

    async def _is_busy(self, slot: int) -> bool:
        busy = await self._busy_slots()
        # With pictures llama.cpp chooses the slots, so only their number is known.
        return len(busy) > len(self._in_flight) if self._pictures is not None else slot in busy

    async def _busy_slots(self) -> list[int]:
        if self._transport is None:
            return []
        _, answer = await self._transport.get("/slots")
        return [slot["id"] for slot in msgspec.json.decode(answer) if slot.get("is_processing")]


def _log_reading_time(request_id: str, reading: PrefillEstimator, events: Sequence[wire.StreamEvent]) -> None:
    for event in events:
        if (progress := event.prompt_progress) is not None:
            seconds = progress.time_ms / 1000
            line = reading.estimate(progress.total, progress.cache, progress.processed, seconds)
            if line is not None:
                _LOG.info("id=%s %s", request_id, line)
