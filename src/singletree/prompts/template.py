"""The checkpoint's chat template: a conversation in, the prompt's text out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from sys import getsizeof
from typing import Any

import msgspec
from jinja2 import TemplateError

from singletree.conversation import Conversation, Tool, Turn
from singletree.errors import BadConfiguration, InvalidRequest
from singletree.prompts.beginnings import same_items
from singletree.prompts.layout import find_layout
from singletree.prompts.sandbox import Refusal, compile_template
from singletree.prompts.splicing import Layout
from singletree.prompts.template_loop import Printed, Run
from singletree.prompts.template_messages import Draw, Guard, MessageWriter, Seam
from singletree.prompts.template_probe import probe
from singletree.prompts.template_reads import Message, Reads
from singletree.prompts.thinking import thinking_settings
from singletree.prompts.tokenizer import Tokenizer
from singletree.prompts.tool_definition import tool_definition
from singletree.prompts.written import WrittenList, changed, printed
from singletree.recent import Recent

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What stands in for the template of a checkpoint that has none."""

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
"""Variables that no client sets by name: they are what is rendered."""

_TOOL_LIST_BYTES = 32 * 2**20
_TOOL_LIST_COST = 8
"""Bytes in memory for each byte of a tool list's JSON: as objects, and as text of its own at three depths."""

_MESSAGE_LENGTH = 300
_MARK_BYTES = 500
"""What a message and the mark before it cost, beside its text."""


