"""Render a conversation to the prompt's text with the checkpoint's chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, partial
from sys import getsizeof
from typing import Any, NamedTuple

import msgspec
from jinja2 import TemplateError, nodes

from singletree.conversation import Conversation, ThinkingVariables, Tool, Turn
from singletree.errors import BadConfiguration, InvalidRequest
from singletree.lru import LruCache
from singletree.prefixes import common_prefix
from singletree.prompts.prompt_cache import is_same_turn
from singletree.prompts.replay.turn_places import TurnDelimiters
from singletree.prompts.template.capabilities import MessageDict, TemplateCapabilities, thinking_settings
from singletree.prompts.template.content import placeholder_numbers, tool_definition
from singletree.prompts.template.incremental_render import Rendering, RenderRecord, is_same_value
from singletree.prompts.template.jinja_environment import Refusal, compile_template
from singletree.prompts.template.messages import MessageCheckpoint, MessageWriter, RenderParts, TextGuard
from singletree.prompts.template.probe import NO_VARIABLES, probe
from singletree.prompts.template.source_json import SourceList, SourceObject, map_strings
from singletree.prompts.template.template_loops import is_pure, method_calls, nodes_below
from singletree.prompts.template.turn_delimiters import find_turn_delimiters
from singletree.prompts.tokenizer.added_tokens import GUARD
from singletree.prompts.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "load_chat_template"]

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of checkpoints that have none."""

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
"""Variables that no client may set by name: they hold the conversation."""

_TOOL_LIST_BYTES = 32 * 2**20
_TOOL_LIST_COST = 8
"""Bytes in memory for each byte of a tool list's JSON: it is kept as objects, and as text at three depths."""

_MESSAGE_LENGTH = 300
_CHECKPOINT_BYTES = 500
"""The memory, in bytes, of a message and the checkpoint before it, without the text."""


def load_chat_template(
    tokenizer: Tokenizer,
    source: str | None = None,
    *,
    variables: ThinkingVariables = NO_VARIABLES,
    call_id_format: str = "",
) -> ChatTemplate:
    """Load the template of a checkpoint, or ``source`` instead of it; without either ChatML, which is the default.

    Raises BadConfiguration for a broken template. The other arguments are those of ``ChatTemplate``.
    """
    chosen = tokenizer.chat_template if source is None else source
    return ChatTemplate(
        chosen or CHATML,
        named_tokens=tokenizer.named_tokens,
        is_default=not chosen,
        variables=variables,
        call_id_format=call_id_format,
    )


class RenderedMessages(NamedTuple):
    """The text of a prompt, and the checkpoints of its messages and loops; None if it was rendered in full."""

    text: str
    messages: MessageCheckpoint | None = None
    record: RenderRecord | None = None


@dataclass(frozen=True, slots=True)
class RenderCheckpoint:
    """A rendered prompt, with the variables of the template without the messages.

    ``options`` tell whether an assistant turn at the end was left open, and whether images were passed to the template;
    ``form`` is the index of the form that the template accepted.
    """

    given: Conversation
    variables: Mapping[str, Any]
    options: tuple[bool, bool]
    rendered: RenderedMessages
    form: int

    @property
    def bytes(self) -> int:
        text, _, record = self.rendered
        if record is None:
            return getsizeof(text)
        checkpoints = sum(len(loop.checkpoints) for loop in record.loops.values()) + len(record.messages)
        rendered = 0 if text is record.text else getsizeof(record.text)
        return getsizeof(text) + rendered + _CHECKPOINT_BYTES * checkpoints


