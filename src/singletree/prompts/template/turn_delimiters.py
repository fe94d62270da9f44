"""Find the texts between which a chat template writes an assistant's turn, by probe renders."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import Any

from singletree.prefixes import common_text_prefix
from singletree.prompts.replay.turn_places import TurnDelimiters
from singletree.prompts.template.capabilities import MessageDict, Render

_ANSWER = "qzxw"
_RESULT = "xqwz"
_ARGUMENT = "zxqw"
_QUESTION = "wxzq"
_USER: MessageDict = {"role": "user", "content": _QUESTION}
_ASSISTANT: MessageDict = {"role": "assistant", "content": _ANSWER}
_CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "zwqx", "arguments": {"wqzx": _ARGUMENT}},
}
_CALLING: MessageDict = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_TOOL_RESULT: MessageDict = {"role": "tool", "content": _RESULT, "name": "zwqx", "tool_call_id": "call00000"}


def find_turn_delimiters(
    render: Render,
    added_tokens: Collection[str],
    enders: Collection[str] = (),
    thinking: Sequence[Mapping[str, Any]] = (),
) -> TurnDelimiters | None:
    """Return the assistant's headers and the texts that end its turns; None where the template writes neither.

    ``enders`` are the added tokens at which the engine stops generating, ``thinking`` the template arguments with which
    an answer may be requested.
    """
    tokens = sorted((t for t in added_tokens if t), key=len, reverse=True)
    probe = _Probe(render, tokens, frozenset(enders), ({}, *thinking))
    try:
        header, end = probe.answer()
    except Exception:  # a template is foreign code: if it refuses the probe, its delimiters stay unknown
        return None
    if not header or not end:
        return None
    try:
        after_result, after_call = probe.tool_loop(header, end)
    except Exception:  # a template for bare chat refuses tools
        return TurnDelimiters((header,), (end,))
    return TurnDelimiters(_distinct(header, after_result), _distinct(end, after_call))


class _Probe:
    def __init__(
        self,
        render: Render,
        tokens: Sequence[str],
        enders: frozenset[str],
        thinking: Sequence[Mapping[str, Any]],
    ) -> None:
        self._render = render
        self._thinking = thinking
        self._tokens = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        self._enders = enders

    def answer(self) -> tuple[str, str]:
        """Return the header and the end of a turn of text between two of the user's turns."""
        question = self._text(_USER)
        last = self._text(_USER, _ASSISTANT)
        earlier = self._text(_USER, _ASSISTANT, _USER)
        if _ANSWER not in last or _ANSWER not in earlier:
            return "", ""
        start = len(_common_prefix([question, last, earlier]))
        with_answer = [text[start : text.find(_ANSWER)] for text in (last, earlier)]
        repeated = self._text(_USER, _ASSISTANT, _USER, _ASSISTANT, _USER)
        behind = (text.rpartition(_ANSWER)[2].partition(_QUESTION)[0] for text in (earlier, repeated))
        end = self._end([*behind])
        # Text that a template opens for the last turn only (``<think>``) is not part of the header.
        opened = self._opened(_USER)
        header = self._header(_common_prefix([*opened, *with_answer]), opened)
        if not header:  # some write other white space there while the turn is empty
            header = self._header(_common_prefix([text.lstrip() for text in (*opened, *with_answer)]), opened)
        after = question[:start].rpartition(_QUESTION)[2]
        return header or self._header(after.removeprefix(end), []) or self._last_token(after), end

    def tool_loop(self, header: str, end: str) -> tuple[str, str]:
        """Return the header after a tool's result and the end after a call; "" where they are the usual ones."""
        before = (_USER, _CALLING)
        with_result = self._text(*before, _TOOL_RESULT)
        with_answer = self._text(*before, _TOOL_RESULT, _ASSISTANT, _USER)
        answer_at, result_at = with_answer.rfind(_ANSWER), with_result.rfind(_RESULT)
        if answer_at < 0 or result_at < 0:
            return "", ""
        prompting = self._text(*before, _TOOL_RESULT, add_generation_prompt=True)
        after = _common_prefix([prompting, with_answer[:answer_at]])[result_at + len(_RESULT) :]
        after_result = "" if header in after else self._last_token(after)
        called = with_result.rfind(_ARGUMENT)
        between = with_result[called:result_at]
        if called < 0 or end in between:
            return after_result, ""
        ender = next((token[0] for token in self._tokens.finditer(between) if token[0] in self._enders), "")
        return after_result, ender or self._separator(self._text(*before, _USER), with_result, result_at)

    def _text(self, *messages: MessageDict, **arguments: Any) -> str:
        return self._render(list(messages), **({"add_generation_prompt": False} | arguments))

    def _opened(self, *messages: MessageDict) -> list[str]:
        opened = []
        for thinking in self._thinking:
            question = self._text(*messages, **thinking)
            prompting = self._text(*messages, add_generation_prompt=True, **thinking)
            opened.append(prompting[len(_common_prefix([question, prompting])) :])
        return opened

    def _header(self, text: str, opened: Collection[str]) -> str:
        """Return ``text`` up to the last place that splits no token; all of it if it is one of ``opened``."""
        found = list(self._tokens.finditer(text))
        if not found:
            return text.rstrip()  # some write a space there only before text
        if text in opened:
            return text
        return text[: max(found[-1].end(), text.rfind("\n") + 1)]

    def _last_token(self, text: str) -> str:
        """Return the last token in ``text`` and the line break after it; without tokens, the text that is complete."""
        found = list(self._tokens.finditer(text))[-1:]
        if not found:
            last_line = text[text.rfind("\n") + 1 :]
            return text.rstrip() if any(map(str.isalpha, last_line)) else text.removesuffix(last_line)
        return text[found[0].start() : max(found[0].end(), text.rfind("\n") + 1)]

    def _end(self, texts: Sequence[str]) -> str:
        """Return the text up to the token that ends a turn: one at which engines stop, else the first."""
        text = texts[0]
        found = list(self._tokens.finditer(text))
        if not found:
            return _common_prefix(texts)
        chosen = next((token for token in found if token[0] in self._enders), found[0])
        return text[: chosen.end()]

    def _separator(self, one: str, other: str, before: int) -> str:
        """Return the first token of ``other``, before the offset ``before``, at which it differs from ``one``.

        If there is none, return the last token that both have and the text from there to ``before``.
        """
        same = len(_common_prefix([one, other]))
        tokens = list(self._tokens.finditer(other, 0, before))
        parted = next((token[0] for token in tokens if token.end() > same), "")
        return parted or (other[tokens[-1].start() : before] if tokens else "")


def _distinct(*texts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, texts)))


def _common_prefix(texts: Sequence[str]) -> str:
    return reduce(lambda one, other: one[: common_text_prefix(one, other)], texts)
