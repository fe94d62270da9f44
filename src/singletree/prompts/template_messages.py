"""A conversation as the messages that a chat template takes, in the form that this template takes them.

Order is meaning: nothing is moved to where a template would rather have it. What a template has no form for
is written as text at its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, cast

from singletree.conversation import (
    Image,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
    Turn,
)
from singletree.prompts.added_tokens import well_formed
from singletree.prompts.call_ids import CallIds
from singletree.prompts.drawn import SENTINEL, Drawn
from singletree.prompts.part_words import parts_of, with_error, words
from singletree.prompts.template_reads import Message, Reads, put_reasoning
from singletree.prompts.written import read_object

Draw = Callable[[tuple[Part, ...]], str]
Guard = Callable[[str], str]
Content = str | list[Message]

_IMAGE_FOLLOWS = "[image: shown in the next message]"

_WORD = "0"


@dataclass(frozen=True, slots=True)
class Seam:
    """The messages of a conversation up to one of the assistant's turns, and what the writer knew there.

    Attributes:
        shown: the same messages with their content in parts, where the template takes it so.
    """

    turns: int
    messages: tuple[Message, ...]
    shown: tuple[Message, ...]
    ids: CallIds
    drawn: Drawn


@dataclass(frozen=True, slots=True)
class _Shape:
    """An assistant turn as templates see one: reasoning first, calls last, and whatever there is between."""

    reasoning: Reasoning | None
    middle: tuple[Part, ...]
    calls: tuple[ToolCall, ...]

    @property
    def said(self) -> tuple[Part, ...]:
        """All but the reasoning."""
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
    """Writes one conversation for one template.

    Args:
        reads: what the template takes.
        draw: draws parts of an assistant turn in the model's own format.
        guard: keeps special tokens out of a client's text.
        vision: whether images are to be shown at all.
        strict: for templates that still refuse: the user begins, and nobody says nothing.

    Attributes:
        seam: from where a longer conversation can go on, when this one is written.
    """

    def __init__(self, reads: Reads, draw: Draw, guard: Guard, *, vision: bool, strict: bool = False) -> None:
        self._reads = reads
        self._draw = draw
        self._guard = guard
        self._image = dict(reads.image) if vision and reads.image is not None else None
        self._strict = strict
        self._ids = CallIds(reads.call_ids)
        # In formats of channels the model writes itself what the template prints before its words.
        self._lead = draw((Text(_WORD),)).partition(_WORD)[0]
        self._messages: list[Message] = []
        self._shown: tuple[Message, ...] = ()
        self._later_images = 0
        self.drawn = Drawn()
        self.seam: Seam | None = None

    def write(
        self, turns: Sequence[Turn], prefill: Turn | None = None, before: Seam | None = None
    ) -> list[Message]:
        """The messages of ``turns``, and of ``prefill`` as the last, left open. Use a writer once.

        Args:
            before: from where to go on: the messages up to there are those of an earlier prompt with the same turns.
        """
        if before is not None:
            self._take_up(before)
        done = before.turns if before is not None else 0
        seam = _last_answer(turns)
        if seam > done:
            self._write(turns[done:seam])
            self._make_seam(seam)
            done = seam
        self._write(turns[done:])
        self._show_later_images()
        if prefill is not None:
            self._messages.append(self._prefill(prefill))
        if self._strict or (not self._reads.system_alone and self._only_system()):
            self._let_user_begin()
        if self._reads.content_parts:
            return [*self._shown, *map(_in_parts, self._messages[len(self._shown) :])]
        return self._messages

    def _take_up(self, before: Seam) -> None:
        self._messages, self._shown = [*before.messages], before.shown
        self._ids, self.drawn = before.ids.copy(), before.drawn.copy()
        self.seam = before

    def _make_seam(self, turns: int) -> None:
        self._show_later_images()
        if self._reads.content_parts and not self._strict:
            self._shown += tuple(map(_in_parts, self._messages[len(self._shown) :]))
        messages = tuple(self._messages)
        self.seam = Seam(turns, messages, self._shown, self._ids.copy(), self.drawn.copy())

    def _write(self, turns: Sequence[Turn]) -> None:
        for turn in turns if self._reads.consecutive_assistants else _joined_assistants(turns):
            if turn.role != "tool":
                self._show_later_images()
            if turn.role == "assistant":
                if not self._strict or turn.parts:
                    self._messages += self._assistant(turn)
            elif turn.role == "tool":
                self._results(turn.parts)
            elif turn.role == "user":
                self._user(self._content(turn.parts))
            else:
                self._system(self._text(turn.parts))

    def _only_system(self) -> bool:
        return all(message["role"] == "system" for message in self._messages)

    def _let_user_begin(self) -> None:
        begin = next((i for i, m in enumerate(self._messages) if m["role"] != "system"), len(self._messages))
        if begin == len(self._messages) or self._messages[begin]["role"] != "user":
            self._messages.insert(begin, {"role": "user", "content": ""})

    def _system(self, text: str) -> None:
        """As system where the template takes one here, else as user text in its place.

        Behind a tool result it ends that one where a user message would cost the loop its reasoning (Claude Code's
        reminders, which it tells the model to expect in results).
        """
        at_head = self._only_system()
        if self._reads.system and at_head and self._messages and not self._reads.system_runs:
            self._append(text)
        elif self._reads.system if at_head else self._reads.system_inside:
            self._messages.append({"role": "system", "content": text})
        elif self._reads.user_ends_loop and self._messages and self._messages[-1]["role"] == "tool":
            self._append(text)
        else:
            self._user(text)

    def _user(self, content: Content) -> None:
        """Joined with the message before it where the template insists on turns taken in turn."""
        last = self._messages[-1]["role"] if self._messages else ""
        if (last == "user" and not self._reads.consecutive_users) or (
            last == "tool" and not self._reads.user_after_result
        ):
            self._append(content)
        else:
            self._messages.append({"role": "user", "content": content})

    def _append(self, content: Content) -> None:
        before = self._messages[-1]["content"]
        joined: Content
        if isinstance(before, str) and isinstance(content, str):
            joined = f"{before}\n\n{content}" if before and content else before + content
        else:
            joined = [*parts_of(before), *parts_of("\n\n"), *parts_of(content)]
        # Another message: this one may stand in what an earlier prompt is kept by.
        self._messages[-1] = self._messages[-1] | {"content": joined}

    def _results(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if not isinstance(part, ToolResult):
                self._user(self._content((part,)))
                continue
            call_id, name = self._ids.result(part.call_id)
            said = with_error(part)
            if not self._takes_result():
                self._user(f"<tool_result>\n{self._text(said)}\n</tool_result>")
            else:
                self._messages.append(
                    {
                        "role": "tool",
                        "name": self._guard(name),
                        "tool_call_id": self._guard(call_id),
                        "content": self._result_content(said),
                    }
                )

    def _takes_result(self) -> bool:
        """Whether a result can be printed now: some templates look for them only after calls of their own."""
        if not self._reads.results_need_calls:
            return self._reads.results
        before = next((m for m in reversed(self._messages) if m["role"] != "tool"), {})
        return "tool_calls" in before

    def _result_content(self, parts: Sequence[Part]) -> Content:
        """With its images where the template takes them here; else a user message after it shows them."""
        if self._image is None or self._reads.result_images:
            return self._content(parts)
        self._later_images += sum(isinstance(part, Image) for part in parts)
        return self._text(Text(_IMAGE_FOLLOWS) if isinstance(part, Image) else part for part in parts)

    def _show_later_images(self) -> None:
        if self._image is not None and self._later_images:
            self._user([dict(self._image) for _ in range(self._later_images)])
        self._later_images = 0

    def _content(self, parts: Sequence[Part]) -> Content:
        """Text, or a list of text and images where there is an image that the template takes."""
        if self._image is None or not any(isinstance(part, Image) for part in parts):
            return self._text(parts)
        content: list[Message] = []
        run: list[Part] = []
        for part in parts:
            if isinstance(part, Image):
                content += [*parts_of(self._text(run)), dict(self._image)]
                run = []
            else:
                run.append(part)
        return [*content, *parts_of(self._text(run))]

    def _text(self, parts: Iterable[Part]) -> str:
        """What ``parts`` say in words. Guarded as a whole: two blocks could hold half a token each."""
        return self._guard("".join(words(part) for part in parts))

    def _assistant(self, turn: Turn) -> list[Message]:
        """One message, or two where the template prints what was said after the calls that follow it."""
        reads, shape = self._reads, self._shape(turn)
        calls = self._native_calls(shape)
        if calls and self._speaks(shape) and not reads.text_with_calls:
            return [self._message(shape.reasoning, shape.middle, []), self._message(None, (), calls)]
        return [self._message(shape.reasoning, shape.middle if calls else shape.said, calls)]

    def _message(self, reasoning: Reasoning | None, said: tuple[Part, ...], calls: list[Message]) -> Message:
        place = self._reads.reasoning
        if reasoning is None:
            return self._spoken(self._assistant_content(said), calls)
        if place is None:
            return self._spoken(self._assistant_content((reasoning, *said)), calls)
        if calls and said and not self._reads.text_beside_reasoning:
            # Harmony's template takes text or reasoning before a call, not both; nothing said is to be lost.
            both = f"{reasoning.text}\n\n{self._plain_text(said)}"
            return put_reasoning(self._spoken("", calls), place, both)
        return put_reasoning(self._spoken(self._assistant_content(said), calls), place, reasoning.text)

    def _shape(self, turn: Turn) -> _Shape:
        """The shape of ``turn``, its calls under the ids that the model knows, which may be counted.

        Its text is as the model wrote it, but for what could be taken for a sentinel.
        """
        parts: list[Part] = []
        for part in turn.parts:
            if isinstance(part, ToolCall):
                parts.append(replace(part, id=self._ids.call(part)))
            elif isinstance(part, Text | Reasoning) and SENTINEL in part.text:
                parts.append(replace(part, text=well_formed(part.text)))
            else:
                parts.append(part)
        return _Shape.of(tuple(parts))

    def _speaks(self, shape: _Shape) -> bool:
        """Whether something has to be in the content beside the calls."""
        return bool(shape.middle) or (shape.reasoning is not None and self._reads.reasoning is None)

    def _spoken(self, content: str, calls: list[Message]) -> Message:
        if not calls:
            return {"role": "assistant", "content": content}
        return {"role": "assistant", "content": content or self._reads.empty_content, "tool_calls": calls}

    def _prefill(self, turn: Turn) -> Message:
        """The turn that the model is to go on with: all of it but its reasoning is put in after rendering."""
        shape, place = self._shape(turn), self._reads.reasoning
        if shape.reasoning is None or place is None:
            said = shape.said if shape.reasoning is None else (shape.reasoning, *shape.said)
            return self._spoken(self.drawn.sentinel(self._plain_text(said)), [])
        message = self._spoken(self.drawn.sentinel(self._plain_text(shape.said)), [])
        return put_reasoning(message, place, shape.reasoning.text)

    def _assistant_content(self, said: tuple[Part, ...]) -> str:
        """Plain text goes to the template as it is; so does reasoning before it, which many split off.

        Everything else is drawn in the model's own format and put in after rendering.
        """
        text = self._plain_text(said)
        native = all(isinstance(part, Text) for part in said[1:]) and not isinstance(
            said[0] if said else None, ToolCall
        )
        return text if native else self.drawn.sentinel(text, self._lead)

    def _plain_text(self, said: tuple[Part, ...]) -> str:
        if all(isinstance(part, Text) for part in said):
            return "".join(words(part) for part in said)
        return self._draw(tuple(self._guarded(part) for part in said))

    def _guarded(self, part: Part) -> Part:
        if not isinstance(part, ToolCall):
            return part
        return replace(part, name=self._guard(part.name), arguments=self._guard(part.arguments))

    def _native_calls(self, shape: _Shape) -> list[Message]:
        """The closing run of calls as the template takes them; empty when it has to be drawn."""
        reads, calls = self._reads, shape.calls
        if (
            not reads.calls
            or (len(calls) > 1 and not reads.parallel_calls)
            or (self._speaks(shape) and not reads.text_with_calls and not self._splits())
            or not all(call.complete for call in calls)
        ):
            return []
        try:
            arguments = [self._arguments(call.arguments or "{}") for call in calls]
        except ValueError:
            return []
        return [
            {
                "id": self._guard(call.id),
                "type": "function",
                "function": {"name": self._guard(call.name), "arguments": value},
            }
            for call, value in zip(calls, arguments, strict=True)
        ]

    def _splits(self) -> bool:
        """Whether text and calls of one turn may be two messages: else some templates lose the results."""
        return self._reads.results_need_calls and self._reads.consecutive_assistants

    def _arguments(self, text: str) -> Any:
        return self._guard(text) if self._reads.arguments == "text" else read_object(text, self._guard)


def _joined_assistants(turns: Sequence[Turn]) -> list[Turn]:
    """``turns`` with neighbouring assistant turns as one."""
    joined: list[Turn] = []
    for turn in turns:
        if joined and turn.role == joined[-1].role == "assistant":
            joined[-1] = Turn("assistant", joined[-1].parts + turn.parts)
        else:
            joined.append(turn)
    return joined


def _last_answer(turns: Sequence[Turn]) -> int:
    """Where the assistant begins to speak for the last time; 0 where it does not."""
    roles = [turn.role for turn in turns]
    starts = (i for i in range(len(roles) - 1, 0, -1) if roles[i - 1] != "assistant" == roles[i])
    return next(starts, 0)


def _in_parts(message: Message) -> Message:
    return message | {"content": parts_of(message["content"]) or [{"type": "text", "text": ""}]}
