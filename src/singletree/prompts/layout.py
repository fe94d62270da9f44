"""Where an assistant's turn begins and ends in the prompts of a chat template, found by probe renders."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Any

from singletree.prompts.replay import Layout
from singletree.prompts.template_reads import Message

Render = Callable[..., str]

_SAID = "qzxw"
_RESULT = "xqwz"
_ARGUMENT = "zxqw"
_QUESTION = "wxzq"
_ASKED: Message = {"role": "user", "content": _QUESTION}
_ANSWERED: Message = {"role": "assistant", "content": _SAID}
_CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "zwqx", "arguments": {"wqzx": _ARGUMENT}},
}
_CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_TOLD: Message = {"role": "tool", "content": _RESULT, "name": "zwqx", "tool_call_id": "call00000"}
_THINKING: tuple[dict[str, Any], ...] = (
    {},
    {"enable_thinking": True, "thinking": True},
    {"enable_thinking": False, "thinking": False},
)


def find_layout(render: Render, added_tokens: Collection[str], enders: Collection[str] = ()) -> Layout | None:
    """The assistant's headers and what ends its turns; None where no added tokens set them off.

    Args:
        render: (messages, add_generation_prompt=..., **template arguments) -> text.
        enders: the added tokens at which the engine stops.
    """
    probe = _Probe(render, sorted((t for t in added_tokens if t), key=len, reverse=True), frozenset(enders))
    try:
        header, end = probe.answer()
    except Exception:  # a template is foreign code: one that refuses the probe has no layout to be found
        return None
    if not header or not end:
        return None
    try:
        after_result, after_call = probe.tool_loop(header, end)
    except Exception:  # nor does one for bare chat know tools
        return Layout((header,), (end,))
    return Layout(_distinct(header, after_result), _distinct(end, after_call))


class _Probe:
    def __init__(self, render: Render, tokens: Sequence[str], enders: frozenset[str]) -> None:
        self._render = render
        self._tokens = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        self._enders = enders

    def answer(self) -> tuple[str, str]:
        """The header and the end of a turn of words between two of the user's."""
        asked = self._text(_ASKED)
        last = self._text(_ASKED, _ANSWERED)
        earlier = self._text(_ASKED, _ANSWERED, _ASKED)
        if _SAID not in last or _SAID not in earlier:
            return "", ""
        start = len(_common([asked, last, earlier]))
        answered = [text[start : text.find(_SAID)] for text in (last, earlier)]
        # What a template opens for the last turn only (``<think>``) is no part of the header.
        header = self._header(asked[:start], _common([*self._opened(_ASKED), *answered]))
        return header, self._end(earlier.partition(_SAID)[2].partition(_QUESTION)[0])

    def tool_loop(self, header: str, end: str) -> tuple[str, str]:
        """What stands for the header behind a tool's result, and for the end behind a call, where they differ."""
        before = (_ASKED, _CALLED)
        told = self._text(*before, _TOLD)
        answered = self._text(*before, _TOLD, _ANSWERED, _ASKED)
        said, result = answered.rfind(_SAID), told.rfind(_RESULT)
        if said < 0 or result < 0:
            return "", ""
        behind = _common([self._text(*before, _TOLD, add_generation_prompt=True), answered[:said]])[result:]
        after_result = "" if header in behind else self._header(behind, "")
        between = told[told.rfind(_ARGUMENT) : result]
        if end in between:
            return after_result, ""
        ender = next((token[0] for token in self._tokens.finditer(between) if token[0] in self._enders), "")
        return after_result, ender or self._parting(self._text(*before, _ASKED), told)

    def _text(self, *messages: Message, **arguments: Any) -> str:
        return self._render(list(messages), **({"add_generation_prompt": False} | arguments))

    def _opened(self, *messages: Message) -> list[str]:
        """What asks for an answer, with thinking on and off."""
        opened = []
        for thinking in _THINKING:
            asked = self._text(*messages, **thinking)
            asking = self._text(*messages, add_generation_prompt=True, **thinking)
            opened.append(asking[len(_common([asked, asking])) :])
        return opened

    def _header(self, before: str, text: str) -> str:
        """``text`` up to the last place where no token is cut in two.

        Where a template opens nothing, the last token of what stands ``before`` (``[/INST]``) is the header.
        """
        found = list(self._tokens.finditer(text))
        if not found and not text:
            text = before
            found = list(self._tokens.finditer(before))[-1:]
            start = found[0].start() if found else 0
        else:
            start = 0
        return text[start : max(found[-1].end(), text.rfind("\n") + 1)] if found else ""

    def _end(self, text: str) -> str:
        """``text`` up to and with the token that ends a turn: one at which engines stop, else the first."""
        found = list(self._tokens.finditer(text))
        chosen = next((token for token in found if token[0] in self._enders), found[0] if found else None)
        return text[: chosen.end()] if chosen is not None else ""

    def _parting(self, one: str, other: str) -> str:
        """The first token of ``other`` that ``one`` has not."""
        same = len(_common([one, other]))
        token = next((token for token in self._tokens.finditer(other) if token.end() > same), None)
        return token[0] if token is not None else ""


def _distinct(*texts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, texts)))


def _common(texts: Sequence[str]) -> str:
    """What all ``texts`` begin with."""
    same = takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False))
    return "".join(characters[0] for characters in same)
