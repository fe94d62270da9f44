"""Write the pictures of a conversation into messages, in the form that a template or an engine accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from singletree.conversation import Image, Part, Text
from singletree.prompts.template.capabilities import MessageDict
from singletree.prompts.template.plain_text import part_text, parts_of

MessageContent = str | list[MessageDict]
PictureForm = Mapping[str, Any] | str | None
"""What stands for a picture in a message: a content part of the template, a mark in the text, or, for None, a note."""

_FOLLOWS = "[image: shown in the next message]"


class PictureWriter:
    """Converts the content of messages. Pictures keep their order.

    Args:
        form: what stands for a picture.
        guard: keeps special tokens out of a client's text.
        in_results: whether the template accepts a picture in a tool result; otherwise a later user message shows it.
    """

    def __init__(self, form: PictureForm, guard: Callable[[str], str], *, in_results: bool) -> None:
        self._form = form
        self._guard = guard
        self._in_results = in_results or not isinstance(form, Mapping)
        self._later: list[Image] = []

    def text(self, parts: Iterable[Part]) -> str:
        """Return ``parts`` as text, guarded as a whole: two blocks could hold half a token each."""
        if not isinstance(self._form, str):
            return self._guard("".join(part_text(part) for part in parts))
        pieces: list[str] = []
        run: list[str] = []
        for part in parts:
            if isinstance(part, Image):
                pieces += [self._guard("".join(run)), self._form]
                run = []
            else:
                run.append(part_text(part))
        return "".join([*pieces, self._guard("".join(run))])

    def content(self, parts: Sequence[Part]) -> MessageContent:
        """Return text, or a list of text and pictures if there is a picture that the template accepts as a part."""
        if not isinstance(self._form, Mapping) or not any(isinstance(part, Image) for part in parts):
            return self.text(parts)
        content: list[MessageDict] = []
        run: list[Part] = []
        for part in parts:
            if isinstance(part, Image):
                content += [*parts_of(self.text(run)), dict(self._form)]
                run = []
            else:
                run.append(part)
        return [*content, *parts_of(self.text(run))]

    def result_content(self, parts: Sequence[Part]) -> MessageContent:
        """Return the content of a tool result; pictures that it cannot hold wait for ``take_later``."""
        if self._in_results:
            return self.content(parts)
        self._later += [part for part in parts if isinstance(part, Image)]
        return self.text(Text(_FOLLOWS) if isinstance(part, Image) else part for part in parts)

    def take_later(self) -> MessageContent:
        """Return the pictures that wait for a user message; empty if there are none."""
        later, self._later = self._later, []
        return self.content(later) if later else ""