def load_chat_template(tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate:
    """The template of a checkpoint, or ``source`` instead; ChatML, flagged ``is_default``, without either."""
    chosen = tokenizer.chat_template if source is None else source
    return ChatTemplate(chosen or CHATML, named_tokens=tokenizer.named_tokens, is_default=not chosen)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and what a longer one needs to go on from it: the seam and what the template printed, if anything.

    ``form`` is the number of the form in which the template took the conversation.
    """

    text: str
    turns: tuple[Turn, ...]
    seam: Seam | None = None
    printed: Printed | None = None
    form: int = 0

    @property
    def bytes(self) -> int:
        """About what it costs beside the turns."""
        if self.printed is None:
            return getsizeof(self.text)
        loops = self.printed.loops.values()
        marks = _MARK_BYTES * (sum(len(loop.marks) for loop in loops) + len(self.printed.messages))
        drawn = 0 if self.text is self.printed.text else getsizeof(self.printed.text)
        return getsizeof(self.text) + drawn + marks


class ChatTemplate:
    """One chat template, rendered byte for byte as Hugging Face renders it.

    Attributes:
        source: the Jinja text.
        reads: what the template reads and in which form, by its syntax tree and probe renders.
        is_default: whether it only stands in for a template that the checkpoint has not.
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
    ) -> None:
        """Compile and probe ``source``. Raises BadConfiguration when it is no template.

        Args:
            named_tokens: texts of the tokens that a template may call by name (``unk_token`` …).
            now: the local time, for templates that print the date.
        """
        given = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: text for name, text in given.items() if text} | dict(named_tokens or {})
        self._template, tree, self._watched = compile_template(source, now)
        self._tools: Recent[tuple[Guard, bytes], WrittenList] = Recent(_TOOL_LIST_BYTES)
        self.source = source
        self.is_default = is_default
        self.reads = probe(self._render, tree)
        if not self.reads.renders:
            raise BadConfiguration(
                "the chat template fails on a single user message, so on everything: it needs variables that "
                "no client gives; give another with --custom-jinja-template"
            )

    def render(self, conversation: Conversation, *, draw: Draw, **settings: Any) -> str:
        """The prompt, as ``render_on`` has it."""
        return self.render_on(None, conversation, draw=draw, **settings).text

    def render_on(
        self,
        before: Rendered | None,
        conversation: Conversation,
        *,
        draw: Draw,
        template_arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continues: bool = True,
        guard: Guard = str,
        vision: bool = True,
    ) -> Rendered:
        """The prompt. What ``guard`` marked in it is for ``Tokenizer.encode`` and ``strip_guards``.

        A conversation that the template refuses in its own form is tried again as plain text, in turns.

        Args:
            before: what was rendered of an earlier prompt, with the same ``draw``, ``guard`` and ``vision``: what both
                have in common is not rendered again.
            draw: draws parts of an assistant turn in the model's own format, where the template has no form
                for them.
            template_arguments: further variables for the template.
            add_generation_prompt: whether the header of the assistant's turn is opened at the end.
            continues: whether an assistant turn at the end is left open instead, for the model to go on with.
            guard: applied to every string that is the client's own: all but the assistant's text.
            vision: whether images go to the template; False where the engine cannot take them.

        Raises:
            InvalidRequest: with the template's own message, when it refuses the conversation in every form.
        """
        if not conversation.turns:
            raise InvalidRequest("there are no messages; send at least one", param="messages")
        try:
            given = changed(template_arguments or {}, guard)
            tools = self._printed_tools(conversation.tools, guard)
        except RecursionError:
            raise InvalidRequest("a tool's schema is nested too deeply; flatten it", param="tools") from None
        context = {name: value for name, value in given.items() if name not in _RESERVED}
        context["add_generation_prompt"] = add_generation_prompt
        refused: Exception | None = None
        for form, (reads, strict) in enumerate(self._forms()):
            writer = MessageWriter(reads, draw, guard, vision=vision, strict=strict)
            context["tools"] = tools if reads.tools or not strict else self._printed_tools((), guard)
            try:
                if continues and add_generation_prompt and conversation.turns[-1].role == "assistant":
                    made = self._left_open(writer, conversation.turns, context)
                else:
                    going_on = before if before is not None and before.form == form else None
                    made = self._print(writer, conversation.turns, context, going_on)
                return replace(made, form=form)
            except Exception as error:  # a template is foreign code: whatever it raises, it refuses this form
                refused = refused or error
        raise _refusal(refused)

    def layout(self, tokenizer: Tokenizer) -> Layout | None:
        """How it sets an assistant's turn; None where nothing sets turns off from each other."""
        enders = [text for text, id in tokenizer.added_tokens.items() if id in tokenizer.stop_token_ids]
        render = partial(self._render, tools=self._printed_tools((), str))
        return find_layout(render, tokenizer.added_tokens, enders, thinking_settings(self.reads))

    def _forms(self) -> list[tuple[Reads, bool]]:
        """The template's own form, and two that even a template for bare chat can take."""
        plain = replace(
            self.reads,
            reasoning=None,
            calls=False,
            results=False,
            system_runs=False,
            system_inside=False,
            consecutive_users=False,
            consecutive_assistants=False,
        )
        return [(self.reads, False), (plain, True), (replace(plain, system=False), True)]

    def _left_open(self, writer: MessageWriter, turns: tuple[Turn, ...], context: dict[str, Any]) -> Rendered:
        last = turns[-1]
        if not last.parts:
            return Rendered(writer.drawn.put_in(self._render(writer.write(turns[:-1]), **context)), turns)
        text = self._render(writer.write(turns[:-1], last), **(context | {"add_generation_prompt": False}))
        end = writer.drawn.end_of_last(text)
        if not end:
            raise Refusal("the last message is the assistant's, and the template does not print it")
        return Rendered(writer.drawn.put_in(text[:end]), turns)

    def _print(
        self, writer: MessageWriter, turns: tuple[Turn, ...], context: dict[str, Any], before: Rendered | None
    ) -> Rendered:
        """All of ``turns``, on from the last seam that they have in common with ``before``."""
        if not self._watched:
            return Rendered(writer.drawn.put_in(self._render(writer.write(turns), **context)), turns)
        seam = before.seam if before is not None else None
        if before is not None and seam is not None and same_items(before.turns, turns) < seam.turns:
            seam = None
        messages = writer.write(turns, before=seam)
        run = Run(before.printed if before is not None and seam is not None else None)
        printed = run.render(self._template, messages, self._variables(context))
        return Rendered(writer.drawn.put_in(printed.text), turns, writer.seam, printed)

    def _render(self, messages: list[Message], **context: Any) -> str:
        return self._template.render({**self._variables(context), "messages": messages})

    def _variables(self, context: Mapping[str, Any]) -> dict[str, Any]:
        standard = {"documents": None, "add_generation_prompt": True, "tools": None}
        return {**self._tokens, **standard, **context}

    def _printed_tools(self, tools: tuple[Tool, ...], guard: Guard) -> WrittenList | None:
        """The tools as the template takes them, with their JSON text. No list is serialised twice."""
        if not tools:
            return printed_list([]) if self.reads.tools_always else None
        key = (guard, msgspec.json.encode([(t.name, t.description, t.parameters, t.kind) for t in tools]))
        known = self._tools.get(key)
        if known is None:
            definitions = (tool_definition(tool, described=self.reads.needed_descriptions) for tool in tools)
            known = printed_list([changed(definition, guard) for definition in definitions])
            self._tools.put(key, known, _TOOL_LIST_COST * len(key[1]))
        return known


def printed_list(tools: list[dict[str, Any]]) -> WrittenList:
    """Tool definitions that print themselves, as a list, one by one, and their functions alone."""
    objects = [printed({**tool, "function": printed(tool["function"])}) for tool in tools]
    return WrittenList(objects, printed(tools).written, pinned=False)


def _refusal(error: Exception | None) -> InvalidRequest:
    if isinstance(error, Refusal):
        said = str(error.message)
    elif isinstance(error, TemplateError):
        said = f"it failed with {error.message}"
    else:
        said = f"it failed with {type(error).__name__}: {error}"
    return InvalidRequest(
        f"the model's chat template refuses this conversation: {said[:_MESSAGE_LENGTH]}", param="messages"
    )
