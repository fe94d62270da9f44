"""An engine without a model: it plays what it was given, at a set pace. For tests, demos and benchmarks."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, EngineInfo, StopKind, token_limit
from singletree.engines.scripts import Chooser, Decode, Encode, Script, ScriptBook
from singletree.errors import EngineFailed, Overloaded, SingletreeError

_DEFAULT_TEXT = "Hello there."
# Without a delay the event loop gets a turn after so many chunks: each turn costs as much as several chunks.
_CHUNKS_A_TURN = 16
_TIMELINES_KEPT = 16
_WIDTH = array("I").itemsize

_STOP: StopKind = "stop"
_LENGTH: StopKind = "length"

# Seconds to wait, then a chunk to tell or, for None, to fail.
_Timeline = list[tuple[float, Chunk | None]]


@dataclass(slots=True)
class Played:
    """One generation, for tests to look at.

    Attributes:
        prompt: its token ids.
        script: the name of the script, or the marker's text; empty for the default.
        cached_tokens: what was reported for the prompt.
        token_ids: what was generated so far.
        finish: how it ended; None while it runs and when it failed or was closed.
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

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's, as a value to compare and to keep."""
        return tuple(self.prompt)


class ScriptedEngine:
    """Plays scripts. The prompt chooses one with a marker, of which the last counts:

    - ``[[script:NAME]]`` plays a script; ``[[script:A,B]]`` plays A on the first turn after the marker, then
      B, then the default; ``scripts.py`` says what is in the files.
    - ``[[gen:COUNT:CHUNK:DELAY]]`` plays filler: COUNT tokens, CHUNK at once, DELAY seconds apart.
    - ``[[echo:TEXT]]`` plays TEXT.

    The end token, if there is one, is the last of ``token_ids``. Constraints are recorded and not obeyed.

    Args:
        encode: text to token ids, special tokens by name, nothing added.
        decode: token ids to text, special tokens by name.
        scripts: a folder or a mapping of scripts by name.
        default: what a prompt without a marker gets.
        delay: seconds between chunks. The pace is kept on average: a late chunk does not delay the next.
        chunk: tokens a chunk.
        end_token_id: ends every complete script; None for no end token.
        context_window: longest prompt and answer together, in tokens.
        slots: told by ``info``; nothing waits for a slot.
        log_tokens: how many prompt tokens ``log`` holds; its oldest generations go first.
        log_path: a file that gets a line of JSON for each generation when it ends, with token ids and Unix time.
        log_text: whether those lines have the texts as well.
        remembered: how many prompts with their generations count as cached.
    """

    def __init__(
        self,
        encode: Encode,
        decode: Decode,
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
        remembered: int = 64,
    ) -> None:
        book = ScriptBook(scripts, encode)
        script = default if isinstance(default, Script) else Script(default)
        self._chooser = Chooser(book, script, encode, decode)
        self._decode = decode
        self._info = EngineInfo(name, context_window, slots, None, ("lark", "structural_tag"), True)
        self._delay = delay
        self._chunk = max(1, chunk)
        self._end = () if end_token_id is None else (end_token_id,)
        self._log_path = log_path
        self._log_text = log_text
        self._memory = PrefixMemory(remembered)
        self._timelines: dict[tuple[object, ...], _Timeline] = {}
        self._playing: set[_Playing] = set()
        self._faults: Counter[str] = Counter()
        self._open = False
        self._log_room = log_tokens
        self.log: deque[Played] = deque()

    async def start(self) -> None:
        """Nothing to load."""
        self._open = True

    async def close(self) -> None:
        """Generations in flight end with EngineFailed."""
        self._open = False
        for playing in tuple(self._playing):
            playing.end(EngineFailed("the engine was closed"))

    def info(self) -> EngineInfo:
        """Name and limits as they were given."""
        return self._info

    async def abort(self, request_id: str) -> None:
        """End that generation with ``cancelled``, in whatever pause it is."""
        for playing in tuple(self._playing):
            if playing.played.request_id == request_id:
                playing.end("cancelled")

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
        """Play, as ``Engine.generate`` says. InvalidRequest names a script that is not known."""
        if not self._open:
            raise EngineFailed("the engine is not running; start it first")
        prompt = array("I", prompt_token_ids)
        limit = token_limit(len(prompt), sampling.max_tokens, self._info.context_window)
        name, script = self._chooser.choose(prompt)
        if script.faults is not None:
            script = self._with_fault(name, script)
        if script.overloaded:
            raise Overloaded("the script says that the engine is overloaded; try again later")
        if script.fail_after == 0:
            raise EngineFailed("the script says that the engine fails before the first token")
        cached = self._memory.recall(prompt)
        played = Played(request_id, prompt, sampling, constraint, priority, name, cached)
        self._keep(played)
        tokens, finish = self._cut(script, limit, stop_token_ids)
        timeline = self._timeline(name, script, tokens, finish, sampling.logprobs is not None)
        playing = _Playing(played)
        self._playing.add(playing)
        delay = self._delay if script.delay is None else script.delay
        now = asyncio.get_running_loop().time
        due, turn, told = now(), 0, 0
        try:
            known = None if sampling.prompt_logprobs is None else ((), *_certain(prompt[1:]))
            told_none = None if sampling.logprobs is None else ()
            yield Chunk((), cached_tokens=cached, logprobs=told_none, prompt_logprobs=known)
            for pause, chunk in timeline:
                if pause:
                    await playing.pause(pause)
                    due = now()
                elif (wait := due - now()) > 0:
                    await playing.pause(wait)
                elif (turn := turn + 1) % _CHUNKS_A_TURN == 0:
                    await asyncio.sleep(0)
                if playing.outcome is not None:
                    break
                if chunk is None:
                    raise EngineFailed(f"the script says that the engine fails after {told} tokens")
                due += delay
                told += len(chunk.token_ids)
                if chunk.finish is not None:
                    played.finish = chunk.finish
                    self._note(playing, tokens[:told])
                yield chunk
        finally:
            self._note(playing, tokens[:told])
        if isinstance(playing.outcome, SingletreeError):
            raise playing.outcome
        if playing.outcome is not None:
            yield Chunk((), finish=playing.outcome)

    def _with_fault(self, name: str, script: Script) -> Script:
        """The script, whole once it has gone wrong as often as it should."""
        self._faults[name] += 1
        return script if self._faults[name] <= (script.faults or 0) else script.whole()

    def _cut(self, script: Script, limit: int, stops: Sequence[int]) -> tuple[tuple[int, ...], StopKind]:
        """The tokens to tell and how they end."""
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
        """Made once for each way in which a script is played; an echo is not played again."""
        size = max(1, script.chunk or self._chunk)
        if name == "echo":
            return _timeline(script, tokens, finish, size, logprobs)
        key = (name, len(tokens), finish, size, logprobs, script.fail_after)
        timeline = self._timelines.get(key)
        if timeline is None:
            if len(self._timelines) >= _TIMELINES_KEPT:
                del self._timelines[next(iter(self._timelines))]
            timeline = self._timelines[key] = _timeline(script, tokens, finish, size, logprobs)
        return timeline

    def _keep(self, played: Played) -> None:
        self.log.append(played)
        self._log_room -= len(played.prompt)
        while self._log_room < 0 and len(self.log) > 1:
            self._log_room += len(self.log.popleft().prompt)

    def _note(self, playing: _Playing, token_ids: tuple[int, ...]) -> None:
        """It ended, in whatever way: remember and log it, once."""
        if playing not in self._playing:
            return
        self._playing.discard(playing)
        played = playing.played
        played.token_ids = token_ids
        if playing.outcome == "cancelled":
            played.finish = "cancelled"
        self._memory.remember(played.prompt + array("I", token_ids))
        if self._log_path is not None:
            self._write(played, self._log_path)

    def _write(self, played: Played, path: Path) -> None:
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
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


