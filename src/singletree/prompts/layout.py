"""Where an assistant's turn begins and ends in the prompts of a chat template, found by probe renders."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

from singletree.prompts.splicing import Layout
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


def find_layout(
    render: Render,
    added_tokens: Collection[str],
    enders: Collection[str] = (),
    thinking: Sequence[Mapping[str, Any]] = (),
) -> Layout | None:
    """The assistant's headers and what ends its turns; None where nothing sets them off.

    Args:
        render: (messages, add_generation_prompt=..., **template arguments) -> text.
        enders: the added tokens at which the engine stops.
        thinking: template arguments under which an answer may be asked for.
    """
    tokens = sorted((t for t in added_tokens if t), key=len, reverse=True)
    probe = _Probe(render, tokens, frozenset(enders), ({}, *thinking))
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
        """The header and the end of a turn of words between two of the user's."""
        asked = self._text(_ASKED)
        last = self._text(_ASKED, _ANSWERED)
        earlier = self._text(_ASKED, _ANSWERED, _ASKED)
        if _SAID not in last or _SAID not in earlier:
            return "", ""
        start = len(_common([asked, last, earlier]))
        answered = [text[start : text.find(_SAID)] for text in (last, earlier)]
        again = self._text(_ASKED, _ANSWERED, _ASKED, _ANSWERED, _ASKED)
        end = self._end([_between(text, _SAID, _QUESTION) for text in (earlier, again)])
        # What a template opens for the last turn only (``<think>``) is no part of the header.
        opened = self._opened(_ASKED)
        header = self._header(_common([*opened, *answered]), opened)
        if not header:  # some write other white space there when nothing is said yet
            header = self._header(_common([text.lstrip() for text in (*opened, *answered)]), opened)
        behind = asked[:start].rpartition(_QUESTION)[2]
        return header or self._header(behind.removeprefix(end), []) or self._last_token(behind), end

    def tool_loop(self, header: str, end: str) -> tuple[str, str]:
        """What stands for the header behind a tool's result, and for the end behind a call, where they differ."""
        before = (_ASKED, _CALLED)
        told = self._text(*before, _TOLD)
        answered = self._text(*before, _TOLD, _ANSWERED, _ASKED)
        said, result = answered.rfind(_SAID), told.rfind(_RESULT)
        if said < 0 or result < 0:
            return "", ""
        asking = self._text(*before, _TOLD, add_generation_prompt=True)
        behind = _common([asking, answered[:said]])[result + len(_RESULT) :]
        after_result = "" if header in behind else self._last_token(behind)
        called = told.rfind(_ARGUMENT)
        between = told[called:result]
        if called < 0 or end in between:
            return after_result, ""
        ender = next((token[0] for token in self._tokens.finditer(between) if token[0] in self._enders), "")
        return after_result, ender or self._parting(self._text(*before, _ASKED), told, result)

    def _text(self, *messages: Message, **arguments: Any) -> str:
        return self._render(list(messages), **({"add_generation_prompt": False} | arguments))

    def _opened(self, *messages: Message) -> list[str]:
        """What asks for an answer, with thinking on and off."""
        opened = []
        for thinking in self._thinking:
            asked = self._text(*messages, **thinking)
            asking = self._text(*messages, add_generation_prompt=True, **thinking)
            opened.append(asking[len(_common([asked, asking])) :])
        return opened

    def _header(self, text: str, opened: Collection[str]) -> str:
        """``text`` up to the last place where no token is cut in two; all of it where it is just what is opened."""
        found = list(self._tokens.finditer(text))
        if not found:
            return text.rstrip()  # some leave a space there only where words follow
        if text in opened:
            return text
        return text[: max(found[-1].end(), text.rfind("\n") + 1)]

    def _last_token(self, text: str) -> str:
        """The last token in ``text`` and the line break behind it; without tokens, all that is sure to be whole."""
        found = list(self._tokens.finditer(text))[-1:]
        if not found:
            last_line = text[text.rfind("\n") + 1 :]
            return text.rstrip() if any(map(str.isalpha, last_line)) else text.removesuffix(last_line)
        return text[found[0].start() : max(found[0].end(), text.rfind("\n") + 1)]

    def _end(self, texts: Sequence[str]) -> str:
        """What stands behind turns up to and with the token that ends them: one at which engines stop, else the first.

        Without tokens, what stands behind each of them.
        """
        text = texts[0]
        found = list(self._tokens.finditer(text))
        if not found:
            return _common(texts)
        chosen = next((token for token in found if token[0] in self._enders), found[0])
        return text[: chosen.end()]

    def _parting(self, one: str, other: str, before: int) -> str:
        """The first token of ``other`` that ``one`` has not; without such a one ``before`` there, the last that both
        have and what follows it.
        """
        same = len(_common([one, other]))
        tokens = list(self._tokens.finditer(other, 0, before))
        parted = next((token[0] for token in tokens if token.end() > same), "")
        return parted or (other[tokens[-1].start() : before] if tokens else "")


def _between(text: str, before: str, after: str) -> str:
    """What stands between the last ``before`` and the ``after`` behind it."""
    return text.rpartition(before)[2].partition(after)[0]


def _distinct(*texts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, texts)))


def _common(texts: Sequence[str]) -> str:
    """What all ``texts`` begin with."""
    same = takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False))
    return "".join(characters[0] for characters in same)
