"""Convert a conversation to the messages of a chat template, in the form that this template accepts.

Order has meaning: nothing is moved to a place where a template would accept it. A part for which a template has no
form is written as text in its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, cast

from singletree.conversation import Part, Reasoning, Text, ToolCall, ToolResult, Turn
from singletree.prompts.replay.turn_comparison import without_reasoning
from singletree.prompts.template.capabilities import (
    MessageDict,
    TemplateCapabilities,
    placeholder_arguments,
    put_reasoning,
)
from singletree.prompts.template.content import (
    DELIMITER,
    GuardedTexts,
    MessageContent,
    PictureWriter,
    Placeholders,
    TemplateCallIds,
    by_calls,
    joined_assistants,
    last_answer,
    part_text,
    parts_of,
    placeholder_of,
    with_error,
    with_marker,
)
from singletree.prompts.template.source_json import guard_json, read_object
from singletree.prompts.tokenizer.added_tokens import replace_surrogates

RenderParts = Callable[[tuple[Part, ...]], str]
TextGuard = Callable[[str], str]

_WORD = "0"


@dataclass(frozen=True, slots=True)
class MessageCheckpoint:
    """The messages of the first ``turns`` turns, up to one of the assistant's, and the writer's state at that point.

    ``as_parts`` are the same messages with their content in parts, where the template accepts no other form.
    ``guarded`` has the texts after that point, which are written again in the next prompt.
    """

    turns: int
    messages: tuple[MessageDict, ...]
    as_parts: tuple[MessageDict, ...]
    ids: TemplateCallIds
    placeholders: Placeholders
    guarded: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Shape:
    """An assistant turn in the order that templates know: reasoning, other parts, calls."""

    reasoning: Reasoning | None
    middle: tuple[Part, ...]
    calls: tuple[ToolCall, ...]

    @property
    def content(self) -> tuple[Part, ...]:
        return (*self.middle, *self.calls)

    @classmethod
    def of(cls, turn_parts: tuple[Part, ...]) -> _Shape:
        parts = [part for part in turn_parts if not isinstance(part, Text | Reasoning) or part.text]
        calls = list(takewhile(lambda part: isinstance(part, ToolCall), reversed(parts)))
        middle = parts[: len(parts) - len(calls)]
        reasoning = middle[0] if middle and isinstance(middle[0], Reasoning) else None
        return cls(
            reasoning, tuple(middle[reasoning is not None :]), tuple(reversed(cast(list[ToolCall], calls)))
        )


class MessageWriter:
    """Converts one conversation for one template.

    Args:
        render_parts: writes parts of an assistant turn in the model's own format.
        guard: keeps special tokens out of a client's text.
        own_guard: does the same for the assistant's text, but allows the markers of the model's own format.
        vision: whether images are passed to the template.
        picture_mark: the text that stands for an image in a message, where the engine puts the image there itself;
            empty for the template's own form.
        strict: for templates that refuse the usual form: the first message is the user's, and empty turns are left out.
    """

    def __init__(
        self,
        capabilities: TemplateCapabilities,
        render_parts: RenderParts,
        guard: TextGuard,
        own_guard: TextGuard,
        *,
        vision: bool,
        picture_mark: str = "",
        strict: bool = False,
    ) -> None:
        self._capabilities = capabilities
        self._one_call_each = capabilities.results_need_calls and not capabilities.parallel_calls
        self._render_parts = render_parts
        self._guarded_texts = GuardedTexts(guard)
        self._guard = self._guarded_texts.__getitem__
        self._own_guard = own_guard
        self._pictures = PictureWriter(
            picture_mark or capabilities.image if vision else None,
            self._guard,
            in_results=capabilities.result_images,
        )
        self._strict = strict
        self._ids = TemplateCallIds(capabilities)
        self._messages: list[MessageDict] = []
        self._as_parts: tuple[MessageDict, ...] = ()
        self.placeholders = Placeholders()

    @cached_property
    def _lead(self) -> str:
        """What the template prints before a text. In channel formats the model itself writes it."""
        return self._render_parts((Text(_WORD),)).partition(_WORD)[0]

    @cached_property
    def _call_lead(self) -> str:
        """What the template prints before a call's name, if it has no place there for text; else empty."""
        words, call = self._capabilities.call_header
        return self._lead.removesuffix(words) + call if call and self._lead.endswith(words) else ""

    def _before_call(self, parts: tuple[Part, ...]) -> str:
        """Return ``parts`` as the model writes them before a call, where the template has no place for them."""
        call = ToolCall(_WORD, "{}", _WORD)
        return self._plain_text((*parts, call)).removesuffix(self._plain_text((call,)))

    @cached_property
    def _writes_reasoning(self) -> bool:
        """Return whether the model has a form for reasoning. Another model may have begun the conversation."""
        return self._capabilities.reasoning is not None or bool(self._render_parts((Reasoning(_WORD),)))

    @cached_property
    def _writes_calls(self) -> bool:
        return self._capabilities.calls or bool(self._render_parts((ToolCall(_WORD, "{}", _WORD),)))

    def write(
        self,
        turns: Sequence[Turn],
        checkpoint: MessageCheckpoint | None = None,
        *,
        prefill: Turn | None = None,
    ) -> tuple[list[MessageDict], MessageCheckpoint]:
        """Return the messages of ``turns``, and where a longer conversation can go on. Call it once on a writer.

        The checkpoint is that of an earlier prompt with the same turns. ``prefill`` is an assistant turn that becomes
        the last message and is left open.
        """
        done = 0 if checkpoint is None else self._restore(checkpoint)
        answer = last_answer(turns)
        if answer > done or checkpoint is None:
            self._write(turns[done:answer])
            checkpoint = self._make_checkpoint(answer)
            done = answer
        self._write(turns[done:])
        self._show_later_images()
        if prefill is not None:
            self._messages.append(self._prefill(prefill))
        if self._strict or self._needs_user():
            self._let_user_begin()
        if self._capabilities.content_parts:
            return [*self._as_parts, *map(_in_parts, self._messages[len(self._as_parts) :])], checkpoint
        return self._messages, checkpoint

    def _restore(self, checkpoint: MessageCheckpoint) -> int:
        self._messages, self._as_parts = [*checkpoint.messages], checkpoint.as_parts
        self._ids, self.placeholders = checkpoint.ids.copy(), checkpoint.placeholders.copy()
        self._guarded_texts.update(checkpoint.guarded)
        return checkpoint.turns

    def _make_checkpoint(self, turns: int) -> MessageCheckpoint:
        self._show_later_images()
        if self._capabilities.content_parts and not self._strict:
            self._as_parts += tuple(map(_in_parts, self._messages[len(self._as_parts) :]))
        self._guarded_texts.clear()
        state = self._ids.copy(), self.placeholders.copy(), self._guarded_texts
        return MessageCheckpoint(turns, tuple(self._messages), self._as_parts, *state)

    def _write(self, turns: Sequence[Turn]) -> None:
        for turn in turns if self._capabilities.consecutive_assistants else joined_assistants(turns):
            if turn.role != "tool":
                self._show_later_images()
            if turn.role == "assistant":
                if not self._strict or turn.parts:
                    self._messages += self._assistant(turn)
            elif turn.role == "tool":
                self._results(turn.parts)
            elif turn.role == "user":
                self._user(self._pictures.content(turn.parts))
            else:
                self._system(self._pictures.text(turn.parts))

    def _only_system(self) -> bool:
        return all(message["role"] == "system" for message in self._messages)

    def _needs_user(self) -> bool:
        """Return whether an empty user message has to be added: the template does not print the others without one."""
        return self._only_system() and not (self._messages and self._capabilities.system_alone)

    def _let_user_begin(self) -> None:
        begin = next((i for i, m in enumerate(self._messages) if m["role"] != "system"), len(self._messages))
        if begin == len(self._messages) or self._messages[begin]["role"] != "user":
            self._messages.insert(begin, {"role": "user", "content": ""})

    def _system(self, text: str) -> None:
        """Add ``text`` as a system message where the template accepts one here, else as user text in its place.

        After a tool result it is appended to that result if a user message would remove the reasoning of the loop from
        the prompt (Claude Code's reminders, which its system prompt tells the model to expect in results).
        """
        at_head, accepted = self._only_system(), self._capabilities
        if accepted.system and at_head and self._messages and not accepted.consecutive_systems:
            self._append(text)
        elif accepted.system if at_head else accepted.system_inside:
            self._messages.append({"role": "system", "content": text})
        elif accepted.user_ends_loop and self._messages and self._messages[-1]["role"] == "tool":
            self._append(text)
        else:
            self._user(text)

    def _user(self, content: MessageContent) -> None:
        """Add a user message, or append to the one before where the template insists on alternating roles."""
        last = self._messages[-1]["role"] if self._messages else ""
        if (last == "user" and not self._capabilities.consecutive_users) or (
            last == "tool" and not self._capabilities.user_after_result
        ):
            self._append(content)
        else:
            self._messages.append({"role": "user", "content": content})

    def _append(self, content: MessageContent) -> None:
        before = self._messages[-1]["content"]
        joined: MessageContent
        if isinstance(before, str) and isinstance(content, str):
            joined = f"{before}\n\n{content}" if before and content else before + content
        else:
            joined = [*parts_of(before), *parts_of("\n\n"), *parts_of(content)]
        # A new message, not a change of this one: the checkpoint of an earlier prompt may hold it.
        self._messages[-1] = self._messages[-1] | {"content": joined}

    def _results(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if not isinstance(part, ToolResult):
                self._show_later_images()
                self._user(self._pictures.content((part,)))
                continue
            call_id, name = self._ids.result(part.call_id)
            answer = with_error(part)
            if self._takes_result():
                for call in self._before_results().get("tool_calls", ()) if self._one_call_each else ():
                    self.placeholders.name_result(call["function"]["name"], self._guard(name))
                of = {"name": self._guard(name), "tool_call_id": self._guard(call_id)}
                self._messages += [{"role": "tool", **of, "content": self._pictures.result_content(answer)}]
            elif isinstance(content := self._pictures.content(answer), str):
                self._user(f"<tool_result>\n{content}\n</tool_result>")
            else:
                self._user([*parts_of("<tool_result>\n"), *content, *parts_of("\n</tool_result>")])

    def _takes_result(self) -> bool:
        """Return whether a result can be printed now: some templates print results only after their own calls."""
        if not self._capabilities.results_need_calls:
            return self._capabilities.results
        return "tool_calls" in self._before_results()

    def _before_results(self) -> MessageDict:
        return next((m for m in reversed(self._messages) if m["role"] != "tool"), {})

    def _show_later_images(self) -> None:
        if content := self._pictures.take_later():
            self._user(content)

    def _assistant(self, turn: Turn) -> list[MessageDict]:
        """Return one message, or two where the template prints a turn's text after its calls."""
        capabilities = self._capabilities
        # As text, two calls would lose their results, and their turn its reasoning, with which text would be lost here.
        if self._one_call_each and len(turn.tool_calls) > 1 and (self._call_lead or not turn.text):
            return [message for each in by_calls(turn) for message in self._assistant(each)]
        shape = self._shape(turn)
        calls = self._native_calls(shape)
        if capabilities.call_closers is not None and any(
            isinstance(p, ToolCall) for p in shape.content[: -len(calls) or None]
        ):
            return [self._with_all_calls(shape, capabilities.call_closers)]
        if calls and self._has_content(shape) and not (capabilities.text_with_calls or self._call_lead):
            return [self._message(shape.reasoning, shape.middle, []), self._message(None, (), calls)]
        return [self._message(shape.reasoning, shape.middle if calls else shape.content, calls)]

    def _with_all_calls(self, shape: _Shape, closers: str) -> MessageDict:
        """Return a turn with its calls as text, and in the template's form too, which it has to see and is cut out."""
        message = self._message(shape.reasoning, shape.content, [])
        calls = [part for part in shape.content if isinstance(part, ToolCall) and part.complete]
        if not calls:
            return message
        values = [""] * (len(calls) - 1) + [self.placeholders.cut_after_last(closers)]
        arguments = (placeholder_arguments(self._capabilities.arguments, value) for value in values)
        return message | {
            "tool_calls": [self._native_call(*each) for each in zip(calls, arguments, strict=True)]
        }

    def _message(
        self, reasoning: Reasoning | None, parts: tuple[Part, ...], calls: list[MessageDict]
    ) -> MessageDict:
        place = self._capabilities.reasoning
        if reasoning is not None and place is None:
            parts, reasoning = (reasoning, *parts), None
        for call in calls if self._one_call_each else calls[: bool(parts and self._call_lead)]:
            text = self._before_call(parts) if self._call_lead else ""
            name = self.placeholders.add_name(call["function"]["name"], text, self._call_lead)
            call["function"]["name"], parts = name, () if text else parts
        if reasoning is None or place is None:
            return self._assistant_message(self._assistant_content(parts), calls)
        reasoning_text, marker = self._own_guard(reasoning.text), None
        if reasoning_text.strip() and any(isinstance(part, Reasoning) for part in parts):
            marker = self.placeholders.add_marker()
            reasoning_text = with_marker(reasoning_text, marker)
        if calls and parts and not self._capabilities.text_beside_reasoning:
            # Harmony's template takes text or reasoning before a call, not both; no text may be lost.
            both = f"{reasoning_text}\n\n{self._plain_text(parts)}"
            return put_reasoning(self._assistant_message("", calls), place, both)
        content = self._assistant_content(parts, marker, in_field=True)
        return put_reasoning(self._assistant_message(content, calls), place, reasoning_text)

    def _shape(self, turn: Turn) -> _Shape:
        """Return ``turn`` with the ids that the model knows, and without characters that could be a placeholder's."""
        parts: list[Part] = []
        for part in turn.parts:
            if isinstance(part, ToolCall):
                if (known := self._ids.call(part)) != part.id:
                    part = replace(part, id=known)
                if not self._writes_calls:
                    part = Text("\n" * bool(parts) + _call_text(part))
            if isinstance(part, Reasoning) and not self._writes_reasoning:
                continue
            if isinstance(part, Text | Reasoning) and DELIMITER in part.text:
                parts.append(replace(part, text=replace_surrogates(part.text)))
            else:
                parts.append(part)
        return _Shape.of(tuple(parts))

    def _has_content(self, shape: _Shape) -> bool:
        return bool(shape.middle) or (shape.reasoning is not None and self._capabilities.reasoning is None)

    def _assistant_message(self, content: str, calls: list[MessageDict]) -> MessageDict:
        if not calls:
            return {"role": "assistant", "content": content}
        return {
            "role": "assistant",
            "content": content or self._capabilities.empty_content,
            "tool_calls": calls,
        }

    def _prefill(self, turn: Turn) -> MessageDict:
        """Return the turn that the model is to continue: everything but its reasoning is filled in after rendering."""
        shape, place = self._shape(turn), self._capabilities.reasoning
        # The prompt ends before these calls. With them, the template does not take the turn for the final answer.
        arguments = placeholder_arguments(self._capabilities.arguments, "")
        calls = (
            []
            if self._capabilities.call_closers is None
            else [self._native_call(ToolCall("f", ""), arguments)]
        )
        if shape.reasoning is None or place is None:
            parts = shape.content if shape.reasoning is None else (shape.reasoning, *shape.content)
            return self._assistant_message(self.placeholders.add_text(self._plain_text(parts)), calls)
        message = self._assistant_message(self.placeholders.add_text(self._plain_text(shape.content)), calls)
        return put_reasoning(message, place, self._own_guard(shape.reasoning.text))

    def _assistant_content(
        self, parts: tuple[Part, ...], marker: int | None = None, *, in_field: bool = False
    ) -> str:
        """Return the content. Plain text is passed as it is, and so is reasoning before it, which many split off.

        Everything else is written in the model's own format and filled in after rendering. Reasoning in it is left out
        where the template leaves out the turn's first reasoning. ``marker`` is the number of the marker in that first
        reasoning, which has a field of its own where ``in_field`` is set.
        """
        text = self._plain_text(parts)
        starts_with_reasoning = not in_field and isinstance(next(iter(parts), None), Reasoning)
        rest = parts[1:] if starts_with_reasoning else parts
        if all(isinstance(part, Text) for part in rest):
            return text
        if not any(isinstance(part, Reasoning) for part in rest):
            return self.placeholders.add_text(text, self._lead)
        if starts_with_reasoning and part_text(parts[0]).strip():
            return self._after_reasoning(parts, text)
        short = self._plain_text(without_reasoning(parts))
        return self.placeholders.add_alternatives(text, short, marker, self._lead)

    def _after_reasoning(self, parts: tuple[Part, ...], text: str) -> str:
        reasoning, head = self._guarded(parts[0]), self._plain_text(parts[:1])
        short = self._plain_text((parts[0], *without_reasoning(parts[1:])))
        assert isinstance(reasoning, Reasoning)
        if self._lead or not text.startswith(head) or not short.startswith(head):
            return self.placeholders.add_text(text, self._lead)
        marker = self.placeholders.add_marker()
        shown = self._render_parts((replace(reasoning, text=with_marker(reasoning.text, marker)),))
        return shown + self.placeholders.add_alternatives(text[len(head) :], short[len(head) :], marker)

    def probe_messages(self, messages: Sequence[MessageDict]) -> list[MessageDict] | None:
        """Return ``messages`` with marked reasoning where it is not known whether the template keeps that of a turn."""
        markers = [(placeholder_of(n), placeholder_of(m)) for n, m in self.placeholders.unprobed.items()]
        return [self._with_marked_reasoning(message, markers) for message in messages] if markers else None

    def _with_marked_reasoning(self, message: MessageDict, markers: Sequence[tuple[str, str]]) -> MessageDict:
        if message["role"] != "assistant":
            return message
        content, place = message["content"], self._capabilities.reasoning
        text = content if isinstance(content, str) else "".join(p.get("text", "") for p in content or ())
        marker = next((marker for placeholder, marker in markers if placeholder in text), None)
        if marker is None:
            return message
        if place is not None:
            return put_reasoning(message | {"content": text}, place, marker)
        return message | {"content": self._render_parts((Reasoning(marker),)) + text}

    def _plain_text(self, parts: tuple[Part, ...]) -> str:
        if all(isinstance(part, Text) for part in parts):
            return self._own_guard("".join(part_text(part) for part in parts))
        return self._render_parts(tuple(self._guarded(part) for part in parts))

    def _guarded(self, part: Part) -> Part:
        """Return ``part``, guarded: in the model's format it holds no special token except the format's own."""
        if isinstance(part, Text | Reasoning):
            return replace(part, text=self._own_guard(part.text))
        if not isinstance(part, ToolCall):
            return part
        return replace(
            part,
            id=self._guard(part.id),
            name=self._guard(part.name),
            arguments=guard_json(part.arguments, self._guard),
        )

    def _native_calls(self, shape: _Shape) -> list[MessageDict]:
        capabilities, calls = self._capabilities, shape.calls
        # Text and calls of one turn become two messages where a template would lose the results otherwise.
        splits = self._call_lead or (capabilities.results_need_calls and capabilities.consecutive_assistants)
        if (
            not capabilities.calls
            or (len(calls) > 1 and not capabilities.parallel_calls)
            or (self._has_content(shape) and not capabilities.text_with_calls and not splits)
            or (
                capabilities.reasoning is not None
                and not capabilities.text_beside_reasoning
                and not all(isinstance(part, Text) for part in shape.middle)
            )
            or not all(call.complete for call in calls)
        ):
            return []
        try:
            arguments = [self._arguments(call) for call in calls]
        except ValueError:
            return []
        return [self._native_call(*each) for each in zip(calls, arguments, strict=True)]

    def _native_call(self, call: ToolCall, arguments: Any) -> MessageDict:
        function = {"name": self._guard(call.name), "arguments": arguments}
        return {"id": self._guard(call.id), "type": "function", "function": function}

    def _arguments(self, call: ToolCall) -> Any:
        """Return the arguments in the template's form. It prints them itself where the model's text is lost."""
        text = call.arguments or "{}"
        if call.verbatim:
            return (
                self._guard(text)
                if self._capabilities.arguments == "text"
                else read_object(text, self._guard)
            )
        as_text = self._capabilities.arguments == "text" and not self._capabilities.parsed_arguments
        return self._guard(text) if as_text else read_object(text, self._guard, pinned=False)


def _call_text(call: ToolCall) -> str:
    """Return a call as text, in the manner of a result for which a template has no form (``_results``)."""
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'


def _in_parts(message: MessageDict) -> MessageDict:
    return message | {"content": parts_of(message["content"]) or [{"type": "text", "text": ""}]}
