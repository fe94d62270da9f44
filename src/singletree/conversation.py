"""What is said: a conversation, its turns and their parts, as frozen values.

Every wire protocol decodes into these values and every prompt is rendered from them, so no protocol
is ever converted into another. Standard library only; nothing here has an identity, a clock or I/O.

``extra`` carries what one protocol said and the canonical form has no word for (signatures, encrypted
reasoning, item ids, cache marks). The same protocol gives it back verbatim; everybody else ignores it,
and it takes no part in equality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Extra = Mapping[str, Any]
Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Text:
    """Visible text."""

    text: str
    extra: Extra | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """One span of the model's reasoning, without its markers."""

    text: str
    extra: Extra | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the model made.

    Attributes:
        name: the tool's name, as the model wrote it.
        arguments: JSON text. For JSON families these are the model's own bytes; never re-serialised.
        id: the call's id; empty when neither the wire nor the format gave one.
        complete: False when generation was cut inside the arguments. Such a call is never dispatched.
    """

    name: str
    arguments: str
    id: str = ""
    complete: bool = True
    extra: Extra | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Image:
    """A picture: base64 ``data`` of ``media_type``, or a ``url``."""

    media_type: str = ""
    data: str = ""
    url: str = ""
    extra: Extra | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Document:
    """A document (PDF, plain text …): base64 ``data`` of ``media_type``, or a ``url``."""

    media_type: str = ""
    data: str = ""
    url: str = ""
    title: str = ""
    extra: Extra | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ToolReference:
    """The place at which a deferred tool becomes visible to the model."""

    name: str
    extra: Extra | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the harness answered to the call ``call_id``."""

    call_id: str
    parts: tuple[Text | Image | Document | ToolReference, ...] = ()
    is_error: bool = False
    extra: Extra | None = field(default=None, compare=False)


Part = Text | Reasoning | ToolCall | ToolResult | Image | Document | ToolReference


@dataclass(frozen=True, slots=True)
class Turn:
    """One role's say, its parts in the order in which they were said.

    ``ToolResult`` parts stand in turns of role ``tool`` only; ``Reasoning`` and ``ToolCall`` in turns of
    role ``assistant`` only.
    """

    role: Role
    parts: tuple[Part, ...] = ()
    extra: Extra | None = field(default=None, compare=False)

    @property
    def text(self) -> str:
        """The visible text of the turn, its ``Text`` parts joined."""
        return "".join(p.text for p in self.parts if type(p) is Text)

    @property
    def reasoning(self) -> str:
        """The reasoning of the turn, its spans joined."""
        return "".join(p.text for p in self.parts if type(p) is Reasoning)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of the turn, in order."""
        return tuple(p for p in self.parts if type(p) is ToolCall)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool the model may call.

    Attributes:
        name: what the model calls it.
        description: what it is for; None when the client gave none (never replaced by "").
        parameters: its JSON schema, keys in the client's own order; None when the client gave none.
        strict: whether arguments must match the schema; None when not said.
        deferred: shown to the model only where a ``ToolReference`` names it.
        kind: ``function`` (JSON arguments) or ``custom`` (one free-form string).
        grammar: what that string must match: (``lark`` or ``regex``, its text); None for anything.
        schema_at: where ``parameters`` stand in the request, for errors about them.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None
    deferred: bool = False
    kind: Literal["function", "custom"] = "function"
    extra: Extra | None = field(default=None, compare=False)
    grammar: tuple[str, str] | None = None
    schema_at: str = field(default="tools", compare=False)


@dataclass(frozen=True, slots=True)
class Conversation:
    """All that the model is told: the turns so far and the tools it has."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether and what the model must call. It never changes the prompt.

    ``name`` goes with ``required`` and narrows it to one tool; ``allowed`` are the names of the tools that may be
    called, None for all.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    allowed: tuple[str, ...] | None = None

    def admits(self, name: str) -> bool:
        """Whether a tool of this name may be called."""
        return self.name in (None, name) and (self.allowed is None or name in self.allowed)


