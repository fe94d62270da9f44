"""Keeps what the agents did, within a bound of memory, and follows the turns that run.

It records where the server works anyway: the decoder tells it each token, the encoders each event, the lifecycle of an
answer its start and its end. Nothing of it runs when the inspector is off.
"""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from singletree.events import Event
from singletree.inspector.live_changes import LiveChanges
from singletree.inspector.prompt_history import PromptEntry, PromptMessage, body_change
from singletree.inspector.turn_record import (
    InspectedSession,
    InspectedTurn,
    Lanes,
    TurnDetails,
    client_of,
    forget_excerpts,
    harness_of,
    lost_part,
    message_parts,
    repeated_turn,
    session_id,
    settings_of,
    tool_results,
)
from singletree.inspector.wire_record import (
    InspectedEncoder,
    TurnTimeline,
    WireBudget,
    WireRecord,
    add_logprobs,
)
from singletree.lru import LruCache
from singletree.protocols.answer import EventEncoder
from singletree.server.answers.observer import AnswerRecord, Arrival
from singletree.server.ids import new_id
from singletree.server.sessions.divergence import WIDTH
from singletree.server.sessions.sessions import Opened
from singletree.server.turn.generation import Generation

PAGE = "/inspect"
"""The path of the page."""

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


class Inspector:
    """The sessions and turns of one process.

    Args:
        limit: most bytes to keep.
        keeps_texts: whether prompts, answers and requests are kept (``--inspect-content``).

    Attributes:
        process: the number of this process, from 1.
        owner: whose sessions and turns it shows; empty for those of all.
    """

    owner = ""

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
        self._whole = self  # counts what the turns of all owners take

    @property
    def used(self) -> int:
        if self.owner:
            return sum(session.counted for session in self.sessions())
        return self._size + self._bodies.bytes

    def _shows(self, session: InspectedSession) -> bool:
        return bool(session.turns) and self.owner in ("", session.owner)

    def sessions(self) -> list[InspectedSession]:
        """Return the sessions that have turns here, the one used last first."""
        return [session for session in reversed(self._sessions.values()) if self._shows(session)]

    def session(self, id: str) -> InspectedSession | None:
        session = self._sessions.get(id)
        return session if session is not None and self._shows(session) else None

    def turn(self, id: str) -> tuple[InspectedSession, InspectedTurn] | None:
        session = self.session(self._of_turn.get(id, ""))
        return None if session is None or id not in session.turns else (session, session.turns[id])

    def of(self, owner: str) -> Inspector:
        part = copy.copy(self)
        part.owner = owner
        return part

    def session_link(self, key: str, owner: str) -> str:
        return f"{PAGE}#/sessions/{session_id(key, owner)}"

    def take_session(self, key: str) -> Lanes | None:
        session = self._sessions.get(session_id(key, self.owner))
        if session is None:
            return None
        lanes, session.lanes = session.lanes, Lanes()
        return lanes

    def receive_session(self, key: str, taken: Lanes) -> None:
        session = self._session(key, self.owner)
        session.lanes.merge(taken)
        self._whole._count(session)

    def begin(self, arrival: Arrival, generation: Generation, opened: Opened) -> Inspection:
        if self.owner:
            return self._whole.begin(arrival, generation, opened)
        session = self._session(opened.step.session, opened.step.owner)
        turn = self._new_turn(session, arrival, generation, opened)
        self._note(session, arrival, generation)
        self._add_prompt(session, turn, arrival.body, generation, opened)
        session.turns[turn.id] = turn
        self._of_turn[turn.id] = session.id
        self._sessions.move_to_end(session.id)
        self._count(session)
        self._update_earlier(session, turn)
        self.changes.turn(turn.id)
        return Inspection(self, session, turn, generation, follows=self.changes)

    def _session(self, key: str, owner: str) -> InspectedSession:
        id = session_id(key, owner)
        session = self._sessions.get(id)
        if session is None:
            session = self._sessions[id] = InspectedSession(id, key, owner)
        return session

    def _new_turn(
        self, session: InspectedSession, arrival: Arrival, generation: Generation, opened: Opened
    ) -> InspectedTurn:
        step, prompt, request = opened.step, generation.prompt, generation.request
        id = new_id("turn_")
        compared = None if opened.compared is None else opened.compared.inspected or None
        before = None if compared is None else session.turns.get(compared)
        fingerprint = hash((opened.step.matched, opened.tokens[step.matched * WIDTH :]))
        repeated = repeated_turn(session, before, step.prompt_tokens, step.matched, fingerprint)
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
            request_id=arrival.trace.request_id,
            protocol=arrival.protocol_name,
            path=arrival.trace.route,
            stream=request.stream,
            process=self.process,
            is_agent=request.agent.is_subagent,
            step=step,
            results=tool_results(prompt.turns),
            timeline=TurnTimeline(arrival.trace.began),
            received=arrival.trace.received,
            fingerprint=fingerprint,
            rules=tuple(prompt.rules),
            replayed_turns=prompt.replayed,
            pictures=len(prompt.pictures),
            same_messages=opened.same_messages,
            lost=lost_part(opened, keeps_texts=self.keeps_texts) if step.course == "broken" else None,
            details=TurnDetails(
                wire,
                session.tools_of(opened.tools, keeps_texts=self.keeps_texts),
                settings_of(prompt.settings),
                generation.token_ids if self.keeps_texts else None,
                len(arrival.body),
            ),
        )

    def _note(self, session: InspectedSession, arrival: Arrival, generation: Generation) -> None:
        agent = generation.request.agent
        session.harness = harness_of(arrival.headers) or session.harness
        session.client = client_of(arrival.headers) or session.client
        session.is_agent = session.is_agent or agent.is_subagent
        outer = session.key.rpartition("/")[0] if agent.is_subagent else ""
        if parent := agent.parent_session_id or outer:
            session.parent = session_id(parent, session.owner) if parent != session.key else None

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

    def _update_earlier(self, session: InspectedSession, turn: InspectedTurn) -> None:
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
        """Drop the details of the older half of the turns that are over but ``least``, all where it is 0; return how
        many.
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
        """Drop turns that are over as ``_drop_details`` does, and a session that has none left."""
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
            self.changes.gone(session.id, session.owner)
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

    @property
    def id(self) -> str:
        return self.turn.id

    @property
    def link(self) -> str:
        return f"{PAGE}#/sessions/{self.turn.session}/turns/{self.turn.id}"

    def _take(self, token_ids: Sequence[int], events: list[Event]) -> None:
        self.turn.timeline.take(token_ids, events)
        if self._changes:
            self._changes.turn(self.turn.id)

    def start(self) -> None:
        if self.turn.prepared is None:
            self.turn.prepared = self.turn.timeline.now()

    def encoder(self, encoder: EventEncoder, choice: int) -> EventEncoder:
        if self._details is None:
            return encoder
        logprobs = self._details.logprobs if self._asked_logprobs and choice == 0 else None
        return InspectedEncoder(encoder, self._details.wire, self.turn.timeline, choice, logprobs)

    def body(self, data: bytes, tokens: Sequence[object]) -> None:
        if self._details is None:
            return
        timeline = self.turn.timeline
        self._details.wire.add([("body", data)], timeline.now(), len(timeline.token_ms))
        if self._asked_logprobs:
            add_logprobs(self._details.logprobs, tokens)

    def supersede(self) -> None:
        self._is_superseded = True

    def settle(self, generation: Generation) -> None:
        self._session.prompts.add_turn(self.turn.id, generation.token_ids.tobytes())

    def close(self, record: AnswerRecord) -> None:
        turn = self.turn
        if not turn.is_running:
            return
        turn.total, turn.ended = turn.timeline.now(), time.time()
        reason, error, first = record.finished.reason, record.trace.error, record.trace.first_seconds
        turn.finish, turn.usage, turn.answer_id = reason, record.finished.usage, record.id
        turn.first_event = None if first is None else first * 1000
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


def _older(turns: list[InspectedTurn], least: int) -> list[InspectedTurn]:
    """Return the older half of ``turns`` without the last ``least`` ones; all of them where ``least`` is 0."""
    return turns if least == 0 else turns[: min(max(1, len(turns) // 2), len(turns) - least)]
