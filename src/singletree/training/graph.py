"""One graph a session: its calls, what each prompt continues, which tokens can be trained on, and why others cannot.

A call continues another one if its prompt begins with the prompt and the completion of that call. Only what the file
shows counts: of two answers to one prompt, the one that a later prompt continues is the one that the client used.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from zlib import crc32

from singletree.errors import BadConfiguration
from singletree.training.records import (
    CUT_REASONS,
    AnyLine,
    CallEnd,
    CallStart,
    LineReader,
    SessionComplete,
    SessionStart,
    unpack_logprobs,
    unpack_tokens,
)


@dataclass(slots=True, eq=False)
class CapturedCall:
    """One call of a session.

    Attributes:
        base, keep: see ``CallStart``.
        new: the tokens of the prompt behind the first ``keep``.
        completion: all tokens that were generated.
        place, ended_at: the lines at which it begins and ends; infinity for one that has not ended.
        parent, shared: the call whose turn its prompt has at its end, and how many tokens of it.
        twin: the first call with the same prompt; None for the first.
        continued, edited: whether a later prompt has its turn as it is, and whether one has another turn in its place.
    """

    start: CallStart
    base: CapturedCall | None
    new: array[int]
    place: int
    completion: array[int] = field(default_factory=lambda: array("I"))
    end: CallEnd | None = None
    ended_at: float = inf
    parent: CapturedCall | None = None
    shared: int = 0
    twin: CapturedCall | None = None
    continued: bool = False
    edited: bool = False

    @property
    def id(self) -> str:
        return self.start.call

    @property
    def keep(self) -> int:
        return self.start.keep

    @property
    def prompt_length(self) -> int:
        return self.keep + len(self.new)

    @property
    def length(self) -> int:
        return self.prompt_length + len(self.completion)

    @property
    def content_end(self) -> int:
        """Return where its turn ends, without the tokens that only end it."""
        return self.prompt_length + (0 if self.end is None else self.end.content)

    @property
    def is_cut(self) -> bool:
        return self.end is None or self.end.finish in CUT_REASONS

    @property
    def continues(self) -> bool:
        """Return whether its prompt has the whole turn of ``parent``."""
        parent = self.parent
        return parent is not None and not parent.is_cut and self.shared >= parent.content_end

    def tokens(self, end: int | None = None) -> array[int]:
        """Return the prompt and the completion, or the first ``end`` tokens of them."""
        at = self.length if end is None else end
        pieces: list[array[int]] = []
        node: CapturedCall | None = self
        while node is not None and at:
            if at > node.keep:
                own = node.new + node.completion
                pieces.append(own[: at - node.keep])
                at = node.keep
            node = node.base
        found = array("I")
        for piece in reversed(pieces):
            found += piece
        return found

    @property
    def prompt(self) -> array[int]:
        return self.tokens(self.prompt_length)


class SessionGraph:
    """The calls of one session, in the order in which they began.

    Attributes:
        lacks: why something may be missing; empty for a session that is known as a whole.
        problems: what is wrong in the file, so that nothing of it can be trusted.
    """

    def __init__(self) -> None:
        self.head: SessionStart | None = None
        self.calls: dict[str, CapturedCall] = {}
        self.completion: SessionComplete | None = None
        self.lacks: list[str] = []
        self.problems: list[str] = []
        self._place = 0

    def add(self, line: AnyLine) -> None:
        self._place += 1
        try:
            if isinstance(line, SessionStart):
                if self.head is not None:
                    self.problems.append("the session begins twice")
                self.head = line
            elif isinstance(line, CallStart):
                self._begin(line)
            elif isinstance(line, CallEnd):
                self._finish(line)
            elif isinstance(line, SessionComplete):
                self.completion = line
                if line.calls > len(self.calls):
                    self.problems.append(f"{line.calls} calls are counted, and {len(self.calls)} are there")
            else:
                self.lacks.append(line.why)
        except ValueError as error:
            self.problems.append(f"{getattr(line, 'call', line)}: {error}")

    def _begin(self, line: CallStart) -> None:
        base = self.calls.get(line.base)
        call = CapturedCall(line, base, unpack_tokens(line.tokens), self._place)
        if line.call in self.calls:
            self.problems.append(f"the call {line.call} begins twice")
        elif (base is None) != (not line.base) or line.keep > (0 if base is None else base.length):
            self.problems.append(f"the call {line.call} begins with tokens that are not there")
        else:
            self.calls[line.call] = call

    def _finish(self, line: CallEnd) -> None:
        call = self.calls.get(line.call)
        if call is None or call.end is not None:
            self.problems.append(f"the call {line.call} ends {'twice' if call else 'without its beginning'}")
            return
        call.completion, call.end, call.ended_at = unpack_tokens(line.tokens), line, self._place
        known = len(unpack_logprobs(line.logprobs))
        if line.content > len(call.completion) or known not in (0, len(call.completion)):
            self.problems.append(f"the end of the call {line.call} contradicts itself")

    def link(self, reader: LineReader) -> None:
        """Find out how the calls continue one another, when all lines are added."""
        self.problems += reader.problems
        if reader.rest or reader.torn:
            # Only the last write of a server that has ended may be cut: a line in the middle is a changed file.
            (self.lacks if reader.rest and not reader.torn else self.problems).append(
                "a line was not written to its end"
                if not reader.torn
                else f"line {reader.torn[0]} is damaged"
            )
        if self.head is None and not self.problems:
            self.lacks.append("the session has no first line")
        self.lacks += [f"the call {call.id} has no end" for call in self.calls.values() if call.end is None]
        if self.completion is not None and self.completion.calls < len(self.calls):
            self.lacks.append(f"{len(self.calls) - self.completion.calls} calls came after its completion")
        for call in self.calls.values():
            _place(call)
            if (parent := call.parent) is None:
                continue
            if call.continues:
                parent.continued = True
            else:
                parent.edited = True

    @property
    def status(self) -> str:
        """Return ``complete``, ``open`` or, where something may be missing, ``incomplete``."""
        if self.lacks or self.problems:
            return "incomplete"
        return "open" if self.completion is None else "complete"

    def masked(self, call: CapturedCall) -> str:
        """Return why the completion of ``call`` is not trained on; empty where it is."""
        if call.is_cut:
            return "cut"
        if call.start.pictures:
            return "pictures"
        if not call.continued:
            if call.edited:
                return "edited"
            first = call.twin or call
            twins = [each for each in self.calls.values() if first in (each, each.twin)]
            if any(each.continued for each in twins):
                return "unused"
            if sum(not each.is_cut for each in twins) > 1:
                return "ambiguous"
        return ""

    def terminal(self) -> tuple[CapturedCall | None, str]:
        """Return the call that made the scored answer, or None and why it is not known."""
        if self.completion is None:
            return None, "the session is not completed"
        if self.completion.terminal:
            return self.calls.get(self.completion.terminal), "the call is not in the session"
        ended = [call for call in self.calls.values() if call.end is not None]
        if self.lacks or not ended:
            return None, self.lacks[0] if self.lacks else "it has no calls"
        last = max(ended, key=lambda call: call.ended_at)
        if last.end is not None and last.end.calls:
            return None, "the last call asks for tools"
        if last.start.is_subagent:
            return None, "the last call is that of a sub-agent"
        if reason := self.masked(last):
            return None, f"the last call is {reason}"
        if any(call is not last and call.ended_at > last.place for call in self.calls.values()):
            return None, "another call ran beside the last one"
        return last, ""

    def followers(self) -> list[CapturedCall]:
        """Return the calls whose prompts end in the whole turn of an earlier call, or in another one in its place."""
        calls = self.calls.values()
        return [call for call in calls if call.parent is not None and not call.parent.is_cut]


def _place(call: CapturedCall) -> None:
    """Find the last turn in the prompt of ``call``, and the first call with the same prompt."""
    node, shared = call.base, call.keep
    while node is not None:
        if shared >= node.prompt_length:
            if call.prompt_length > node.prompt_length:
                call.parent, call.shared = node, shared
                return
            if call.twin is None:
                call.twin = node.twin or node
        shared, node = min(shared, node.keep), node.base


def read_session(path: Path) -> SessionGraph:
    """Return the graph of the session in the file ``path``. Raises BadConfiguration where it cannot be read."""
    try:
        return parse_session(path.read_bytes())
    except OSError as error:
        raise BadConfiguration(f"{path}: {error.strerror}; give a file or folder of --capture") from None


def parse_session(data: bytes) -> SessionGraph:
    """Return the graph of a session whose file has the content ``data``."""
    reader, graph = LineReader(), SessionGraph()
    for line in reader.feed(data):
        graph.add(line)
    graph.link(reader)
    return graph


def check_session(graph: SessionGraph) -> list[str]:
    """Return what is wrong; nothing for a file that is as it was written.

    Each prompt is put together from its pieces and compared with the checksum of what the engine was given, and for
    each call that continues another one, its prompt has to begin with that prompt and completion.
    """
    found = [*graph.problems]
    for call in graph.calls.values():
        prompt = call.prompt
        if (len(prompt), crc32(prompt.tobytes())) != (call.start.length, call.start.crc):
            found.append(f"the prompt of the call {call.id} is not the one that the engine was given")
        if call.continues and (parent := call.parent) is not None:
            end = min(call.shared, parent.length)
            if prompt[:end] != parent.tokens(end) or end < parent.content_end:
                found.append(f"the prompt of the call {call.id} does not begin with the turn {parent.id}")
    return found


@dataclass(frozen=True, slots=True)
class TrainedSpan:
    """A completion in a trajectory, from ``start`` to before ``end``; ``masked`` is why it is not trained on there."""

    call: CapturedCall
    start: int
    end: int
    masked: str


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One way from the first prompt of a conversation to its last completion.

    Attributes:
        spans: its completions, in order. All other tokens are the client's or the template's.
        is_terminal: whether the scored answer is in it.
    """

    spans: tuple[TrainedSpan, ...]
    is_terminal: bool

    @property
    def last(self) -> CapturedCall:
        return self.spans[-1].call

    @property
    def trained(self) -> int:
        return sum(self.loss_mask())

    def token_ids(self) -> array[int]:
        return self.last.tokens()

    def loss_mask(self) -> list[int]:
        mask = [0] * self.last.length
        for span in self.spans:
            if not span.masked:
                mask[span.start : span.end] = [1] * (span.end - span.start)
                for start, end in span.call.end.redacted if span.call.end else ():
                    mask[span.start + start : span.start + end] = [0] * (end - start)
        return mask

    def logprobs(self) -> list[float | None]:
        """Return those of completions, as the engine reported them; None for other tokens."""
        known: list[float | None] = [None] * self.last.length
        for span in self.spans:
            end = span.call.end
            if end is not None and end.logprobs:
                values = unpack_logprobs(end.logprobs)[: span.end - span.start]
                known[span.start : span.end] = [None if value != value else value for value in values]
        return known


