"""What the inspector shows, and what changes in it, from this process and from the others (``--workers``)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from singletree.errors import RouteNotFound, SingletreeError
from singletree.inspector.difference_documents import ComparedSide, encode_difference, side_of
from singletree.inspector.inspector import Inspector
from singletree.inspector.prompt_documents import encode_prompt, encode_prompt_tokens
from singletree.inspector.session_documents import (
    brief_part,
    encode_session_turns,
    join_parts,
    main_turn,
    session_part,
    summarize_session,
)
from singletree.inspector.turn_documents import InspectedJson, encode_turn, summarize_turn
from singletree.inspector.turn_record import InspectedSession
from singletree.owners import owned_id
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.protocols.wire import dump
from singletree.server.answers.client_link import ON_DISCONNECT, WhileConnected
from singletree.server.http.service import Service

T = TypeVar("T")

QUESTIONS = ("briefs", "part", "turn", "prompt", "tokens", "side", "usage")
"""The methods of ``InspectView`` that other processes may ask for."""


class InspectView:
    """Answers from the turns of this process; None for what it does not keep."""

    def __init__(self, service: Service) -> None:
        assert isinstance(service.inspector, Inspector)
        self._service = service
        self._inspector = service.inspector

    @property
    def keeps_texts(self) -> bool:
        return self._inspector.keeps_texts

    def tokenizer_of(self, model: str) -> Tokenizer | None:
        try:
            return self._service.catalog.get(model).tokenizer
        except SingletreeError:
            return None

    def usage(self) -> InspectedJson:
        return {"used_bytes": self._inspector.used, "sessions": len(self._inspector.sessions())}

    def briefs(self, id: str | None = None) -> list[InspectedJson]:
        sessions = self._inspector.sessions() if id is None else [self._inspector.session(id)]
        return [self._named(session, brief_part(session)) for session in sessions if session is not None]

    async def part(self, id: str, texts: bool = True) -> InspectedJson | None:
        session = self._inspector.session(id)
        if session is None:
            return None
        shows = self.keeps_texts and texts
        return self._named(session, await asyncio.to_thread(session_part, session, with_texts=shows))

    def _named(self, session: InspectedSession, part: InspectedJson) -> InspectedJson:
        shown = session.key if self._inspector.owner else owned_id(session.owner, session.key)
        return {**part, "key": shown}

    async def turn(self, id: str, texts: bool = True) -> InspectedJson | None:
        found = self._inspector.turn(id)
        if found is None:
            return None
        encode = partial(encode_turn, *found, self.tokenizer_of, with_texts=self.keeps_texts and texts)
        # A thread must not read what grows.
        return encode() if found[1].is_running else await asyncio.to_thread(encode)

    async def prompt(self, id: str, texts: bool = True) -> InspectedJson | None:
        return await self._encode(id, encode_prompt, self.tokenizer_of, with_texts=self.keeps_texts and texts)

    async def _encode(self, id: str, encode: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
        found = self._inspector.turn(id)
        return None if found is None else await asyncio.to_thread(encode, *found, *arguments, **options)

    async def tokens(self, id: str, start: int, end: int) -> InspectedJson | None:
        found = self._inspector.turn(id)
        tokenizer = None if found is None else self.tokenizer_of(found[1].step.model)
        if found is None or tokenizer is None or not self.keeps_texts:
            return None
        return await self._encode(id, encode_prompt_tokens, tokenizer, start, end)

    async def side(self, id: str) -> ComparedSide | None:
        return await self._encode(id, side_of, with_texts=self.keeps_texts)

    async def changes(self, silence_seconds: float) -> AsyncIterator[InspectedJson]:
        """Yield what changed in this process: summaries of turns, and the ids of sessions that are gone."""
        async for changed in self._inspector.changes.read(silence_seconds, owner=self._inspector.owner):
            found = [known for id in changed.turns if (known := self._inspector.turn(id)) is not None]
            turns = [summarize_turn(turn, with_texts=self.keeps_texts) for _, turn in found]
            yield {"turns": turns, "gone": list(changed.gone)}


class WholeView:
    """Answers for all processes of the server together. Raises RouteNotFound for what none of them keeps."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.own = InspectView(service)

    async def _own(self, question: str, *arguments: Any) -> Any:
        answer = getattr(self.own, question)(*arguments)
        return await answer if isinstance(answer, Awaitable) else answer

    async def _all(self, question: str, *arguments: Any) -> list[Any]:
        """Return what each process answers, this one first; those that do not answer in time are left out."""
        own = await self._own(question, *arguments)
        others = self._service.others
        return [own] if others is None else [own, *await others.ask_inspector(question, *arguments)]

    async def _first(self, question: str, *arguments: Any) -> Any:
        found = await self._own(question, *arguments)
        if found is not None or self._service.others is None:
            return found
        answers = await self._service.others.ask_inspector(question, *arguments)
        return next((answer for answer in answers if answer is not None), None)

    def _answered(self, count: int) -> InspectedJson:
        others = self._service.others
        return {"processes": 1 if others is None else others.count, "processes_answered": count}

    async def usage(self) -> InspectedJson:
        all_usage = await self._all("usage")
        used = sum(each["used_bytes"] for each in all_usage)
        ids = {part["id"] for part in await self._parts()}
        return {"used_bytes": used, "sessions": len(ids), **self._answered(len(all_usage))}

    async def _parts(self, id: str | None = None) -> list[InspectedJson]:
        return [part for parts in await self._all("briefs", id) for part in parts]

    async def summaries(self) -> tuple[list[InspectedJson], InspectedJson]:
        """Return the summaries of all sessions, the one used last first, and how many processes answered."""
        answers = await self._all("briefs", None)
        parts: dict[str, list[InspectedJson]] = {}
        for answer in answers:
            for part in answer:
                parts.setdefault(part["id"], []).append(part)
        found = [summarize_session(join_parts(each)) for each in parts.values()]
        return sorted(found, key=itemgetter("last_at"), reverse=True), self._answered(len(answers))

    async def summary(self, id: str) -> InspectedJson | None:
        parts = await self._parts(id)
        return summarize_session(join_parts(parts)) if parts else None

    async def session(self, id: str, *, texts: bool = True) -> InspectedJson:
        answers = await self._all("part", id, texts)
        parts = [part for part in answers if part is not None]
        _kept(parts or None, "session", id)
        children = sorted({part["id"] for part in await self._parts() if part["parent"] == id})
        document = encode_session_turns(join_parts(parts))
        return {**document, "children": children, **self._answered(len(answers))}

    async def turn(self, id: str, *, texts: bool = True) -> InspectedJson:
        return _kept(await self._first("turn", id, texts), "turn", id)

    async def prompt(self, id: str, *, texts: bool = True) -> InspectedJson:
        return _kept(await self._first("prompt", id, texts), "turn", id)

    async def tokens(self, id: str, start: int, end: int) -> InspectedJson:
        found: InspectedJson | None = await self._first("tokens", id, start, end)
        if found is None:
            raise RouteNotFound(
                f"the tokens of the prompt of turn {id[:64]!a} are not kept; they are with --inspect-content, until "
                "memory is short (--inspect-size)"
            )
        return found

    async def difference(self, a: str, b: str) -> InspectedJson:
        """Return the difference of two turns; a session stands for the last turn of its main lane."""
        sides = [await self._side(id) for id in (a, b)]
        shows = self.own.keeps_texts
        found = await asyncio.to_thread(encode_difference, *sides, with_texts=shows)
        heads = [{"turn": each.turn, "session": await self.summary(each.session)} for each in sides]
        return {"a": heads[0], "b": heads[1], **found}

    async def _side(self, id: str) -> ComparedSide:
        turn: str | None = id
        if id.startswith("s"):
            parts = [part for part in await self._all("part", id, False) if part is not None]
            turn = main_turn(join_parts(parts)) if parts else None
        side: ComparedSide | None = None if turn is None else await self._first("side", turn)
        return _kept(side, "turn", id)


