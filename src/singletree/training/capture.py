"""Keeps the tokens of the answers that belong to a session, as they are served.

A session is named by the base URL (``/sessions/NAME/v1``) or by the API key (``KEY/sessions/NAME``), so a harness is
captured as it is. The end of an answer is written before the client gets it.
"""

from __future__ import annotations

import asyncio
import copy
import re
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import takewhile
from math import nan
from operator import eq
from pathlib import Path
from typing import Any

from starlette.types import Scope

from singletree.errors import BadConfiguration
from singletree.events import Finished, FinishReason, ToolCallEnd, fold
from singletree.lru import LruCache
from singletree.server.sessions.request_headers import header_session
from singletree.server.settings.config import Config
from singletree.server.turn.generation import Generation
from singletree.server.turn.recorder import tokens_of_text
from singletree.training.records import CallEnd, CallStart, pack
from singletree.training.session_files import (
    FindSecrets,
    Redactor,
    SessionFile,
    load_hook,
    make_folder,
    turn_json,
)

SESSION_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""A regular expression for names of sessions, which are names of files."""

_SCOPE_KEY = "singletree.capture"
_PATH = re.compile(rf"/sessions/({SESSION_NAME})(/.*)")
_OWN_PATHS = frozenset({"/traces", "/complete"})
_KEY = re.compile(rf"((?:[Bb]earer +)?)(?:(.*)/)?sessions/({SESSION_NAME})")
_KEY_HEADERS = (b"authorization", b"x-api-key")
_MEMORY = 256 * 2**20
"""Bytes of the last prompts of sessions; those of others are read from their files again."""

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "presence_penalty",
             "frequency_penalty", "repetition_penalty")  # fmt: skip


class SessionCapture:
    """The sessions in a folder, each a file. It is a ``Capture``.

    Args:
        folder: is made where it is missing.
        content: whether texts are kept too.
        logprobs: whether the engine is asked for log-probabilities.
        hook: finds what is not kept.

    Raises:
        BadConfiguration: the folder cannot be made.
    """

    def __init__(
        self, folder: Path, *, content: bool = False, logprobs: bool = True, hook: FindSecrets | None = None
    ) -> None:
        try:
            make_folder(folder)
        except OSError as error:
            raise BadConfiguration(
                f"--capture {folder}: {error.strerror}; give a folder that can be written"
            ) from None
        self.folder = folder
        self.content = content
        self.hook = hook
        self._logprobs = logprobs
        self._files: LruCache[Path, SessionFile] = LruCache(_MEMORY)
        self._failed: dict[Path, SessionFile] = {}
        self._thread = ThreadPoolExecutor(1, "capture")

    def of(self, owner: str) -> SessionCapture:
        part = copy.copy(self)
        part.folder = self.folder / owner
        make_folder(part.folder)
        return part

    def close(self) -> None:
        self._thread.shutdown()

    def path(self, session: str) -> Path:
        return self.folder / f"{session}.jsonl"

    def enter(self, scope: Scope, path: str) -> tuple[Scope, str]:
        headers = scope["headers"]
        if found := _PATH.fullmatch(path):
            if found[2] in _OWN_PATHS:
                return scope, path
            session, path = found[1], found[2]
        else:
            keys = [(at, _KEY.fullmatch(v.decode("latin-1"))) for at, (n, v) in enumerate(headers)
                    if n in _KEY_HEADERS]  # fmt: skip
            named = [(at, key) for at, key in keys if key is not None]
            if not named:
                return scope, path
            session, headers = named[0][1][3], list(headers)
            for at, key in named:
                headers[at] = (headers[at][0], f"{key[1]}{key[2] or ''}".encode("latin-1"))
        own = header_session({n.decode("latin-1"): v.decode("latin-1") for n, v in headers})
        name = "/".join(filter(None, (session, own))).encode("latin-1")
        headers = [*headers, (b"x-singletree-session", name)]
        return {**scope, "headers": headers, _SCOPE_KEY: session}, path

    def begin(self, scope: Scope, route: str, generations: Sequence[Generation]) -> CapturedAnswer | None:
        session = scope.get(_SCOPE_KEY)
        if session is None:
            return None
        if self._logprobs:
            for each in generations:
                each.token_logprobs = array("f")
                if each.sampling.logprobs is None:
                    each.sampling = replace(each.sampling, logprobs=0)
        return CapturedAnswer(self, session, route, generations)

    def submit(self, session: str, work: Callable[[SessionFile], Any]) -> Future[Any]:
        """Let the thread work on the file of a session, after all that it was asked for before."""
        try:
            return self._thread.submit(self._work, self.path(session), work)
        except RuntimeError as error:  # The server has ended.
            refused: Future[Any] = Future()
            refused.set_exception(error)
            return refused

    async def run(self, session: str, work: Callable[[SessionFile], Any]) -> Any:
        """Do ``work`` like ``submit``, and return its result; it is done even if the task is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self.submit(session, work)))

    def _work(self, path: Path, work: Callable[[SessionFile], Any]) -> Any:
        file = self._failed.pop(path, None) or self._files.get(path) or SessionFile(path, path.stem)
        try:
            return work(file)
        finally:
            if file.failure:  # It must not be evicted: only this object knows that the session lacks a line.
                self._failed[path] = file
            self._files.put(path, file, file.size)