class _Playing:
    """A generation under way, whose pauses can be cut short."""

    __slots__ = ("_pause", "outcome", "played")

    def __init__(self, played: Played) -> None:
        self.played = played
        self.outcome: SingletreeError | StopKind | None = None
        self._pause: asyncio.Future[None] | None = None

    async def pause(self, seconds: float) -> None:
        """Wait, unless it was ended or until it is."""
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
        """Let ``outcome`` be found, at once."""
        self.outcome = self.outcome or outcome
        if self._pause is not None:
            _resume(self._pause)


def _resume(pause: asyncio.Future[None]) -> None:
    if not pause.done():
        pause.set_result(None)


def _timeline(
    script: Script, tokens: tuple[int, ...], finish: StopKind, size: int, logprobs: bool
) -> _Timeline:
    """What is told and after which pause; None at the end for a failure."""
    fails = script.fail_after is not None and script.fail_after <= len(tokens)
    tokens = tokens[: script.fail_after] if fails else tokens
    pauses = {0: script.prefill}
    if script.stall_after is not None:
        pauses[script.stall_after] = pauses.get(script.stall_after, 0.0) + script.stall
    bounds = sorted({0, len(tokens), *(at for at in pauses if at < len(tokens))})
    timeline: _Timeline = []
    for begin, end in itertools.pairwise(bounds):
        for at in range(begin, end, size):
            ids = tokens[at : min(at + size, end)]
            timeline.append((pauses.get(at, 0.0), Chunk(ids, logprobs=_certain(ids) if logprobs else None)))
    if fails:
        timeline.append((pauses.get(len(tokens), 0.0), None))
    elif timeline and timeline[-1][1] is not None:
        timeline[-1][1].finish = finish
    else:
        timeline.append((script.prefill, Chunk((), finish, logprobs=() if logprobs else None)))
    return timeline