def _kept(found: T | None, kind: str, id: str) -> T:
    """Return what was found. Raises RouteNotFound where a session or turn is not kept."""
    if found is None:
        raise RouteNotFound(
            f"{kind} {id[:64]!a} is not kept: it is older than what --inspect-size has room for, or of another server"
        )
    return found


SILENCE_SECONDS = 1.0
"""How often a stream looks whether the server shuts down."""
_COMMENT_SECONDS = 10.0
_SUMMARY_SECONDS = 1.0
_MOST_WAITING = 500
"""Most turns that wait for a reader; one that missed more is told to get the lists again."""
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)


class InspectFeed:
    """The ASGI application that sends the events, of one session or of all.

    What happened since the last write is one state for each turn, however long the reader waited.
    """

    def __init__(self, service: Service, session: str | None) -> None:
        self._service = service
        self._view = WholeView(service)
        self._session = session
        self._turns: dict[str, InspectedJson] = {}
        self._gone: dict[str, None] = {}
        self._is_stale = False
        self._filled = asyncio.Event()
        self._summaries: dict[str, tuple[float, InspectedJson]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the client disconnects (ClientLeft) or the server shuts down."""
        with WhileConnected(receive, scope.get("extensions", {}).get(ON_DISCONNECT)):
            await self._send(send)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        others = self._service.others
        streams = [self._view.own.changes(SILENCE_SECONDS)]
        if others is not None:
            streams += [others.inspector_changes(number, SILENCE_SECONDS) for number in others.numbers]
        readers = [asyncio.create_task(self._read(stream)) for stream in streams]
        await asyncio.sleep(0)  # the readers are registered now, so that nothing after the greeting is missed
        try:
            summaries, _ = await self._view.summaries()
            live = [each for each in summaries if each["is_live"] and self._session in (None, each["id"])]
            await self._write(send, "hello", {"now": time.time(), "sessions": live})
            await self._follow(send)
        finally:
            for task in readers:
                task.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        await send({"type": "http.response.body", "body": b""})

    async def _read(self, stream: AsyncIterator[InspectedJson]) -> None:
        # A process that has died or is started again is left out of this stream.
        with suppress(OSError, EOFError):
            async for changed in stream:
                for turn in changed["turns"]:
                    if self._session in (None, turn["session"]):
                        self._turns[turn["id"]] = turn
                while len(self._turns) > _MOST_WAITING:
                    self._turns.pop(next(iter(self._turns)))
                    self._is_stale = True
                self._gone.update(dict.fromkeys(changed["gone"]))
                if self._turns or self._gone:
                    self._filled.set()

    async def _follow(self, send: Send) -> None:
        quiet_since = time.monotonic()
        while not self._service.shutdown.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(SILENCE_SECONDS):
                    await self._filled.wait()
            self._filled.clear()
            turns, self._turns = self._turns, {}
            gone, self._gone = self._gone, {}
            if self._is_stale:
                self._is_stale = False
                await self._write(send, "stale", {})
            for turn in turns.values():
                summary = await self._summary(turn)
                if summary is not None:
                    await self._write(send, "turn", {"turn": turn, "session": summary})
            if gone:
                await self._write(send, "gone", {"sessions": list(gone)})
                for id in gone:
                    self._summaries.pop(id, None)
            if turns or gone:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since >= _COMMENT_SECONDS:
                quiet_since = time.monotonic()
                await send({"type": "http.response.body", "body": b": \n\n", "more_body": True})

    async def _summary(self, turn: InspectedJson) -> InspectedJson | None:
        """Return the sums of the turn's session. While a turn runs they may be a second old."""
        id, now = turn["session"], time.monotonic()
        at, known = self._summaries.get(id, (0.0, None))
        if known is None or turn["status"] != "running" or now - at >= _SUMMARY_SECONDS:
            known = await self._view.summary(id)
            if known is not None:
                self._summaries[id] = now, known
        return known

    async def _write(self, send: Send, name: str, data: InspectedJson) -> None:
        body = b"event: %b\ndata: %b\n\n" % (name.encode(), dump(data))
        await send({"type": "http.response.body", "body": body, "more_body": True})
