"""How the prompts of a recorded session go on from one another: counted, explained, and put into tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from benchmarks import documents
from benchmarks.replay import same

TARGET = 0.999
_BAND = 10  # turns of one column
_EXCERPT = 50
_POLICY = ("thinking_dropped", "template")
_OURS = ("answer_respelled", "unknown", "unexplained")
"""Causes of a loss that are the chat template's doing, and those that are the server's; all others are edits of the
harness.
"""


class Play(Protocol):
    """One generation, as the engine saw it."""

    @property
    def script(self) -> str:
        """What it played."""
        ...

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """What was generated on it."""
        ...


class Cause(NamedTuple):
    """Why a prompt does not go on from the one before: as the server reports it."""

    name: str
    place: str = ""
    was: str = ""
    now: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt of the session's conversation and how it goes on.

    Attributes:
        number: from 1, as the session's first turn is; the first has nothing to go on from.
        prompt: its tokens.
        expected: tokens of the last prompt and of what was generated on it.
        matched: those of them that the prompt begins with.
        generated: tokens that were generated on the last prompt; ``in_place`` of them the prompt has.
        cause: of a loss.
    """

    number: int
    prompt: int
    expected: int
    matched: int
    generated: int
    in_place: int
    cause: Cause | None = None

    @property
    def lost(self) -> int:
        """Tokens that should be there and are not."""
        return self.expected - self.matched

    @property
    def is_edited(self) -> bool:
        """Whether the loss is the harness's own edit."""
        return self.cause is not None and self.cause.name not in (*_POLICY, *_OURS)


@dataclass(frozen=True, slots=True)
class Session:
    """One session of a harness.

    Attributes:
        turns: of its conversation, from the second on.
        side: prompt tokens of the requests beside it (titles, memories); they begin prompts of their own.
        side_breaks: what the server took for a break of the prefix in one of those.
        server_lost: tokens that the server itself counted as lost in the conversation.
        complaints: of the harness.
    """

    harness: str
    model: str
    turns: tuple[Turn, ...]
    side: tuple[int, ...] = ()
    side_breaks: tuple[str, ...] = ()
    server_lost: int = 0
    complaints: tuple[str, ...] = ()


def conversation(plays: Sequence[Play], scripts: Sequence[str]) -> list[Play]:
    """The plays of the one conversation in which the model wrote ``scripts``, in order.

    A side request may quote the prompt and so play a script as well: of several that did, the one with which the
    next prompt begins is the conversation's. Raises ValueError when a script was never played.
    """
    following: Play | None = None
    found: list[Play] = []
    for script in reversed(scripts):
        candidates = [play for play in plays if play.script == script]
        if not candidates:
            raise ValueError(f"the session never came to {script}")
        following = max(candidates, key=lambda play: _kinship(play, following))
        found.append(following)
    return found[::-1]


def _kinship(play: Play, following: Play | None) -> tuple[int, int]:
    size = len(play.prompt_token_ids)
    return (0 if following is None else same(play.prompt_token_ids, following.prompt_token_ids), size)


def turn_after(number: int, last: Play, play: Play, cause: Cause | None = None) -> Turn:
    """How ``play`` goes on from ``last``."""
    before = [*last.prompt_token_ids, *last.token_ids]
    matched = same(before, play.prompt_token_ids)
    generated = len(last.token_ids)
    in_place = max(0, matched - len(last.prompt_token_ids))
    return Turn(number, len(play.prompt_token_ids), len(before), matched, generated, in_place, cause)


def follow(plays: Sequence[Play], steps: Iterable[Mapping[str, Any]]) -> list[Turn]:
    """All turns from the second on, each loss with its cause from ``steps`` (the steps of its
    sessions, as in ``GET /v1/singletree/sessions/ID``).
    """
    breaks = {step["prompt_tokens"]: step["break"] for step in steps}
    turns = []
    for number, (last, play) in enumerate(pairwise(plays), 2):
        turn = turn_after(number, last, play)
        if turn.lost:
            turn = turn_after(number, last, play, _cause(breaks.get(turn.prompt)))
        turns.append(turn)
    return turns


def _cause(broken: Mapping[str, Any] | None) -> Cause:
    if broken is None:
        return Cause("unexplained")
    return Cause(*(str(broken[field]) for field in ("cause", "place", "was", "now")))


def share(turns: Iterable[Turn]) -> float:
    """What part of the tokens that should be there is there; 1 where there is nothing to go on from."""
    kept = list(turns)
    return _part(sum(turn.matched for turn in kept), sum(turn.expected for turn in kept))


