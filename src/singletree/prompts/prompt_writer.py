"""Writes the prompt of a request: every step from a conversation to token ids is a stage, and they are in order here.

``prompt_cache`` has the interface of a stage, and the rules by which it goes on from the last prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from singletree.conversation import Conversation, Reasoning, Request, Thinking, Tool, Turn
from singletree.errors import InvalidRequest
from singletree.pictures import PromptPicture
from singletree.prompts.history.canonicalization import SESSION_CLOCK, Canonicalize, ToolsOf, no_session
from singletree.prompts.history.context_editing import apply_edits, read_results
from singletree.prompts.prompt_cache import PromptCache
from singletree.prompts.replay.recall import CapsuleReader, Recalled, RecallTurns, RestoredReasoning
from singletree.prompts.replay.splicing import ParseTurn, RenderedTurns, SpliceTurns
from singletree.prompts.replay.turn_comparison import generated_parts, written_text
from singletree.prompts.replay.turn_keys import Fingerprint, HistoryDigests
from singletree.prompts.replay.turn_memory import GeneratedTurn, TurnMemory
from singletree.prompts.replay.turn_places import TurnDelimiters
from singletree.prompts.template.capabilities import (
    CLOCK,
    holds_reasoning,
    is_switched_off,
    thinking_arguments,
)
from singletree.prompts.template.chat_template import ChatTemplate, RenderPrompt
from singletree.prompts.template.content import part_text
from singletree.prompts.template.messages import RenderParts
from singletree.prompts.template.pictures import place_pictures, shown_pictures
from singletree.prompts.tokenizer.encode_prompt import EncodePrompt
from singletree.prompts.tokenizer.tokenizer import GuardFunction, Tokenizer
from singletree.request_options import AppliedEdit, ClearThinking

_PROBE = "probe-thought"

_ROLES_OF_STEPS = ("assistant", "tool")
"""The roles of the turns by which a conversation grows while an agent works."""


class SessionClock:
    """A clock that stands still, for ``strftime_now`` in a template.

    Args:
        now: the present time, in unix seconds.

    Attributes:
        at: the time that it shows, in unix seconds.
        rules: the name of the rule, once the template printed something else than it would have for ``now``.
    """

    def __init__(self, at: float, now: float) -> None:
        self.at = at
        self.rules: tuple[str, ...] = ()
        self._now = datetime.fromtimestamp(now)

    def __call__(self, format: str) -> str:
        """Return the local time in ``format``, a format of ``strftime``."""
        text = datetime.fromtimestamp(self.at).strftime(format)
        if text != self._now.strftime(format):
            self.rules = (SESSION_CLOCK.name,)
        return text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SessionClock) and self.at == other.at

    def __hash__(self) -> int:
        return hash(self.at)


class Prompt(NamedTuple):
    """A prompt for the model, with what later stages need to know about it.

    Attributes:
        turns: the turns of the conversation, after edits and canonicalization.
        rules: names of the stability rules that changed something in them.
        replayed: number of earlier turns that are in the prompt by their own tokens.
        digests: digests of the history before each turn, under which the turn memory may hold it.
        remembered: the turns that the turn memory holds, in order.
        settings: the template variables for reasoning that the client asked for.
        clock: the clock that the template printed; None if it prints no time.
        given: the turns that the template received, with remembered turns in their places.
        pictures_lost: the number of pictures that are notes in the prompt, since the template left some of them out.
        prints_thought: returns whether the template would print reasoning in the turn with this index.
        piece_ends: the number of tokens up to the end of each piece but the last; text and replayed turns alternate.
        rule_places: (first, end, names of rules) for each range of ``turns`` that stability rules changed.
    """

    text: str
    token_ids: array[int]
    turns: tuple[Turn, ...] = ()
    rules: tuple[str, ...] = ()
    replayed: int = 0
    applied_edits: tuple[AppliedEdit, ...] = ()
    tools: tuple[Tool, ...] = ()
    digests: HistoryDigests | None = None
    remembered: tuple[GeneratedTurn, ...] = ()
    settings: Mapping[str, Any] = MappingProxyType({})
    clock: SessionClock | None = None
    given: tuple[Turn, ...] = ()
    prints_thought: Callable[[int], bool] = bool
    pictures: tuple[PromptPicture, ...] = ()
    pictures_lost: int = 0
    piece_ends: Sequence[int] = ()
    rule_places: Sequence[tuple[int, int, frozenset[str]]] = ()

    @property
    def fingerprints(self) -> tuple[Fingerprint, ...]:
        return () if self.digests is None else self.digests.fingerprints


_SHORT_TEXT = 65_536
"""Characters that may always be tokenized, however small the window is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWriter:
    """Writes the prompts of one model.

    Attributes:
        render_parts: writes parts of an assistant turn in the model's own format.
        parser_for: returns the parser of the model's turns, for the tools of a conversation.
        own_guard: keeps special tokens out of text that comes back as the assistant's.
        delimiters: what the template writes around an assistant's turn; None if turns cannot be separated.
        reasoning_tags: the markers of the model's reasoning.
        call_opener: the text that opens a call; empty if there is none.
        rules_off: the names of the canonicalization rules that are switched off.
        restore_reasoning: whether reasoning that a harness left out is restored.
        thinking: the defaults for requests that do not mention reasoning.
        placeholder_id: the token that stands for a picture; None if the model gets no pictures.
        picture_mark: the text that stands for a picture in a message; empty where the template has a form for it.
        is_minted: returns whether a server of this kind has made the id of a call.
        others: returns the writers of the server's other models, which may have begun a conversation.
    """

    template: ChatTemplate
    tokenizer: Tokenizer
    cache: PromptCache
    render_parts: RenderParts
    parser_for: Callable[[Sequence[Tool]], ParseTurn]
    own_guard: GuardFunction
    delimiters: TurnDelimiters | None = None
    memory: TurnMemory | None = None
    reasoning_tags: Sequence[str] = ()
    call_opener: str = ""
    rules_off: frozenset[str] = frozenset()
    restore_reasoning: bool = True
    thinking: Thinking = Thinking()  # noqa: RUF009 (immutable)
    placeholder_id: int | None = None
    picture_mark: str = ""
    capsules_for: Callable[[Conversation], CapsuleReader | None] = lambda _: None
    clock_for: Callable[[Recalled], SessionClock | None] = lambda _: None
    is_minted: Callable[[str], bool] = lambda _: False
    others: Callable[[], Sequence[PromptWriter]] = tuple

    def write(
        self,
        request: Request,
        tools_of: ToolsOf = no_session,
        check_characters: Callable[[int], None] = lambda _: None,
    ) -> Prompt:
        """Render and tokenize the prompt of ``request``.

        ``tools_of`` returns the tools that earlier requests of the session sent. ``check_characters`` is called with
        the length of the rendered text before it is tokenized, unless it is short; what it raises refuses the prompt.
        Raises InvalidRequest if the template refuses the conversation, or if a capsule was changed and that is refused.
        """
        capabilities = self.template.capabilities

        def count_tokens(text: str) -> int:
            return len(self.tokenizer.encode_array(text))

        edited, applied_edits = apply_edits(request.conversation, request.context_edits, count_tokens)
        edited = read_results(edited, capabilities.result_marks, self.call_opener)
        work = self.cache.resume(edited.turns, edited.tools, _settings(request))
        given = Conversation(work.turns, work.tools)
        canonical = work.run(Canonicalize(self.rules_off, tools_of), given)
        known = work.run(self._recall(request, canonical.conversation), canonical.conversation)
        clock = self.clock_for(known)
        settings = self._thinking_arguments(request, Conversation(()))
        text = work.run(self._render(request, known.conversation, settings, clock), known.conversation)
        parse = self.parser_for(known.conversation.tools)
        splice = SpliceTurns(self.delimiters, parse, self.tokenizer.guard)
        pieces = work.run(splice, RenderedTurns(text, self._without_placeholders(request, known)))
        if len(text) > _SHORT_TEXT:
            check_characters(len(text))
        encoded = work.run(EncodePrompt(self.tokenizer), pieces)
        token_ids = encoded.tail.token_ids
        pictures = self._placed(request, known.conversation, token_ids)
        if pictures is None:
            blind = replace(self, placeholder_id=None).write(request, tools_of, check_characters)
            return blind._replace(pictures_lost=len(request.pictures))
        work.keep()
        return Prompt(
            text,
            token_ids,
            canonical.conversation.turns,
            canonical.rules if clock is None else (*canonical.rules, *clock.rules),
            pieces.replayed,
            applied_edits,
            canonical.conversation.tools,
            known.digests,
            known.in_order,
            settings,
            clock,
            known.conversation.turns,
            partial(self._prints_thought, request, known.conversation, settings),
            pictures,
            piece_ends=encoded.ends,
            rule_places=canonical.places,
        )

    def new_bytes(self, request: Request, size: int) -> int:
        """Return about how many bytes of a request of ``size`` bytes are new, so that its prompt takes work.

        With a new turn of another role than the model and its tools it is all of them: behind a question of the user,
        many templates print the turns before it in another way.
        """
        if request.context_edits or request.truncate or request.pictures:
            return size
        conversation = request.conversation
        new = self.cache.new_turns(conversation.turns, conversation.tools, _settings(request))
        if any(turn.role not in _ROLES_OF_STEPS for turn in new):
            return size
        return sum(len(part_text(part)) for turn in new for part in turn.parts)

    def _shows_pictures(self, request: Request) -> bool:
        return self.placeholder_id is not None and bool(request.pictures)

    def _without_placeholders(self, request: Request, known: Recalled) -> Recalled:
        """Return ``known`` without the turns in which the model itself wrote the placeholder of a picture, or its text.

        They become text, in which the token is broken: an engine would take it for the place of a picture.
        """
        if not self._shows_pictures(request):
            return known
        turns = {
            i: turn
            for i, turn in known.turns.items()
            if self.placeholder_id not in turn.token_ids
            and not _has_text(known.conversation.turns[i], self.tokenizer.neutral)
        }
        return known if len(turns) == len(known.turns) else known._replace(turns=turns)

    def _placed(
        self, request: Request, conversation: Conversation, token_ids: array[int]
    ) -> tuple[PromptPicture, ...] | None:
        if self.placeholder_id is None or not request.pictures:
            return ()
        shown = shown_pictures(conversation.turns, in_text=bool(self.picture_mark))
        return place_pictures(self.placeholder_id, token_ids, shown, request.pictures)

    def _recall(self, request: Request, conversation: Conversation) -> RecallTurns:
        return RecallTurns(
            self.memory,
            self._restored_reasoning(request),
            self.template.capabilities.unanswered,
            self.reasoning_tags,
            self.capsules_for(conversation),
            self.is_minted,
            lambda: [each._recall(request, conversation) for each in self.others()],
        )

    def _restored_reasoning(self, request: Request) -> RestoredReasoning:
        edits = request.context_edits
        cleared = any(isinstance(edit, ClearThinking) and edit.keep_turns is not None for edit in edits)
        if cleared or not self.restore_reasoning:
            return "none"
        is_off = is_switched_off(request.thinking, self.thinking, self.template.capabilities)
        return "written_while_off" if is_off else "all"

    def _render(
        self,
        request: Request,
        conversation: Conversation,
        settings: Mapping[str, Any],
        clock: SessionClock | None,
    ) -> RenderPrompt:
        """Return the stage; ``settings`` are the template's variables for a conversation without reasoning."""
        arguments = settings
        if holds_reasoning(conversation):
            arguments = self._thinking_arguments(request, conversation)
        return RenderPrompt(
            self.template,
            self.render_parts,
            arguments if clock is None else {**arguments, CLOCK: clock},
            add_generation_prompt=request.opens_turn,
            continues=request.continues,
            guard=self.tokenizer.guard,
            own_guard=self.own_guard,
            vision=self._shows_pictures(request),
            picture_mark=self.picture_mark,
        )

    def _thinking_arguments(self, request: Request, conversation: Conversation) -> dict[str, Any]:
        capabilities = self.template.capabilities
        return thinking_arguments(request.thinking, capabilities, conversation, default=self.thinking)

    def _prints_thought(
        self, request: Request, conversation: Conversation, settings: Mapping[str, Any], turn: int
    ) -> bool:
        """Return whether the template prints reasoning in the turn with index ``turn``: its policy may drop it."""
        turns = list(conversation.turns)
        turns[turn] = replace(turns[turn], parts=(Reasoning(_PROBE), *turns[turn].parts))
        probed = replace(conversation, turns=tuple(turns))
        try:
            text, _ = self._render(request, probed, settings, None).run(probed, None)
        except InvalidRequest:
            return False
        return _PROBE in text


def _settings(request: Request) -> object:
    return request.thinking, request.opens_turn, request.continues


def _has_text(turn: Turn, texts: Collection[str]) -> bool:
    written = map(written_text, generated_parts(turn) if texts else ())
    return any(text in each for each in written for text in texts)
