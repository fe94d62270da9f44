"""Conversations: turns and their parts, as frozen values.

Every wire protocol decodes into these values and every prompt is rendered from them, so no protocol
is ever converted into another. Standard library only; nothing here has an identity, a clock or I/O.

``extra`` of a part or turn holds fields of one protocol that have no place in these values (signatures, encrypted
reasoning, item ids, cache marks). The encoder of the same protocol returns them verbatim. Equality ignores them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from singletree.pictures import Picture
from singletree.request_options import AppliedEdit, CacheDiagnosis, ContextEdit, RequestOptions

__all__ = [
    "Conversation",
    "Document",
    "Image",
    "Part",
    "Reasoning",
    "Request",
    "ResponseFormat",
    "Role",
    "Sampling",
    "Text",
    "Thinking",
    "ThinkingVariables",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolReference",
    "ToolResult",
    "Turn",
]

Extra = Mapping[str, Any]
Role = Literal["system", "developer", "user", "assistant", "tool"]


CAPSULE_PREFIX = "singletree1."
"""First characters of a capsule: the encrypted record of a turn that a client carries for the server
(server/capsules.py)."""


@dataclass(frozen=True, slots=True)
class Text:
    """Visible text."""

    text: str
    extra: Extra | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class CarriedCapsule:
    """A capsule that came back in a request, or another server's value in its place.

    Attributes:
        field: the field of the protocol that carried it, for error messages.
        value: its text.
    """

    field: str
    value: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """One span of the model's reasoning, without its markers.

    Attributes:
        id: the id of its item, in protocols where reasoning has one; else empty.
        capsules: the capsules that came with it, in order.
    """

    text: str
    extra: Extra | None = field(default=None, compare=False)
    id: str = field(default="", compare=False, kw_only=True)
    capsules: tuple[CarriedCapsule, ...] = field(default=(), compare=False, kw_only=True)


def carried_capsules(field: str, *values: object) -> tuple[CarriedCapsule, ...]:
    """Return the capsules among ``values``, as a client sent them in ``field``: the texts that are not empty."""
    return tuple(CarriedCapsule(field, value) for value in values if value and isinstance(value, str))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model made.

    Attributes:
        name: the tool's name, as the model wrote it.
        arguments: JSON text. For families that write JSON, the model's own bytes; they are never serialised again.
        id: the call's id; empty when neither the protocol nor the model's format has one.
        complete: False when generation was cut inside the arguments. Such a call is never dispatched.
        verbatim: False when a client parsed the arguments and serialised them again: white space and escapes are not
            the model's then, so the prompt writes its own. The order of keys and the digits of numbers may be.
        written_id: the id in the text that the model wrote; empty where its format has none, or the text is not known.
    """

    name: str
    arguments: str
    id: str = ""
    complete: bool = True
    verbatim: bool = field(default=True, compare=False, kw_only=True)
    written_id: str = field(default="", compare=False, kw_only=True)
    extra: Extra | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Image:
    """An image: base64 ``data`` of ``media_type``, or a ``url``; once checked, the ``key`` of a ``Picture`` alone."""

    media_type: str = ""
    data: str = ""
    url: str = ""
    extra: Extra | None = field(default=None, compare=False)
    key: str = field(default="", kw_only=True)


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
    """The place in the conversation where a deferred tool becomes visible to the model."""

    name: str
    extra: Extra | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The harness's result for the call ``call_id``."""

    call_id: str
    parts: tuple[Text | Image | Document | ToolReference, ...] = ()
    is_error: bool = False
    extra: Extra | None = field(default=None, compare=False)


Part = Text | Reasoning | ToolCall | ToolResult | Image | Document | ToolReference


