"""Keeps what the agents did, within a bound of memory, and follows the turns that run.

It records where the server works anyway: the decoder tells it each token, the encoders each event, the lifecycle of an
answer its start and its end. Nothing of it runs when the inspector is off.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from singletree.errors import SingletreeError
from singletree.events import Event, FinishReason, Usage
from singletree.lru import LruCache
from singletree.protocols.answer import EventEncoder
from singletree.server.inspect.harnesses import client_of, harness_of
from singletree.server.inspect.live_changes import LiveChanges
from singletree.server.inspect.lost_part import lost_part
from singletree.server.inspect.prompt_history import PromptEntry, PromptMessage, body_change
from singletree.server.inspect.turn_record import (
    InspectedSession,
    InspectedTurn,
    Lanes,
    TurnDetails,
    message_parts,
    session_id,
    settings_of,
    tool_results,
)
from singletree.server.inspect.turn_timeline import TurnTimeline
from singletree.server.inspect.wire_record import InspectedEncoder, WireBudget, WireRecord, add_logprobs
from singletree.server.sessions.divergence import WIDTH
from singletree.server.sessions.sessions import Opened
from singletree.server.turn.generation import Generation
from singletree.server.turn.ids import new_id

_TURN_SHARE = 8
"""No turn may take more than this part of the limit for the events that it sent."""
_RUNNING_SHARE = 4
"""The events of all turns that run may take this part of it together."""
_BODY_SHARE = 8
"""The last requests, from which the next ones are told apart, take at most this part of the limit."""
_LOOK_BACK = 64
"""Among so many last turns of a session are those whose calls the results of a request belong to."""
_ENOUGH = 0.9
"""How much of the limit is left in use when something has to go."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as it arrived.

    Attributes:
        request_id: its id in the log and in the response headers.
        received: unix seconds.
        began: the same on the clock of ``time.perf_counter``.
        protocol: name of the wire protocol.
        path: its path.
        headers: with lower-case names.
        body: its bytes.
    """

    request_id: str
    received: float
    began: float
    protocol: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Inspector:
    """The sessions and turns of one process.

    Args:
        limit: most bytes to keep.
        keeps_texts: whether prompts, answers and requests are kept (``--inspect-content``).

    Attributes:
        changes: the readers of the event stream.
        process: the number of this process, from 1.
    """

    def __init__(self, limit: int, *, keeps_texts: bool) -> None:
        self.limit = limit
        self.keeps_texts = keeps_texts
        self.changes = LiveChanges()
        self.process = 1
        self.started = time.time()
        self._sessions: OrderedDict[str, InspectedSession] = OrderedDict()
        self._of_turn: dict[str, str] = {}
        self._bodies: LruCache[str, bytes] = LruCache(limit // _BODY_SHARE)
        self._budget = WireBudget(limit // _RUNNING_SHARE)
        self._size = 0

    @property
    def used(self) -> int:
        """Return the approximate memory in bytes."""
        return self._size + self._bodies.bytes

    def sessions(self) -> list[InspectedSession]:
        """Return the sessions that have turns here, the one used last first."""
        return [session for session in reversed(self._sessions.values()) if session.turns]

    def session(self, id: str) -> InspectedSession | None:
        """Return the session with this id; None when no turn of it is kept here."""
        session = self._sessions.get(id)
        return session if session is not None and session.turns else None

    def turn(self, id: str) -> tuple[InspectedSession, InspectedTurn] | None:
        """Return the turn with this id and its session; None when it is not kept."""
        session = self._sessions.get(self._of_turn.get(id, ""))
        return None if session is None or id not in session.turns else (session, session.turns[id])

    def take_lanes(self, key: str) -> Lanes | None:
        """Return the numbers of a session that goes on in another process; this one begins anew."""
        session = self._sessions.get(session_id(key))
        if session is None:
            return None
        lanes, session.lanes = session.lanes, Lanes()
        return lanes

    def receive_lanes(self, key: str, lanes: Lanes) -> None:
        """Take over the numbers of a session that another process had."""
        session = self._session(key)
        session.lanes.merge(lanes)
        self._count(session)

    def begin(self, arrival: Arrival, generation: Generation, opened: Opened) -> Inspection:
        """Record the start of a turn, whose prompt is written, and follow it."""
        session = self._session(opened.step.session)
        turn = self._new_turn(session, arrival, generation, opened)
        self._note(session, arrival, generation)
        self._add_prompt(session, turn, arrival.body, generation, opened)
        session.turns[turn.id] = turn
        self._of_turn[turn.id] = session.id
        self._sessions.move_to_end(session.id)
        self._count(session)
        self._tell_earlier(session, turn)
        self.changes.turn(turn.id)
        return Inspection(self, session, turn, generation, follows=self.changes)

    def _session(self, key: str) -> InspectedSession:
        id = session_id(key)
        session = self._sessions.get(id)
        if session is None:
            session = self._sessions[id] = InspectedSession(id, key)
        return session

    def _new_turn(
        self, session: InspectedSession, arrival: Arrival, generation: Generation, opened: Opened
    ) -> InspectedTurn:
        step, prompt, request = opened.step, generation.prompt, generation.request
        id = new_id("turn_")
        compared = None if opened.compared is None else opened.compared.inspected or None
        before = None if compared is None else session.turns.get(compared)
        fingerprint = hash((opened.step.matched, opened.tokens[step.matched * WIDTH :]))
        repeated = _repeated(session, before, step.prompt_tokens, step.matched, fingerprint)
        continues = step.course in ("appended", "broken")
        lane, is_new = session.lanes.place(
            id, compared, continues=continues, repeated=None if repeated is None else repeated.lane
        )
        goes_on = is_new and before is not None and step.course != "first"
        wire = WireRecord(keeps_data=self.keeps_texts, limit=self.limit // _TURN_SHARE, budget=self._budget)
        return InspectedTurn(
            id,
            session.id,
            session.lanes.next_turn(),
            lane,
            (before.lane, before.id, step.matched) if goes_on and before is not None else None,
            before=None if step.course == "first" else compared,
            repeats=None if repeated is None else repeated.repeats or repeated.id,
            request_id=arrival.request_id,
            protocol=arrival.protocol,
            path=arrival.path,
            stream=request.stream,
            process=self.process,
            is_agent=request.agent.is_subagent,
            step=step,
            worker_before=None if before is None or before.step.route is None else before.step.route.worker,
            results=tool_results(prompt.turns),
            timeline=TurnTimeline(arrival.began),
            received=arrival.received,
            fingerprint=fingerprint,
            rules=tuple(prompt.rules),
            replayed_turns=prompt.replayed,
            pictures=len(prompt.pictures),
            same_messages=opened.same_messages,
            lost=lost_part(opened, keeps_texts=self.keeps_texts) if step.broken is not None else None,
            details=TurnDetails(
                wire,
                session.tools_of(opened.tools, keeps_texts=self.keeps_texts),
                settings_of(prompt.settings),
                generation.token_ids if self.keeps_texts else None,
                len(arrival.body),
            ),
        )

    def _note(self, session: InspectedSession, arrival: Arrival, generation: Generation) -> None:
        """Record who uses the session."""
        agent = generation.request.agent
        session.harness = harness_of(arrival.headers) or session.harness
        session.client = client_of(arrival.headers) or session.client
        session.is_agent = session.is_agent or agent.is_subagent
        outer = session.key.rpartition("/")[0] if agent.is_subagent else ""
        if parent := agent.parent_session_id or outer:
            session.parent = session_id(parent) if parent != session.key else None

    def _add_prompt(
        self,
        session: InspectedSession,
        turn: InspectedTurn,
        body: bytes,
        generation: Generation,
        opened: Opened,
    ) -> None:
        prompts, prompt, step = session.prompts, generation.prompt, opened.step
        compared = None if opened.compared is None else opened.compared.inspected
        before, known = prompts.base_for(compared or None)
        kept, same = (0, 0) if known is None else (step.matched, opened.same_messages)
        # The turn that answered the earlier prompt is a replayed one now.
        ranges = 0 if known is None else min(kept, known.prompt_tokens)
        ends = prompt.piece_ends
        replayed = tuple((ends[at - 1], ends[at]) for at in range(1, len(ends), 2) if ends[at] > ranges)
        rules: dict[int, list[str]] = {}
        for first, end, names in prompt.rule_places:
            for at in range(max(first, same), end):
                rules.setdefault(at, []).extend(sorted(names))
        messages = tuple(
            PromptMessage(
                opened.messages[at],
                message_parts(prompt.turns[at]),
                tuple(rules.get(at, ())),
                prompt.turns[at] if self.keeps_texts else None,
            )
            for at in range(same, len(prompt.turns))
        )
        change = None
        if self.keeps_texts and len(body) <= self.limit // _BODY_SHARE:
            earlier = None if before is None else self._bodies.get(before)
            change = body_change(body, earlier)
            if before is not None and step.course != "back":
                self._bodies.pop(before)  # the next request follows on this one
            self._bodies.put(turn.id, body, len(body))
        tail = opened.tokens[kept * WIDTH :] if self.keeps_texts else None
        prompts.add(
            turn.id,
            PromptEntry(
                before,
                0 if known is None else known.depth + 1,
                kept,
                step.prompt_tokens,
                tail,
                ranges,
                replayed,
                same,
                messages,
                change,
            ),
        )

    def _tell_earlier(self, session: InspectedSession, turn: InspectedTurn) -> None:
        """Tell earlier turns what the request brings: results of their calls, and that it follows."""
        wanted = dict(turn.results)
        for earlier in islice(reversed(session.turns.values()), _LOOK_BACK):
            if not wanted and turn.before is None:
                break
            if earlier.id == turn.before and earlier.gap is None and earlier.ended is not None:
                earlier.gap = max(0.0, turn.received - earlier.ended) * 1000
                self.changes.turn(earlier.id)
            for call in earlier.timeline.calls.values():
                if call.id in wanted and call.result is None:
                    call.result = (turn.received - earlier.received) * 1000
                    call.is_error = wanted.pop(call.id)
                    self.changes.turn(earlier.id)
            if earlier.id == turn.before:
                break

    def closed(self, session: InspectedSession, turn: InspectedTurn) -> None:
        """Count what a turn takes now that it is over, and make room."""
        session.turn_bytes += turn.bytes
        self._count(session)
        self._fit()
        self.changes.turn(turn.id)

    def _fit(self) -> None:
        """Drop details of the oldest sessions, then the oldest sessions, then the oldest turns, until the rest fits."""
        room = self.limit - self._bodies.bytes
        if self._size <= room:
            return
        goal = int(room * _ENOUGH)
        older = list(self._sessions.values())[:-1]
        newest = next(reversed(self._sessions.values()))
        steps: list[tuple[Callable[[InspectedSession, int], int], InspectedSession, int]] = [
            *((self._drop_details, session, 0) for session in older),
            *((self._drop_turns, session, 0) for session in older),
            (self._drop_details, newest, 1),
            (self._drop_turns, newest, 1),
            (self._drop_details, newest, 0),
            (self._drop_turns, newest, 0),
        ]
        for drop, session, least in steps:
            # Of the newest session half at a time.
            while self._size > goal and drop(session, least):
                pass

    def _drop_details(self, session: InspectedSession, least: int) -> int:
        """Drop the details of the older half of the turns that are over; of all where ``least`` is 0.

        Returns:
            How many were dropped; the details of ``least`` turns stay.
        """
        chosen = [turn for turn in session.turns.values() if turn.details is not None and not turn.is_running]
        for turn in (dropped := _older(chosen, least)):
            turn.details = turn.brief = None
            forget_excerpts(turn)
            if turn.lost is not None:
                turn.lost = replace(turn.lost, tokens=None, messages=())
        if dropped:
            session.prune()
            self._count(session)
        return len(dropped)

    def _drop_turns(self, session: InspectedSession, least: int) -> int:
        """Drop the older half of the turns that are over, all where ``least`` is 0, and a session that has none left.

        Returns:
            How many were dropped; ``least`` turns stay.
        """
        dropped = _older([turn for turn in session.turns.values() if not turn.is_running], least)
        for turn in dropped:
            del session.turns[turn.id]
            self._of_turn.pop(turn.id, None)
        session.dropped += len(dropped)
        if dropped:
            session.prune()
            self._count(session)
        if not session.turns:
            self._sessions.pop(session.id, None)
            self._size -= session.counted
            session.counted = 0
            self.changes.gone(session.id)
        return len(dropped)

    def _count(self, session: InspectedSession) -> None:
        size = session.bytes
        self._size += size - session.counted
        session.counted = size


class Inspection:
    """Follows one turn of ``session`` for the inspector."""

    def __init__(
        self,
        inspector: Inspector,
        session: InspectedSession,
        turn: InspectedTurn,
        generation: Generation,
        *,
        follows: LiveChanges,
    ) -> None:
        self._inspector = inspector
        self._session = session
        self.turn = turn
        self._changes = follows
        self._details = turn.details
        self._is_superseded = False
        self._asked_logprobs = generation.logprob_reader is not None
        generation.decoder.set_tap(self._take)

    def _take(self, token_ids: Sequence[int], events: list[Event]) -> None:
        self.turn.timeline.take(token_ids, events)
        if self._changes:
            self._changes.turn(self.turn.id)

    def start(self) -> None:
        """Record that the engine is asked."""
        if self.turn.prepared is None:
            self.turn.prepared = self.turn.timeline.now()

    def encoder(self, encoder: EventEncoder, choice: int) -> EventEncoder:
        """Return ``encoder`` for the choice with this index, with what it makes recorded."""
        if self._details is None:
            return encoder
        logprobs = self._details.logprobs if self._asked_logprobs and choice == 0 else None
        return InspectedEncoder(encoder, self._details.wire, self.turn.timeline, choice, logprobs)

    def body(self, data: bytes, tokens: Sequence[object]) -> None:
        """Record an answer that is not streamed, and the tokens of the first choice if the client asked for them."""
        if self._details is None:
            return
        timeline = self.turn.timeline
        self._details.wire.add([("body", data)], timeline.now(), len(timeline.token_ms))
        if self._asked_logprobs:
            add_logprobs(self._details.logprobs, tokens)

    def supersede(self) -> None:
        """Record that the client has sent the request again."""
        self._is_superseded = True

    def settle(self, generation: Generation) -> None:
        """Record the generated tokens, before the next request of the session can come."""
        self._session.prompts.add_turn(self.turn.id, generation.token_ids.tobytes())

    def close(
        self,
        reason: FinishReason,
        usage: Usage,
        *,
        answer: str,
        first_seconds: float | None,
        error: SingletreeError | None,
    ) -> None:
        """Record the end of the answer."""
        turn = self.turn
        if not turn.is_running:
            return
        turn.total, turn.ended = turn.timeline.now(), time.time()
        turn.finish, turn.usage, turn.answer_id = reason, usage, answer
        turn.first_event = None if first_seconds is None else first_seconds * 1000
        if self._is_superseded:
            turn.status = "superseded"
        elif error is not None or reason == "error":
            turn.status = "error"
        else:
            turn.status = "cancelled" if reason == "cancelled" else "done"
        if turn.status == "error" and error is None:
            turn.error = ("unexpected", None)  # it is in the server's log
        if error is not None and not self._is_superseded:
            message = error.message[:2000] if self._inspector.keeps_texts else None
            turn.error = (type(error).__name__, message)
        if turn.details is not None:
            turn.details.wire.close()
        if not self._inspector.keeps_texts:
            forget_excerpts(turn)
        self._inspector.closed(self._session, turn)


def _repeated(
    session: InspectedSession, before: InspectedTurn | None, prompt: int, matched: int, fingerprint: int
) -> InspectedTurn | None:
    """Return the turn that has the same prompt as a new one; None for none."""
    if before is not None and prompt == matched == before.step.prompt_tokens:
        return before
    running = (turn for turn in session.turns.values() if turn.is_running)
    return next(
        (turn for turn in running if (turn.step.prompt_tokens, turn.fingerprint) == (prompt, fingerprint)),
        None,
    )


def _older(turns: list[InspectedTurn], least: int) -> list[InspectedTurn]:
    """Return the older half of ``turns`` without the last ``least`` ones; all of them where ``least`` is 0."""
    return turns if least == 0 else turns[: min(max(1, len(turns) // 2), len(turns) - least)]


def forget_excerpts(turn: InspectedTurn) -> None:
    """Drop the texts of a break: of the inspector's own, not those of the session's report."""
    broken = turn.step.broken
    if broken is not None:
        turn.step = replace(turn.step, broken=replace(broken, before="", was="", now=""))
