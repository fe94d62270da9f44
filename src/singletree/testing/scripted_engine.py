"""An engine without a model: it plays scripts at a set pace. For tests, demos and benchmarks."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from singletree.conversation import Sampling
from singletree.engines.abilities import ABILITIES
from singletree.engines.engine import (
    Chunk,
    Constraint,
    EngineInfo,
    GenerationJob,
    PictureSupport,
    StopKind,
    token_limit,
)
from singletree.errors import EngineFailed, InvalidRequest, Overloaded, SingletreeError
from singletree.lru import LruCache
from singletree.pictures import PromptPicture, comparable_tokens
from singletree.prefixes import common_text_prefix
from singletree.private_files import open_private
from singletree.testing.scripts import DecodeTokens, EncodeText, Script, ScriptBook, ScriptChooser

_DEFAULT_TEXT = "Hello there."
# Without a delay, other tasks run after so many chunks: to yield to the event loop costs as much as several chunks.
_CHUNKS_PER_YIELD = 16
_TIMELINES_KEPT = 16
_WIDTH = array("I").itemsize

_STOP: StopKind = "stop"
_LENGTH: StopKind = "length"


# Pairs of seconds to wait and a chunk to yield; None instead of a chunk: the engine fails.
_Timeline = list[tuple[float, Chunk | None]]


@dataclass(slots=True)
class PlayedGeneration:
    """The record of one generation, for tests.

    Attributes:
        prompt: the token ids of the prompt.
        sampling: the sampling of the job, which the engine does not obey.
        constraint: the constraint of the job, which the engine does not obey.
        script: the name of the script, or the text of the marker; empty for the default.
        cached_tokens: how many prompt tokens were reported as cached.
        token_ids: the generated tokens, once it has ended.
        finish: the finish reason; None while it runs and when it failed or was closed.
    """

    request_id: str
    prompt: array[int]
    sampling: Sampling
    constraint: Constraint | None
    priority: int
    script: str
    cached_tokens: int
    token_ids: Sequence[int] = ()
    finish: StopKind | None = None
    pictures: tuple[PromptPicture, ...] = ()
    cache_salt: str = ""

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return tuple(self.prompt)


class ScriptedEngine:
    """Play scripts. The last marker in the prompt chooses one:

    - ``[[script:NAME]]`` plays a script; ``[[script:A,B]]`` plays A on the first turn after the marker, then
      B, then the default. ``ScriptBook`` describes the files.
    - ``[[gen:COUNT:CHUNK:DELAY]]`` plays filler: COUNT tokens, CHUNK at once, DELAY seconds apart.
    - ``[[echo:TEXT]]`` plays TEXT, ``[[echo@DELAY:TEXT]]`` with DELAY seconds between chunks.

    The end token, if there is one, is the last of ``token_ids``. Constraints and sampling are recorded but not obeyed.

    Args:
        encode: converts text to token ids: special tokens by name, nothing added.
        decode: converts token ids to text, special tokens by name.
        scripts: a folder or a mapping of scripts by name.
        name: the model's name in ``info``.
        default: the output for a prompt without a marker.
        delay: seconds between chunks. The pace is kept on average: a late chunk does not delay the next.
        chunk: tokens in a chunk.
        end_token_id: ends every complete script; None for no end token.
        context_window: longest prompt and answer together, in tokens.
        slots: reported by ``info``; no request waits for a slot.
        log_tokens: how many prompt tokens ``log`` keeps; its oldest generations are dropped first.
        log_path: a file that gets a line of JSON for each generation when it ends, with token ids and Unix time.
        log_text: whether those lines have the texts as well.
        cached_prompts: how many prompts with their generations count as cached.
        pictures: how the engine takes pictures; None for none. It does not look at them.
        picture_tokens: how many tokens each of them takes.
    """

    def __init__(
        self,
        encode: EncodeText,
        decode: DecodeTokens,
        scripts: Path | Mapping[str, str | Sequence[int] | Script] | None = None,
        *,
        name: str = "scripted",
        default: str | Script = _DEFAULT_TEXT,
        delay: float = 0.0,
        chunk: int = 1,
        end_token_id: int | None = None,
        context_window: int = 262_144,
        slots: int = 256,
        log_tokens: int = 2_000_000,
        log_path: Path | None = None,
        log_text: bool = False,
        cached_prompts: int = 64,
        pictures: PictureSupport | None = None,
        picture_tokens: int = 16,
    ) -> None:
        book = ScriptBook(scripts, encode)
        script = default if isinstance(default, Script) else Script(default)
        self._chooser = ScriptChooser(book, script, encode, decode)
        self._decode = decode
        blindness = "the scripted engine takes no pictures" if pictures is None else None
        info = ABILITIES["scripted"].info(name, context_window, slots, None, blindness=blindness)
        self._info = info if pictures is None else replace(info, pictures=pictures)
        self._picture_tokens = picture_tokens
        self._delay = delay
        self._chunk = max(1, chunk)
        self._end = () if end_token_id is None else (end_token_id,)
        self._log_path = log_path
        self._log_text = log_text
        self._memories = defaultdict[str, PrefixMemory](partial(PrefixMemory, cached_prompts))
        self._timelines: LruCache[tuple[object, ...], _Timeline] = LruCache(entries=_TIMELINES_KEPT)
        self._playing: set[_Playing] = set()
        self._faults: Counter[str] = Counter()
        self._open = False
        self._log_room = log_tokens
        self.log: deque[PlayedGeneration] = deque()

    async def start(self) -> None:
        self._open = True

    async def close(self) -> None:
        self._open = False
        for playing in tuple(self._playing):
            playing.end(EngineFailed("the engine was closed"))

    def info(self) -> EngineInfo:
        return self._info

    async def abort(self, request_id: str) -> None:
        for playing in tuple(self._playing):
            if playing.played.request_id == request_id:
                playing.end("cancelled")

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        if not self._open:
            raise EngineFailed("the engine is not running: start it first")
        sampling, prompt = job.sampling, array("I", job.prompt_token_ids)
        if job.pictures and self._info.pictures is None:
            raise InvalidRequest("this engine takes no pictures")
        added = len(job.pictures) * (self._picture_tokens - 1)
        limit = token_limit(len(prompt) + added, sampling.max_tokens, self._info.context_window)
        name, script = self._chooser.choose(prompt)
        if script.faults is not None:
            script = self._with_fault(name, script)
        if script.overloaded:
            raise Overloaded("the script makes the engine overloaded; try again later")
        if script.fail_after == 0:
            raise EngineFailed("the script makes the engine fail before the first token")
        known = comparable_tokens(prompt, job.pictures)
        cached = self._memories[job.cache_salt].recall(known)
        cached += sum(picture.position < cached for picture in job.pictures) * (self._picture_tokens - 1)
        played = PlayedGeneration(
            job.request_id,
            prompt,
            sampling,
            job.constraint,
            job.priority,
            name,
            cached,
            pictures=job.pictures,
            cache_salt=job.cache_salt,
        )
        self._keep(played)
        tokens, finish = self._cut(script, limit, job.stop_token_ids)
        timeline = self._timeline(name, script, tokens, finish, sampling.logprobs is not None)
        playing = _Playing(played)
        self._playing.add(playing)
        delay = self._delay if script.delay is None else script.delay
        now = asyncio.get_running_loop().time
        due, immediate, yielded = now(), 0, 0
        try:
            prompt_logprobs = None if sampling.prompt_logprobs is None else ((), *_certain_rows(prompt[1:]))
            no_logprobs = None if sampling.logprobs is None else ()
            yield Chunk(
                (),
                cached_tokens=cached,
                logprobs=no_logprobs,
                prompt_logprobs=prompt_logprobs,
                prompt_tokens=len(prompt) + added if job.pictures else None,
                picture_tokens=[self._picture_tokens] * len(job.pictures) if job.pictures else None,
            )
            for pause, chunk in timeline:
                if pause:
                    await playing.pause(pause)
                    due = now()
                elif (wait := due - now()) > 0:
                    await playing.pause(wait)
                elif (immediate := immediate + 1) % _CHUNKS_PER_YIELD == 0:
                    await asyncio.sleep(0)
                if playing.outcome is not None:
                    break
                if chunk is None:
                    raise EngineFailed(f"the script makes the engine fail after {yielded} tokens")
                due += delay
                yielded += len(chunk.token_ids)
                if chunk.finish is not None:
                    played.finish = chunk.finish
                    self._note(playing, tokens[:yielded])
                yield chunk
        finally:
            self._note(playing, tokens[:yielded])
        if isinstance(playing.outcome, SingletreeError):
            raise playing.outcome
        if playing.outcome is not None:
            yield Chunk((), finish=playing.outcome)

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        return self._picture_tokens

    def _with_fault(self, name: str, script: Script) -> Script:
        """Count a play of the script, and return it without its faults once they have happened often enough."""
        self._faults[name] += 1
        return script if self._faults[name] <= (script.faults or 0) else script.without_faults()

    def _cut(self, script: Script, limit: int, stops: Sequence[int]) -> tuple[tuple[int, ...], StopKind]:
        tokens, finish = script.tokens[: script.stop_after], _STOP
        if script.cut_after is not None:
            tokens, finish = tokens[: script.cut_after], _LENGTH
        elif script.end and tokens[-1:] != self._end:
            tokens += self._end
        if stops and not (ends := frozenset(stops)).isdisjoint(tokens):
            first = next(i for i, token in enumerate(tokens, 1) if token in ends)
            tokens, finish = tokens[:first], _STOP
        return (tokens[:limit], _LENGTH) if len(tokens) > limit else (tokens, finish)

    def _timeline(
        self, name: str, script: Script, tokens: tuple[int, ...], finish: StopKind, logprobs: bool
    ) -> _Timeline:
        """Return the chunks and pauses; kept for repeated plays of a script, but not for an echo."""
        size = max(1, script.chunk or self._chunk)
        if name == "echo":
            return _timeline(script, tokens, finish, size, logprobs)
        key = (name, len(tokens), finish, size, logprobs, script.fail_after)
        timeline = self._timelines.get(key)
        if timeline is None:
            timeline = _timeline(script, tokens, finish, size, logprobs)
            self._timelines.put(key, timeline)
        return timeline

    def _keep(self, played: PlayedGeneration) -> None:
        self.log.append(played)
        self._log_room -= len(played.prompt)
        while self._log_room < 0 and len(self.log) > 1:
            self._log_room += len(self.log.popleft().prompt)

    def _note(self, playing: _Playing, token_ids: tuple[int, ...]) -> None:
        """Record the end of a generation, however it ended: add it to the prefix cache and to the log, once."""
        if playing not in self._playing:
            return
        self._playing.discard(playing)
        played = playing.played
        played.token_ids = token_ids
        if playing.outcome == "cancelled":
            played.finish = "cancelled"
        self._memories[played.cache_salt].remember(
            comparable_tokens(played.prompt, played.pictures) + array("I", token_ids)
        )
        if self._log_path is not None:
            self._write(played, self._log_path)

    def _write(self, played: PlayedGeneration, path: Path) -> None:
        record: dict[str, object] = {
            "at": time.time(),
            "request_id": played.request_id,
            "script": played.script,
            "prompt_token_ids": played.prompt_token_ids,
            "token_ids": played.token_ids,
            "cached_tokens": played.cached_tokens,
            "finish": played.finish,
        }
        if self._log_text:
            record["prompt"] = self._decode(played.prompt)
            record["text"] = self._decode(played.token_ids)
        with open(path, "a", encoding="utf-8", opener=open_private) as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


class _Playing:
    """A running generation, whose pauses can be interrupted."""

    def __init__(self, played: PlayedGeneration) -> None:
        self.played = played
        self.outcome: SingletreeError | StopKind | None = None
        self._pause: asyncio.Future[None] | None = None

    async def pause(self, seconds: float) -> None:
        """Wait so many seconds; return early when the generation is ended."""
        if self.outcome is not None:
            return
        loop = asyncio.get_running_loop()
        self._pause = loop.create_future()
        timer = loop.call_later(seconds, _resume, self._pause)
        try:
            await self._pause
        finally:
            timer.cancel()
            self._pause = None

    def end(self, outcome: SingletreeError | StopKind) -> None:
        self.outcome = self.outcome or outcome
        if self._pause is not None:
            _resume(self._pause)


def _resume(pause: asyncio.Future[None]) -> None:
    if not pause.done():
        pause.set_result(None)


def _timeline(
    script: Script, tokens: tuple[int, ...], finish: StopKind, size: int, logprobs: bool
) -> _Timeline:
    """Return the chunks and the pauses before them; None at the end for a failure."""
    is_failing = script.fail_after is not None and script.fail_after <= len(tokens)
    tokens = tokens[: script.fail_after] if is_failing else tokens
    pauses = {0: script.prefill}
    if script.stall_after is not None:
        pauses[script.stall_after] = pauses.get(script.stall_after, 0.0) + script.stall
    bounds = sorted({0, len(tokens), *(at for at in pauses if at < len(tokens))})
    timeline: _Timeline = []
    for begin, end in itertools.pairwise(bounds):
        for at in range(begin, end, size):
            ids = tokens[at : min(at + size, end)]
            timeline.append(
                (pauses.get(at, 0.0), Chunk(ids, logprobs=_certain_rows(ids) if logprobs else None))
            )
    if is_failing:
        timeline.append((pauses.get(len(tokens), 0.0), None))
    elif timeline and timeline[-1][1] is not None:
        timeline[-1][1].finish = finish
    else:
        timeline.append((script.prefill, Chunk((), finish, logprobs=() if logprobs else None)))
    return timeline


def _certain_rows(ids: Sequence[int]) -> tuple[tuple[tuple[int, float]], ...]:
    return tuple(((token, 0.0),) for token in ids)


class PrefixMemory:
    """A simulated prefix cache: which prefixes of a prompt a real engine would have cached.

    A sequence that is a prefix of another is not kept: the longer one contains it.

    Args:
        size: how many sequences it holds; the least recently used one is dropped first.
    """

    def __init__(self, size: int) -> None:
        self._sequences: LruCache[bytes, bytes] = LruCache(entries=size)

    def recall(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens are cached, never the last one, as in real engines; then cache them all."""
        data = _bytes_of(token_ids)
        longest, best = 0, None
        for known in self._sequences.keys():  # noqa: SIM118 (a list, which may change)
            begin = longest * _WIDTH
            if known[begin : begin + _WIDTH] != data[begin : begin + _WIDTH]:
                continue  # its common prefix cannot be longer than the one found
            if (length := common_text_prefix(data, known) // _WIDTH) > longest:
                longest, best = length, known
        if best is not None:
            self._sequences.get(best)  # marks it as used
        self._add(data)
        return min(longest, len(token_ids) - 1)

    def remember(self, token_ids: Sequence[int]) -> None:
        self._add(_bytes_of(token_ids))

    def _add(self, data: bytes) -> None:
        for known in self._sequences.keys():  # noqa: SIM118 (a list, which may change)
            if _begins(data, known):
                self._sequences.pop(known)
        self._sequences.put(data, data)


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    return (token_ids if isinstance(token_ids, array) else array("I", token_ids)).tobytes()


def _begins(data: bytes, known: bytes) -> bool:
    """Return whether ``data`` begins with ``known``. The last token is compared first: most differ there."""
    end = len(known)
    return data[end - _WIDTH : end] == known[-_WIDTH:] and data.startswith(known)