@dataclass(frozen=True, slots=True)
class Turn:
    """One role's contribution: its parts, in order.

    ``ToolResult`` occurs only in turns of role ``tool``; ``Reasoning`` and ``ToolCall`` only in turns of role
    ``assistant``.
    """

    role: Role
    parts: tuple[Part, ...] = ()
    extra: Extra | None = field(default=None, compare=False)

    @property
    def text(self) -> str:
        """Return the visible text of the turn: its ``Text`` parts joined."""
        return "".join(p.text for p in self.parts if type(p) is Text)

    @property
    def reasoning(self) -> str:
        """Return the reasoning of the turn: its spans joined."""
        return "".join(p.text for p in self.parts if type(p) is Reasoning)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Return the calls of the turn, in order."""
        return tuple(p for p in self.parts if type(p) is ToolCall)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call.

    Attributes:
        name: the name by which the model calls it.
        description: its purpose, for the model; None when the client sent none (never replaced by "").
        parameters: JSON schema of the arguments, keys in the client's order; None when the client sent none.
        strict: whether arguments must match the schema; None when the client did not send the field.
        deferred: whether the model sees the tool only where a ``ToolReference`` names it.
        kind: ``function`` (JSON arguments) or ``custom`` (one free-form string).
        grammar: the grammar of that string: (``lark`` or ``regex``, its text); None for any string.
        schema_at: path of ``parameters`` in the request, for error messages.
        client_name: the client's own name for the tool, where its names are not unique; else empty.
        namespace: the namespace in which that name is unique; empty for none.
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
    client_name: str = field(default="", compare=False)
    namespace: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns so far and the tools that the model may call."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model must call a tool, and which. It never changes the prompt.

    Attributes:
        name: with mode ``required``, the one tool that must be called; None for any.
        allowed: names of the tools that may be called; None for all.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    allowed: tuple[str, ...] | None = None

    def admits(self, name: str) -> bool:
        """Return whether the tool ``name`` may be called."""
        return self.name in (None, name) and (self.allowed is None or name in self.allowed)


@dataclass(frozen=True, slots=True)
class Thinking:
    """The client's settings for reasoning; a field is None when the client did not set it.

    Attributes:
        effort: a level such as ``low``, ``medium``, ``high``.
        budget_tokens: maximum number of reasoning tokens.
        template_arguments: variables for the chat template, by name (``chat_template_kwargs``).
    """

    enabled: bool | None = None
    effort: str | None = None
    budget_tokens: int | None = None
    template_arguments: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ThinkingVariables:
    """The names of variables with which chat templates control reasoning.

    Attributes:
        switches: (variable, value for on, value for off).
        history: (variable, value that keeps the reasoning of earlier turns in the prompt).
        efforts: variables that take a word for the effort of reasoning.
        effort_flags: (effort, variable that is true for it), for templates with a flag in place of a word.
    """

    switches: tuple[tuple[str, Any, Any], ...] = ()
    history: tuple[tuple[str, Any], ...] = ()
    efforts: tuple[str, ...] = ()
    effort_flags: tuple[tuple[str, str], ...] = ()

    def joined(self, other: ThinkingVariables) -> ThinkingVariables:
        """Return the variables of both."""
        return ThinkingVariables(
            self.switches + other.switches,
            self.history + other.history,
            self.efforts + other.efforts,
            self.effort_flags + other.effort_flags,
        )


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The format of the visible text: ``choices``, ``pattern``, ``grammar`` or ``schema``; else any JSON object.

    Attributes:
        schema: JSON schema of the text.
        name: name of the schema, as the client sent it.
        strict: whether the schema must be enforced in full; None when the client did not send the field.
        schema_at: path of the schema in the request, for error messages.
        pattern: regular expression that matches the whole text.
        choices: the texts that are allowed.
        grammar: in Lark (from ``start`` on), or in the EBNF of llama.cpp (GBNF) and XGrammar (from ``root`` on).
    """

    schema: Mapping[str, Any] | None = None
    name: str = ""
    strict: bool | None = None
    schema_at: str = field(default="response_format", compare=False)
    pattern: str = ""
    choices: tuple[str, ...] = ()
    grammar: str = ""

    @property
    def at(self) -> str:
        """Return the path of the format itself in the request."""
        return self.schema_at.removesuffix(".schema").removesuffix(".json_schema")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. A field that is None takes the model's default.

    Attributes:
        max_tokens: maximum number of tokens to generate; clamped to the rest of the window, never refused.
        stop: strings that end the turn; they are not part of it.
        logprobs: number of alternatives to report for each token; None to report no log-probabilities.
        prompt_logprobs: the same for the tokens of the prompt.
        logit_bias: token id -> additive bias.
        min_tokens: minimum number of tokens before the turn may end.
        stop_token_ids: tokens that end the turn in addition to the model's own; they are not part of it.
        includes_stop: whether the stop string or token stays in the turn.
        bad_words: texts that must not be generated.
        allowed_token_ids: the only tokens that may be generated; empty for all.
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
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    includes_stop: bool = False
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptReport:
    """The facts of the written prompt that an answer reports. The server sets them when it has written the prompt.

    Attributes:
        token_ids: the tokens; None if the request does not ask for them.
        text: the text that comes before the generated text (``echo`` of Completions).
        applied_edits: the context edits that changed the conversation.
        cache_diagnosis: how the prompt compares with that of ``RequestOptions.compared_answer``; None if there is none.
    """

    token_ids: Sequence[int] | None = None
    text: str = ""
    applied_edits: tuple[AppliedEdit, ...] = ()
    cache_diagnosis: CacheDiagnosis | None = None


