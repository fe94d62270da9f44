"""What a request asks for beside an answer: options of one API, edits of the context, a comparison with an earlier one.

Decoders set them; the server and the encoders of the same protocol read them. A field that a protocol does not have
keeps its default. Edits change the prompt of a conversation, options never do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

_NO_ECHO = b'{"metadata":{}}'


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """Options of the APIs for raw prompts: OpenAI's Completions, and vLLM's ``/inference/v1/generate``.

    Attributes:
        prompts: the prompts, each a text or its token ids.
        prompt_field: the request field that holds them, for error messages.
        echo: whether the text of the prompt comes before the generated text.
        echo_only: whether the generated text is left out (``echo`` with ``max_tokens`` of 0).
        best_of: number of answers to generate for each prompt, of which the likeliest are returned.
        skip_special_tokens: whether special tokens are left out of the text.
        prompt_logprobs: whether the log-probabilities of the prompt have their own field, beside ``logprobs``.
        request_id: the client's own id of the request; empty for none.
        return_prompt_token_ids: whether ``generate`` returns the token ids of the prompt.
        return_text: whether ``generate`` returns text beside token ids.
    """

    prompts: tuple[str | tuple[int, ...], ...] = ()
    prompt_field: str = "prompt"
    echo: bool = False
    echo_only: bool = False
    best_of: int = 1
    skip_special_tokens: bool = True
    prompt_logprobs: bool = False
    request_id: str = ""
    return_prompt_token_ids: bool = False
    return_text: bool = False


@dataclass(frozen=True, slots=True)
class StoredStateOptions:
    """The stored state that a Responses request continues, and whether its response is stored.

    Attributes:
        input_items: the items exactly as sent: a string as one message, references replaced by their items.
        unresolved: paths of the fields that need stored state, which the server has to refuse if it stores none.
        previous_response_id: the response that the request continues; None for none.
        conversation_id: the conversation that the request continues and adds to; None for none.
        store: whether the response can be retrieved later.
        background: whether the response is generated without an open connection.
    """

    input_items: Sequence[Mapping[str, Any]] = ()
    unresolved: tuple[str, ...] = ()
    previous_response_id: str | None = None
    conversation_id: str | None = None
    store: bool = False
    background: bool = False


@dataclass(frozen=True, slots=True)
class References:
    """The ids that a request refers to; all are empty for a self-contained request."""

    previous_response: str | None = None
    conversation: str | None = None
    items: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.previous_response or self.conversation or self.items)


@dataclass(frozen=True, slots=True)
class StoredItems:
    """The items that were found, as JSON: the history before the request's own items, and referenced items by id."""

    history: Sequence[bytes] = ()
    items: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of a request beside its conversation, sampling and reasoning.

    Attributes:
        include_usage: whether a stream ends with the token counts.
        continuous_usage_stats: whether each chunk of a stream has the token counts so far.
        return_token_ids: whether the token ids of prompt and answer are returned.
        return_tokens_as_token_ids: whether the texts of tokens in log-probabilities are written ``token_id:ID``.
        reasoning_fields: the message fields in which the client reads reasoning, on Chat Completions; empty to send
            none; None if the request does not show them.
        hidden_thinking: whether the text of reasoning is left out, on Messages (``thinking.display`` of ``omitted``).
        reasoning_summary: whether reasoning items have a summary, on Responses.
        include: further output that a Responses request asks for.
        reasoning_item_ids: whether reasoning comes back in items whose ids identify the turn.
        legacy_functions: whether the client sends ``functions``, and so reads ``function_call``.
        prefill_only: whether only the prompt is read, which fills the engine's prefix cache (``max_tokens`` of 0).
        reports_context_edits: whether the answer reports the applied context edits.
        compacts: whether the turn is a summary of the conversation, which the client gets encrypted.
        compared_answer: the id of an earlier answer: this one reports how its prompt differs from that one's. Empty if
            the client asks for the report and has no earlier answer yet; None if it does not ask.
        conversation_field: the field of the request that has the conversation, for error messages.
        echoed_fields: JSON object of the request's fields that the response object repeats.
        completion: for raw prompts.
        stored_state: for Responses.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    reasoning_fields: tuple[str, ...] | None = None
    hidden_thinking: bool = False
    reasoning_summary: bool = False
    include: tuple[str, ...] = ()
    reasoning_item_ids: bool = False
    legacy_functions: bool = False
    prefill_only: bool = False
    reports_context_edits: bool = False
    compacts: bool = False
    compared_answer: str | None = None
    conversation_field: str = "messages"
    echoed_fields: bytes = _NO_ECHO
    completion: CompletionOptions = CompletionOptions()
    stored_state: StoredStateOptions = StoredStateOptions()


@dataclass(frozen=True, slots=True)
class ClearThinking:
    """A context edit: keep reasoning only in the last ``keep_turns`` answers that have some; None keeps all of it."""

    keep_turns: int | None = None


@dataclass(frozen=True, slots=True)
class ClearToolUses:
    """A context edit: replace old tool results by a placeholder when there are too many tokens or too many tool uses.

    Attributes:
        trigger_tokens: clear when the prompt has more tokens than this; None for no limit.
        trigger_uses: clear when there are more uncleared tool uses than this; None for no limit.
        keep: number of the latest tool uses that are never cleared.
        at_least: clear nothing when fewer tokens than this would be freed.
        exclude_tools: tools whose results are never cleared.
        inputs: whether the arguments of the calls are cleared too; or the names of the tools where they are.
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
    """The result of a context edit: ``count`` answers' thinking or tool uses removed, ``tokens`` in total."""

    kind: Literal["thinking", "tool_uses"]
    count: int
    tokens: int


Change = Literal["model", "tools", "system", "messages", "compacted", "settings"]
"""What differs first; ``compacted``: earlier messages are gone; ``settings``: of reasoning, in the prompt."""


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """The prompt does not continue that of the earlier answer.

    Attributes:
        change: what differs first.
        missed_tokens: tokens of the earlier prompt and answer behind the difference.
        reusable_tokens: tokens before it.
        report: more facts: the cause, its reason and cure, and the index of the first message that differs.
    """

    change: Change
    missed_tokens: int
    reusable_tokens: int
    report: dict[str, Any]


CacheDiagnosis = CacheMiss | Literal["hit", "not_found", "unavailable"]
"""``hit``: the prompt contains the earlier prompt and answer. ``not_found``: no answer of that id is known.
``unavailable``: it is known, and its prompt is no longer in memory."""
