"""The routes that fork a session to another model, move it there, and read its turns, so that two can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from msgspec import Raw, Struct, field
from starlette.responses import Response
from starlette.types import ASGIApp

from singletree.conversation import Conversation, Image, Request, ToolResult, Turn
from singletree.errors import InvalidRequest, RouteNotFound
from singletree.prompts.history.context_editing import conversation_characters
from singletree.protocols.chat.request import ChatBody, build_request
from singletree.protocols.wire import decode_body, dump
from singletree.server.http.routes import JSON, answer_turn, fetch_session
from singletree.server.http.service import Call
from singletree.server.sessions import PATH
from singletree.server.sessions.sessions import NAMELESS, Session

_NO_MESSAGE = Raw(b'{"role":"user","content":""}')
"""Stands in for the messages of a fork that adds none: Chat Completions refuses an empty list."""


class ForkBody(ChatBody, kw_only=True):
    """The body of a fork: that of Chat Completions, whose ``messages`` follow the turns of the session.

    Attributes:
        at: the number of the turn that the other model generates anew, from 1; by default the last one.
    """

    messages: list[Raw] = field(default_factory=list)
    at: int | None = None


class NewMove(Struct, rename={"source": "from", "target": "to"}):
    """The body of a move: ``to`` answers in the place of the model ``from``; None undoes it.

    Attributes:
        session: whose requests; empty for all sessions.
        source: empty for any model, in a session.
    """

    session: str = ""
    source: str = ""
    target: str | None = None


class KeptLine(NamedTuple):
    """The longest conversation of a session, as its client sent it, and the turn that answered it last."""

    number: int
    model: str
    given: Conversation
    answer: Turn | None

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.given.turns if self.answer is None else (*self.given.turns, self.answer)


async def get_turns(call: Call) -> ASGIApp:
    """Answer with the model's turns in the longest conversation of a session: its words and its calls."""
    session = await _session(call)
    line = await _line(call, session)
    steps = [step for step in session.steps if step.record_number == line.number]
    turns = [turn for turn in line.turns if turn.role == "assistant"]
    document = {
        "object": "list",
        "session": session.key,
        "model": line.model,
        "line": line.number,
        "steps": len(steps),
        "data": [_turn_document(number, turn) for number, turn in enumerate(turns, 1)],
    }
    return Response(dump(document), media_type=JSON)


async def fork_session(call: Call) -> ASGIApp:
    """Answer a turn of a session anew, by the model that the body names. The session itself does not change."""
    session = await _session(call)
    call.authorize("inference")
    body = await call.body()
    wanted = decode_body(body, ForkBody)
    line = await _line(call, session)
    before, at = _turns_before(line, wanted.at)
    has_messages = bool(wanted.messages)
    wanted.messages = wanted.messages or [_NO_MESSAGE]
    request = build_request(wanted)
    added = request.conversation.turns if has_messages else ()
    if any(isinstance(part, Image) for turn in before for part in _inner(turn)):
        raise InvalidRequest(
            "the session has pictures, which the server does not keep; move the session instead: its client sends them",
            param="at",
        )
    tools = request.conversation.tools or line.given.tools
    forked: Request = replace(
        request,
        conversation=Conversation((*before, *added), tools),
        session=f"{session.key}@{at}:{wanted.model}",
    )
    return await answer_turn(call, body, forked, size=conversation_characters(forked.conversation))


async def list_moves(call: Call) -> ASGIApp:
    """List which model answers in the place of which, in a session or in all of them."""
    call.authorize_reader("inference")
    moves = call.service.catalog.moves.items()
    data = [{"session": session, "from": model, "to": to} for (session, model), to in moves]
    return Response(dump({"object": "list", "data": data}), media_type=JSON)


async def move_requests(call: Call) -> ASGIApp:
    """Let another model answer in the place of one, in a session or in all sessions, from the next request on.

    The clients need not know: answers have the name that they asked for.
    """
    call.authorize_reader("inference")
    move = decode_body(await call.body(), NewMove)
    catalog = call.service.catalog
    if not (move.session or move.source):
        raise InvalidRequest("session and from are both empty; give at least one of them", param="session")
    if move.session.startswith(NAMELESS):
        raise InvalidRequest(
            f"session {move.session[:128]!a} has no name of its client's: only its prompts tell which requests are its "
            "own; let the harness send a name (x-session-id), or drain the model",
            param="session",
        )
    source = catalog.listed_model(move.source).name if move.source else ""
    place = move.session, source
    if move.target is None:
        catalog.moves.pop(place)
    else:
        catalog.moves.put(place, catalog.listed_model(move.target).name)
    return await list_moves(call)


async def _session(call: Call) -> Session:
    call.authorize_reader("inspect")
    id = call.http.path_params["id"]
    await fetch_session(call, id)
    session = call.service.sessions.get(id)
    if session is None:
        raise RouteNotFound(f"session {id[:128]!a} does not exist; GET {PATH} lists the sessions")
    return session


async def _line(call: Call, session: Session) -> KeptLine:
    """Return the longest conversation of the session. Raises RouteNotFound where its turns are no longer in memory."""
    records = sorted(session.records.items(), key=lambda item: len(item[1].messages), reverse=True)
    for number, record in records:
        given = (await call.service.catalog.ready(record.model)).kept_conversation(record.messages)
        if given is None and call.service.others is not None:
            given = await call.service.others.kept_conversation(record.model, record.messages)
        if given is not None:
            return KeptLine(number, record.model, given, record.answer)
    raise RouteNotFound(
        f"the turns of session {session.key[:128]!a} are no longer in memory; they are there for some time after its "
        "last request"
    )


def _turns_before(line: KeptLine, at: int | None) -> tuple[tuple[Turn, ...], int]:
    """Return the turns before the model's turn number ``at``, and the number. Raises InvalidRequest."""
    places = [i for i, turn in enumerate(line.turns) if turn.role == "assistant"]
    at = len(places) if at is None else at
    if not 1 <= at <= len(places):
        raise InvalidRequest(f"at is {at}; the session has turns 1 to {len(places)}", param="at")
    return line.turns[: places[at - 1]], at


def _inner(turn: Turn) -> Iterator[object]:
    for part in turn.parts:
        yield part
        if isinstance(part, ToolResult):
            yield from part.parts


def _turn_document(number: int, turn: Turn) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": call.arguments} for call in turn.tool_calls]
    return {"turn": number, "text": turn.text, "reasoning": turn.reasoning, "calls": calls}