@dataclass(frozen=True, slots=True)
class Hints:
    """A harness's scheduling hints for routers and engines. They never change the answer.

    Attributes:
        priority: higher goes first.
        strict_priority: a tier; every request of a higher tier goes before those of lower tiers.
        latency_sensitivity: higher for a request that somebody waits for.
        expected_tokens: expected length of the answer.
        speculative_prefill: whether the engine may read the next turn's prompt ahead when this turn is over.
        keep: whether the engine should give up the states of other conversations before this one's.
    """

    priority: int = 0
    strict_priority: int = 0
    latency_sensitivity: float | None = None
    expected_tokens: int | None = None
    speculative_prefill: bool = False
    keep: bool = False

    @property
    def rank(self) -> int:
        """Return both priorities as the one number that engines take; lower goes first."""
        return -(self.strict_priority << 32) - self.priority


@dataclass(frozen=True, slots=True)
class AgentContext:
    """The agent that sent a request, by a harness's own ids; used for traces. Fields not sent are empty.

    Attributes:
        session_type_id: kind of session.
        trajectory_id: one run of an agent in the session.
        parent_session_id, parent_trajectory_id: the session and run that started this one.
        session_final: whether this is the session's last request.
        is_subagent: whether another agent started this one; full engines serve main agents first.
    """

    session_type_id: str = ""
    session_id: str = ""
    trajectory_id: str = ""
    parent_session_id: str = ""
    parent_trajectory_id: str = ""
    session_final: bool = False
    is_subagent: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one turn, in whatever protocol it came.

    Attributes:
        model: the model name that the client sent; empty where it sent none.
        stream: whether the answer is sent as events.
        opens_turn: whether the prompt ends with the header of an assistant turn (the generation prompt).
        continues: whether a trailing assistant turn is left open, so that the model continues it.
        parallel_tool_calls: False ends the turn after its first complete call.
        max_tool_calls: maximum number of complete calls, after which the turn ends; None for any number.
        live_arguments: whether the arguments of a call are sent while they are generated, so that the client also
            sees calls that never become complete.
        truncate: whether a history that does not fit the window loses its oldest turns instead of being refused.
        context_edits: edits of the history, applied before the model reads it.
        session: the client's own session key, if the body has one.
        cache_salt: keeps tenants apart: the prompt shares the engine's prefix cache only with prompts of the same salt.
        choices: number of answers to generate.
        pictures: the checked pictures of the conversation, by ``Image.key``.
        warnings: fields that were accepted and ignored, for the ``x-singletree-warning`` header.
        options: what the answer contains, and the options of a single API.
        prompt_report: what the answer reports of the prompt.
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
    live_arguments: bool = False
    truncate: bool = False
    thinking: Thinking = Thinking()
    response_format: ResponseFormat | None = None
    context_edits: tuple[ContextEdit, ...] = ()
    session: str | None = None
    hints: Hints = Hints()
    cache_salt: str = ""
    agent: AgentContext = AgentContext()
    choices: int = 1
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    options: RequestOptions = RequestOptions()  # noqa: RUF009 (frozen)
    prompt_report: PromptReport = PromptReport()