def _certain(ids: Sequence[int]) -> tuple[tuple[tuple[int, float]], ...]:
    return tuple(((token, 0.0),) for token in ids)


class PrefixMemory:
    """Which prompts a cache would know, token by token.

    A sequence with which another begins is not kept beside it: it has nothing that the longer one has not.

    Args:
        size: how many sequences it holds; the least recently used one goes first.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def recall(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens were known, as in real engines never the last; from now on all are."""
        data = _bytes_of(token_ids)
        longest, best = 0, None
        for known in reversed(self._known):
            begin = longest * _WIDTH
            if known[begin : begin + _WIDTH] != data[begin : begin + _WIDTH]:
                continue  # whatever else it has, no more than is found already
            if (length := _common(data, known)) > longest:
                longest, best = length, known
        if best is not None:
            self._known.move_to_end(best)
        self._add(data)
        return min(longest, len(token_ids) - 1)

    def remember(self, token_ids: Sequence[int]) -> None:
        """Know these, too."""
        self._add(_bytes_of(token_ids))

    def _add(self, data: bytes) -> None:
        for known in [known for known in self._known if _begins(data, known)]:
            del self._known[known]
        self._known[data] = None
        self._known.move_to_end(data)
        while len(self._known) > self._size:
            self._known.popitem(last=False)


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    return (token_ids if isinstance(token_ids, array) else array("I", token_ids)).tobytes()


def _begins(data: bytes, known: bytes) -> bool:
    """Whether ``data`` begins with ``known``: the last token tells most of those that differ, without reading all."""
    end = len(known)
    return data[end - _WIDTH : end] == known[-_WIDTH:] and data.startswith(known)


def _common(left: bytes, right: bytes) -> int:
    """How many tokens both begin with."""
    if left.startswith(right) or right.startswith(left):
        return min(len(left), len(right)) // _WIDTH
    same, end = 0, min(len(left), len(right))
    while end - same > 1:
        middle = (same + end) // 2
        if left[same:middle] == right[same:middle]:
            same = middle
        else:
            end = middle
    return same // _WIDTH