def trajectories(graph: SessionGraph) -> list[Trajectory]:
    """Return the trajectories of a session, that of the scored answer first, then the longest ones.

    A completion is trained on in the first one that has it: in the others it is masked as ``elsewhere``.
    """
    if graph.problems:
        return []
    has_next = {call.parent for call in graph.calls.values() if call.continues}
    paths = [_path(call) for call in graph.calls.values() if call not in has_next]
    terminal, _ = graph.terminal()
    reasons = {call: graph.masked(call) for call in graph.calls.values()}

    def order(path: list[tuple[CapturedCall, int]]) -> tuple[bool, int]:
        calls = [call for call, _ in path]
        return terminal not in calls, -sum(len(call.completion) for call in calls if not reasons[call])

    paths.sort(key=order)
    owner: dict[CapturedCall, int] = {}
    found = []
    for number, path in enumerate(paths):
        spans = []
        for call, end in path:
            masked = reasons[call] or ("edited" if end < call.content_end else "")
            if not masked and owner.setdefault(call, number) != number:
                masked = "elsewhere"
            spans.append(TrainedSpan(call, call.prompt_length, end, masked))
        found.append(Trajectory(tuple(spans), terminal in [call for call, _ in path]))
    return found


def _path(leaf: CapturedCall) -> list[tuple[CapturedCall, int]]:
    """Return the calls whose turns lead to ``leaf``, and where the part of each that its prompt has ends."""
    path = [(leaf, leaf.length)]
    call = leaf
    while call.parent is not None:
        path.append((call.parent, min(call.shared, call.parent.length)))
        call = call.parent
    return path[::-1]