@dataclass(frozen=True, slots=True)
class Thinking:
    """What the client asked about reasoning; None everywhere means that it said nothing.

    Attributes:
        enabled: reasoning on or off.
        effort: a word such as ``low``, ``medium``, ``high``.
        budget_tokens: how many tokens may go into reasoning.
        template_arguments: chat-template variables given by name (``chat_template_kwargs``).
    """

    enabled: bool | None = None
    effort: str | None = None
    budget_tokens: int | None = None
    template_arguments: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What the visible text must look like: any JSON object, or JSON of ``schema``.

    ``schema_at`` is where the schema stands in the request, for errors about it.
    """

    schema: Mapping[str, Any] | None = None
    name: str = ""
    strict: bool | None = None
    schema_at: str = field(default="response_format", compare=False)

    @property
    def at(self) -> str:
        """Where the format itself stands in the request."""
        return self.schema_at.removesuffix(".schema").removesuffix(".json_schema")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. None leaves the choice to the model's defaults.

    Attributes:
        max_tokens: most tokens to generate; clamped to what fits, never refused.
        stop: strings that end the turn; they are not part of it.
        logprobs: number of alternatives a token to report, None for none.
        prompt_logprobs: the same for the tokens of the prompt.
        logit_bias: token id -> additive bias.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class ClearThinking:
    """Leave out reasoning but that of the last ``keep_turns`` answers that have any; None keeps all of it."""

    keep_turns: int | None = None


@dataclass(frozen=True, slots=True)
class ClearToolUses:
    """Put a placeholder in place of old tool results once there are too many tokens or too many uses.

    Attributes:
        trigger_tokens: clear when the prompt is longer; None: not by tokens.
        trigger_uses: clear when there are more uses that are not cleared; None: not by uses.
        keep: so many of the last uses stay.
        at_least: clear nothing when it would free fewer tokens.
        exclude_tools: uses of these tools stay.
        inputs: whether the calls lose their arguments too; or the tools whose calls do.
    """

    trigger_tokens: int | None = None
    trigger_uses: int | None = None
    keep: int = 3
    at_least: int = 0
    exclude_tools: frozenset[str] = frozenset()
    inputs: bool | frozenset[str] = False


ContextEdit = ClearThinking | ClearToolUses


@dataclass(frozen=True, slots=True)
class AppliedEdit:
    """What an edit took out: ``count`` answers' thinking or tool uses, ``tokens`` in all."""

    kind: Literal["thinking", "tool_uses"]
    count: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Hints:
    """What a harness says of a request for whoever places and orders it. It never changes the answer.

    Attributes:
        priority: higher goes first.
        strict_priority: a tier; every request of a higher one goes before those of lower ones.
        latency_sensitivity: higher for a request that somebody waits for.
        expected_tokens: how long the answer is likely to be.
        speculative_prefill: the next turn's prompt may be read ahead when this turn is over.
    """

    priority: int = 0
    strict_priority: int = 0
    latency_sensitivity: float | None = None
    expected_tokens: int | None = None
    speculative_prefill: bool = False

    @property
    def rank(self) -> int:
        """Both priorities as engines have it: one number, of which the lower goes first."""
        return -(self.strict_priority << 32) - self.priority


@dataclass(frozen=True, slots=True)
class AgentContext:
    """Whose request it is, in a harness's own words: for traces alone. Empty is what it did not say.

    Attributes:
        session_type_id: what kind of session it is.
        trajectory_id: one run of an agent in the session.
        parent_session_id, parent_trajectory_id: where this one was begun from.
        session_final: the session's last request.
    """

    session_type_id: str = ""
    session_id: str = ""
    trajectory_id: str = ""
    parent_session_id: str = ""
    parent_trajectory_id: str = ""
    session_final: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One request for one turn, whatever protocol it came in.

    Attributes:
        model: the name the client used.
        conversation: turns and tools.
        stream: whether the answer leaves as events.
        opens_turn: whether the header of the assistant's turn stands at the end of the prompt.
        continues: whether a turn of the assistant's at the end is left open for the model to go on with.
        parallel_tool_calls: False ends the turn after its first complete call.
        max_tool_calls: the turn ends after so many complete calls; None for any number.
        truncate: a history that does not fit the window loses its oldest turns, and is not refused.
        context_edits: what may be taken out of the history before the model reads it.
        session: the client's own session key, if its body has one.
        hints: for routing and engines.
        agent: for traces.
        choices: how many answers are drawn.
        warnings: what was accepted and ignored, for the ``x-singletree-warning`` header.
        extra: what the protocol needs again to encode its answer (echoed fields).
    """

    model: str
    conversation: Conversation
    sampling: Sampling = Sampling()
    stream: bool = False
    tool_choice: ToolChoice = ToolChoice()
    opens_turn: bool = True
    continues: bool = True
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = None
    truncate: bool = False
    thinking: Thinking = Thinking()
    response_format: ResponseFormat | None = None
    context_edits: tuple[ContextEdit, ...] = ()
    session: str | None = None
    hints: Hints = Hints()
    agent: AgentContext = AgentContext()
    choices: int = 1
    warnings: Sequence[str] = ()
    extra: Extra = field(default_factory=dict)