class ChatTemplate:
    """One chat template, rendered byte for byte as Hugging Face renders it.

    Attributes:
        source: the Jinja text.
        capabilities: what the template accepts and in which form, found by its syntax tree and probe renders.
        is_default: whether it is ChatML, because the checkpoint has no template.
        is_tracked: whether its loops can be entered in the middle (``incremental_render``).
        is_pure: whether it prints the same for the same conversation at any time.
        forms: the template's own form, and two that even a template for bare chat accepts; each with whether it is
            strict (``MessageWriter``).
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        named_tokens: Mapping[str, str] | None = None,
        is_default: bool = False,
        now: Callable[[], datetime] = datetime.now,
        variables: ThinkingVariables = NO_VARIABLES,
        call_id_format: str = "",
    ) -> None:
        """Compile and probe ``source``. Raises BadConfiguration when it is not a template that renders a message.

        ``named_tokens`` are texts that a template may use by name (``unk_token`` …), ``variables`` control reasoning in
        this format alone, and ``call_id_format`` is the form of the ids by which the model knows its calls, if any.
        """
        own_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: text for name, text in own_tokens.items() if text} | dict(named_tokens or {})
        self._template, tree, self.is_tracked, names = compile_template(source, now)
        self._tools: LruCache[tuple[TextGuard, bytes], SourceList] = LruCache(_TOOL_LIST_BYTES)
        self._removed_texts = _removed_texts(tree)
        self._guards: LruCache[TextGuard, TextGuard] = LruCache(entries=64)
        self.is_pure = is_pure(tree)
        self.source = source
        self.is_default = is_default
        self.capabilities = replace(
            probe(self.render_messages, tree, names, variables), call_id_format=call_id_format
        )
        if not self.capabilities.renders:
            raise BadConfiguration(
                "the chat template cannot render a single user message; it probably needs variables that "
                "no client sends; give another template with --chat-template"
            )
        self.forms = _forms(self.capabilities)

    def render(self, conversation: Conversation, *, render_parts: RenderParts, **settings: Any) -> str:
        """Return the text of the prompt. ``settings`` are fields of ``RenderPrompt``; raises what it raises."""
        return RenderPrompt(self, render_parts, **settings).run(conversation, None)[0]

    def layout(self, tokenizer: Tokenizer) -> TurnDelimiters | None:
        """Return what the template writes around an assistant's turn; None where nothing separates turns."""
        enders = [text for text, id in tokenizer.added_tokens.items() if id in tokenizer.stop_token_ids]
        render = partial(self.render_messages, tools=self.tool_list((), str))
        return find_turn_delimiters(
            render, tokenizer.added_tokens, enders, thinking_settings(self.capabilities)
        )

    def separating_guard(self, guard: TextGuard) -> TextGuard:
        """Return ``guard``, with a mark wherever the template may remove text and so join the text around it."""
        if not self._removed_texts or guard is str:
            return guard
        known = self._guards.peek(guard)
        if known is None:
            # No guarded text holds what the guard breaks itself, such as tokens for reasoning.
            left = tuple(text for text in self._removed_texts if text in guard(f"x{text}x"))
            known = _separating(guard, left) if left else guard
            self._guards.put(guard, known)
        return known

    def render_messages(self, messages: list[MessageDict], **context: Any) -> str:
        """Render messages in the template's own form. Raises what the template raises."""
        return self._template.render({**self._variables(context), "messages": messages})

    def render_loops(
        self, messages: list[MessageDict], context: Mapping[str, Any], record: RenderRecord | None
    ) -> RenderRecord:
        """Render as ``render_messages`` does, but enter the loops of ``record`` in the middle (``is_tracked``)."""
        return Rendering(record).render(self._template, messages, self._variables(context))

    def _variables(self, context: Mapping[str, Any]) -> dict[str, Any]:
        standard = {"documents": None, "add_generation_prompt": True, "tools": None}
        return {**self._tokens, **standard, **context}

    def tool_list(self, tools: tuple[Tool, ...], guard: TextGuard) -> SourceList | None:
        """Return the tools in the template's form, with their JSON text. No list is serialised twice."""
        if not tools:
            return printed_list([]) if self.capabilities.tools_always else None
        key = (guard, msgspec.json.encode([(t.name, t.description, t.parameters, t.kind) for t in tools]))
        known = self._tools.get(key)
        if known is None:
            definitions = (
                tool_definition(tool, described=self.capabilities.needed_descriptions) for tool in tools
            )
            guard_once = cache(guard)  # schemas repeat their words
            known = printed_list([map_strings(definition, guard_once) for definition in definitions])
            self._tools.put(key, known, _TOOL_LIST_COST * len(key[1]))
        return known