class CapturedAnswer:
    """The calls of one answer, one for each of its choices. It is an ``AnswerCapture``."""

    def __init__(
        self, capture: SessionCapture, session: str, route: str, generations: Sequence[Generation]
    ) -> None:
        self._capture = capture
        self._session = session
        self._route = route
        self._generations = generations
        self._calls: list[str] = []
        self._unfinished: set[int] = set()

    def start(self, answer: str) -> None:
        self._calls = [f"{answer}#{at}" if at else answer for at in range(len(self._generations))]
        self._unfinished.update(range(len(self._calls)))
        for call, generation in zip(self._calls, self._generations, strict=True):
            prompt = generation.prompt
            turns = prompt.turns if self._capture.content else None
            line, redactor = _call_line(call, self._route, generation), self._redactor(generation)
            begin = partial(
                SessionFile.begin, line=line, prompt=prompt.token_ids, turns=turns, redactor=redactor
            )
            self._capture.submit(self._session, begin)

    async def finish(self, choice: int, end: Finished) -> None:
        self._unfinished.discard(choice)
        await self._capture.run(self._session, self._end(choice, end))

    def close(self, reason: FinishReason) -> None:
        for choice in sorted(self._unfinished):
            self._capture.submit(self._session, self._end(choice, Finished(reason)))
        self._unfinished.clear()

    def _end(self, choice: int, end: Finished) -> Callable[[SessionFile], None]:
        generation = self._generations[choice]
        line = CallEnd(
            at=time.time(),
            call=self._calls[choice],
            finish=end.reason,
            weights=[(each.version, each.start, each.end) for each in end.weight_versions],
            # Experts are a trace of the tokens that they were chosen for.
            experts=(end.routed_experts or "") if self._capture.hook is None else "",
            cached=generation.reported_cached_tokens(),
            calls=sum(isinstance(event, ToolCallEnd) for event in generation.events),
        )
        redactor = self._redactor(generation)
        return partial(
            _finish, line=line, generation=generation, content=self._capture.content, redactor=redactor
        )

    def _redactor(self, generation: Generation) -> Redactor | None:
        hook = self._capture.hook
        return None if hook is None else Redactor(hook, generation.model.tokenizer)


def _call_line(call: str, route: str, generation: Generation) -> CallStart:
    request, info = generation.request, generation.model.engine.info()
    given = {name: getattr(generation.sampling, name, None) for name in _SAMPLING}
    return CallStart(
        at=time.time(),
        call=call,
        length=0,
        crc=0,
        model=generation.model.name,
        route=route,
        sampling={name: value for name, value in given.items() if value is not None},
        constrained=generation.constraints.constraint is not None,
        logprobs="" if generation.token_logprobs is None else info.logprobs,
        recovered=not info.streams_every_id,
        agent=request.agent.trajectory_id,
        is_subagent=request.agent.is_subagent,
        pictures=[each.key for each in generation.prompt.pictures],
    )


def _finish(
    file: SessionFile, line: CallEnd, generation: Generation, *, content: bool, redactor: Redactor | None
) -> None:
    """Write the end of a call whose generation is over; in the thread, since it is work for each token."""

    def filled() -> CallEnd:
        tokens, known = generation.token_ids, generation.token_logprobs
        if redactor is not None:
            tokens, line.redacted = redactor.tokens(tokens)
        line.tokens = pack(tokens)
        line.content = _content_length(generation, line.finish)
        # Rows may also be there for tokens behind the turn; if there are fewer, it is not known whose they are.
        if known and len(known) >= len(tokens):
            kept = known[: len(tokens)]
            for start, end in line.redacted:
                kept[start:end] = array("f", [nan]) * (end - start)
            line.logprobs = pack(kept)
        if content:
            turn = turn_json(fold(generation.events))
            line.turn = turn if redactor is None else redactor.turn(turn)
        return line

    file.finish(line.call, filled)


def _content_length(generation: Generation, reason: str) -> int:
    """Return how many of the generated tokens are the turn, without those that end it."""
    turn, tokenizer = generation.decoder.turn, generation.model.tokenizer
    length = turn.length
    if reason == "stop_sequence":
        kept = "".join(event.raw for event in turn.events)
        found = tokens_of_text(tokenizer, turn.token_ids[:length], kept) or array("I")
        return sum(takewhile(bool, map(eq, found, turn.token_ids)))
    while length and turn.token_ids[length - 1] in tokenizer.stop_token_ids:
        length -= 1
    return length


def open_capture(config: Config) -> SessionCapture:
    """Return the capture that ``config`` asks for. Raises BadConfiguration where its folder cannot be made."""
    assert config.capture is not None
    hook = None if config.capture_redact is None else load_hook(config.capture_redact)
    return SessionCapture(
        config.capture, content=config.capture_content, logprobs=config.capture_logprobs, hook=hook
    )