def share_but_edits(turns: Iterable[Turn]) -> float:
    """The same, without the tokens that were lost to the harness's own edits."""
    kept = list(turns)
    possible = sum(turn.matched if turn.is_edited else turn.expected for turn in kept)
    return _part(sum(turn.matched for turn in kept), possible)


def _part(some: int, whole: int) -> float:
    return some / whole if whole else 1.0


def report(sessions: Sequence[Session]) -> str:
    """The tables, the losses, and the totals."""
    turns = [turn for session in sessions for turn in session.turns]
    expected, matched = sum(turn.expected for turn in turns), sum(turn.matched for turn in turns)
    generated, in_place = sum(turn.generated for turn in turns), sum(turn.in_place for turn in turns)
    totals = (
        f"{documents.today()}; {len(sessions)} sessions, {len(turns):,} prompts that go on from another. Of "
        f"{expected:,} tokens that should stand at their beginnings {matched:,} do "
        f"({percent(share(turns))}; outside the harness's own edits {percent(share_but_edits(turns))}); of "
        f"{generated:,} generated ones {in_place:,} ({percent(_part(in_place, generated))}) are in place."
    )
    return "\n\n".join((totals, _table(sessions), _losses(sessions)))


def _table(sessions: Sequence[Session]) -> str:
    longest = max((len(session.turns) for session in sessions), default=0)
    bands = range(0, longest, _BAND)
    head = [
        "harness",
        "model",
        "turns",
        "last prompt",
        "generated in place",
        "share",
        "but edits",
        *(f"{begin + 2}–{min(begin + _BAND, longest) + 1}" for begin in bands),
        "side requests",
    ]
    return documents.table(head, [_row(session, bands) for session in sessions])


def _row(session: Session, bands: range) -> list[str]:
    turns = session.turns
    in_place, generated = sum(turn.in_place for turn in turns), sum(turn.generated for turn in turns)
    side = f"{len(session.side)} of {sum(session.side):,} tokens" if session.side else "none"
    return [
        session.harness,
        session.model,
        f"{len(turns) + 1}",
        f"{turns[-1].prompt:,}" if turns else "-",
        f"{in_place:,} of {generated:,}",
        percent(share(turns)),
        percent(share_but_edits(turns)),
        *(percent(share(turns[begin : begin + _BAND])) for begin in bands),
        side,
    ]


def percent(part: float) -> str:
    """``100 %`` only where nothing is missing."""
    return "100 %" if part >= 1 else f"{min(100 * part, 99.99):.2f} %"


def _losses(sessions: Sequence[Session]) -> str:
    lines = [line for session in sessions for line in _findings(session)]
    return "\n".join(lines) if lines else "No prompt lost a token, and the server called none broken."


def _findings(session: Session) -> Iterable[str]:
    """The findings of one session: its losses by cause, and where the server counts otherwise."""
    title = f"- {session.harness}, {session.model}"
    causes: dict[str, list[Turn]] = {}
    for turn in session.turns:
        if turn.cause is not None:
            causes.setdefault(turn.cause.name, []).append(turn)
    for name, turns in causes.items():
        first = turns[0].cause or Cause(name)
        whose = "the harness's edit" if turns[0].is_edited else "template" if name in _POLICY else "ours"
        yield (
            f"{title}: {name} ({whose}) in turns {spans([turn.number for turn in turns])}, "
            f"{sum(turn.lost for turn in turns):,} tokens. First in {first.place or 'an unknown place'}: "
            f"was {_quoted(first.was)}, is {_quoted(first.now)}"
        )
    lost = sum(turn.lost for turn in session.turns)
    # The token that ends a turn is no loss to the server: templates may end it with another.
    if not 0 <= lost - session.server_lost <= sum(turn.lost > 0 for turn in session.turns):
        yield f"{title}: the server counts {session.server_lost:,} tokens lost, the engine's log says {lost:,}"
    for broken in session.side_breaks:
        yield f"{title}: the server took a side request for a break: {broken}"
    for complaint in session.complaints:
        yield f"{title}: the harness complained: {_quoted(complaint)}"


def _quoted(text: str) -> str:
    """An excerpt that stands in a line of Markdown."""
    shown = " ".join(text[:_EXCERPT].split()).replace("`", "'").replace("|", "¦")
    return f"`{shown}`"


def spans(numbers: Sequence[int]) -> str:
    """``2–4, 7`` for 2, 3, 4, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low}–{high}" for low, high in runs)