@dataclass(frozen=True, slots=True)
class RenderPrompt:
    """The stage that renders a conversation to the text of its prompt.

    If the template refuses the conversation in its own form, it is rendered as plain text with alternating roles. The
    checkpoint must come from a stage with the same template, ``render_parts``, guards and ``picture_mark``.

    Attributes:
        render_parts: writes parts of an assistant turn in the model's own format, where the template has no form for
            them.
        template_arguments: further variables for the template.
        add_generation_prompt: whether the header of the assistant's turn is printed at the end.
        continues: whether an assistant turn at the end is left open instead, for the model to continue.
        guard: applied to every string that a client wrote. ``Tokenizer.encode`` and ``strip_guards`` understand its
            marks.
        own_guard: applied to the assistant's text and reasoning instead, which a client may have written too; None for
            ``guard``.
        vision: whether images are passed to the template; False where the engine does not accept them.
        picture_mark: as for ``MessageWriter``.
    """

    template: ChatTemplate
    render_parts: RenderParts
    template_arguments: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continues: bool = True
    guard: TextGuard = str
    own_guard: TextGuard | None = None
    vision: bool = True
    picture_mark: str = ""

    def run(
        self, conversation: Conversation, checkpoint: RenderCheckpoint | None
    ) -> tuple[str, RenderCheckpoint]:
        """Begin at the last message in common with ``checkpoint``. Raises InvalidRequest with the template's words."""
        template, turns = self.template, conversation.turns
        own_guard = template.separating_guard(self.own_guard or self.guard)
        guard = template.separating_guard(self.guard)
        if not turns:
            raise InvalidRequest("there are no messages; send at least one", param="messages")
        variables = self._variables(conversation, guard, checkpoint)
        is_open = self.continues and self.add_generation_prompt and turns[-1].role == "assistant"
        options = is_open, self.vision
        same = 0
        if checkpoint is not None and checkpoint.options == options:
            same = common_prefix(checkpoint.given.turns, turns, is_same_turn)
            is_repeated = same == len(turns) == len(checkpoint.given.turns)
            if is_repeated and template.is_pure and is_same_value(checkpoint.variables, variables):
                return checkpoint.rendered.text, checkpoint
        refused: Exception | None = None
        for form, (capabilities, strict) in enumerate(template.forms):
            writer = MessageWriter(
                capabilities,
                self.render_parts,
                guard,
                own_guard,
                vision=self.vision,
                picture_mark=self.picture_mark,
                strict=strict,
            )
            context = variables
            if strict and not capabilities.tools:
                context = {**variables, "tools": template.tool_list((), guard)}
            try:
                if is_open:
                    rendered = self._render_open(writer, turns, context)
                else:
                    earlier = checkpoint if same and checkpoint and checkpoint.form == form else None
                    rendered = self._render_turns(writer, turns, context, earlier, same)
            except Exception as error:  # a template is foreign code: with any error it refuses this form
                refused = refused or error
                continue
            return rendered.text, RenderCheckpoint(conversation, variables, options, rendered, form)
        raise _refusal(refused)

    def _variables(
        self, conversation: Conversation, guard: TextGuard, checkpoint: RenderCheckpoint | None
    ) -> dict[str, Any]:
        try:
            arguments = map_strings(self.template_arguments or {}, guard)
            if checkpoint is not None and checkpoint.given.tools is conversation.tools:
                tools = checkpoint.variables["tools"]
            else:
                tools = self.template.tool_list(conversation.tools, guard)
        except RecursionError:
            raise InvalidRequest("a tool's schema is nested too deeply; flatten it", param="tools") from None
        context = {name: value for name, value in arguments.items() if name not in _RESERVED}
        return {**context, "add_generation_prompt": self.add_generation_prompt, "tools": tools}

    def _render_open(
        self, writer: MessageWriter, turns: tuple[Turn, ...], context: dict[str, Any]
    ) -> RenderedMessages:
        last = turns[-1]
        if not last.parts:
            return self._render_all(writer, turns[:-1], context)
        context = context | {"add_generation_prompt": False}
        messages, _ = writer.write(turns[:-1], prefill=last)
        self._probe_reasoning(writer, messages, context)
        text = self.template.render_messages(messages, **context)
        end = writer.placeholders.end_of_last(text)
        if not end:
            raise Refusal("the last message is from the assistant, and the template does not print it")
        return RenderedMessages(writer.placeholders.fill(text[:end]))

    def _render_turns(
        self,
        writer: MessageWriter,
        turns: tuple[Turn, ...],
        context: dict[str, Any],
        before: RenderCheckpoint | None,
        same: int,
    ) -> RenderedMessages:
        """Render ``turns``, of which ``before`` has the first ``same``, beginning at its last checkpoint in them."""
        if not self.template.is_tracked:
            return self._render_all(writer, turns, context)
        _, known, record = before.rendered if before is not None else RenderedMessages("")
        if known is None or same < known.turns:
            known = record = None
        messages, made = writer.write(turns, known)
        self._probe_reasoning(writer, messages, context)
        record = self.template.render_loops(messages, context, record)
        return RenderedMessages(writer.placeholders.fill(record.text), made, record)

    def _render_all(
        self, writer: MessageWriter, turns: tuple[Turn, ...], context: Mapping[str, Any]
    ) -> RenderedMessages:
        messages, _ = writer.write(turns)
        self._probe_reasoning(writer, messages, context)
        text = self.template.render_messages(messages, **context)
        return RenderedMessages(writer.placeholders.fill(text))

    def _probe_reasoning(
        self, writer: MessageWriter, messages: list[MessageDict], context: Mapping[str, Any]
    ) -> None:
        """Find out which turns keep their later reasoning, where the template gets no reasoning of those turns."""
        probed = writer.probe_messages(messages)
        if probed is None:
            return
        try:
            writer.placeholders.kept = placeholder_numbers(self.template.render_messages(probed, **context))
        except Exception:  # a template is foreign code: one that refuses reasoning there drops none either
            writer.placeholders.kept = frozenset(writer.placeholders.unprobed.values())


def _forms(capabilities: TemplateCapabilities) -> tuple[tuple[TemplateCapabilities, bool], ...]:
    plain = replace(
        capabilities,
        reasoning=None,
        calls=False,
        results=False,
        consecutive_systems=False,
        system_inside=False,
        consecutive_users=False,
        consecutive_assistants=False,
    )
    return (capabilities, False), (plain, True), (replace(plain, system=False), True)


def _separating(guard: TextGuard, removed_texts: Sequence[str]) -> TextGuard:
    # A mark is put before a removed text inside a word: white space separates already, and some templates trim it.
    separators = [(text, re.compile(rf"(?<=\S)(?={re.escape(text)}\S)")) for text in removed_texts]

    def guard_and_separate(text: str) -> str:
        guarded = guard(text)
        for removed, separator in separators:
            if removed in guarded:
                guarded = separator.sub(GUARD, guarded)
        return guarded

    return guard_and_separate


_SHORTEST_REMOVED = {"replace": 0, "split": 3, "rsplit": 3, "partition": 3, "rpartition": 3}
"""Filters and methods that remove text, and the least length of that text: shorter ones split lines and paths."""


def _removed_texts(tree: nodes.Template) -> tuple[str, ...]:
    below = nodes_below(tree)
    calls = [(each.name, each.args) for each in below if isinstance(each, nodes.Filter)]
    calls += [(method, call.args) for method, call in method_calls(below)]
    found = set()
    for name, arguments in calls:
        text = arguments[0].value if arguments and isinstance(arguments[0], nodes.Const) else None
        shortest = _SHORTEST_REMOVED.get(name)
        if isinstance(text, str) and shortest is not None and len(text.strip()) >= shortest and text:
            found.add(text)
    return tuple(sorted(found))


def printed_list(tools: list[dict[str, Any]]) -> SourceList:
    """Return tool definitions with their JSON text: of the list, of each definition and of each function."""
    return SourceList.printed(
        [SourceObject.printed({**tool, "function": SourceObject.printed(tool["function"])}) for tool in tools]
    )


def _refusal(error: Exception | None) -> InvalidRequest:
    if isinstance(error, Refusal):
        reason = str(error.message)
    elif isinstance(error, TemplateError):
        reason = f"it failed with {error.message}"
    else:
        reason = f"it failed with {type(error).__name__}: {error}"
    return InvalidRequest(
        f"the model's chat template refuses this conversation: {reason[:_MESSAGE_LENGTH]}", param="messages"
    )
