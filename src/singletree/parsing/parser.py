"""Parses the text of a turn into events.

Rules of the parser:

1. A whole text is parsed by one feed and a close; there is no other entry point.
2. No text of a model raises an error. What fits no rule is text; what is cut off is closed as incomplete.
3. Text is held back only while it is a proper prefix of something that could end the region.
4. A marker that is a special token in this vocabulary matches only that token; any other marker matches by text.
   A quoted marker counts as text, because no markup follows it. Without a vocabulary, every marker matches by text.
5. No family is named here.
6. The events' raw spans, concatenated, are the input, byte for byte.
7. Time is linear in the length, and memory is bounded by the text that is held back.
8. The tail of the prompt is an input, never a guess: a template may already have opened the reasoning.
9. One pass reads reasoning and tool calls together; no text is parsed twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from singletree.conversation import Tool, Turn
from singletree.events import ArgumentsDelta, Event, ReasoningDelta, TextDelta, fold
from singletree.parsing.arguments import ArgumentReader, Sink
from singletree.parsing.arguments.json_arguments import JsonCall, string_of
from singletree.parsing.compiled import Action, CallPatterns, Entries, Marker, Region, compile_family
from singletree.parsing.emitter import (
    CLOSING_MARKS,
    EventEmitter,
    Quoting,
    continues_message,
    numbered_id,
    opens_in_reasoning,
)
from singletree.parsing.family import Family
from singletree.parsing.patterns import Match, Matching, Pattern

_LONGEST_BLANK = 4096
"""White space beside a marker belongs to the format up to this many characters; a longer run is text."""
_LONGEST_PIECE = 4096
"""A longer text is read in pieces of this length, in characters: no step looks at more, wherever it looks ahead."""

_RECENT = 16
"""Number of characters of the latest output that are kept, to decide whether an unmarked call may begin."""

_BLANK = re.compile(r"\s*")
_LABEL = re.compile(r"\w{0,32}")


class Parser:
    """Parses one assistant turn. Use one parser for each generation; it is not safe to share between threads.

    Args:
        tools: the tools of the request; their schemas give the types of tag parameters.
        prompt_tail: the end of the rendered prompt, from the last turn boundary on; empty when not known.
        special_tokens: texts of the vocabulary's special tokens; empty when not known.
        mint_id: (index, name) -> id, for calls whose format has no id.

    Attributes:
        in_reasoning: whether the text fed so far ends inside reasoning.

    Example:
        >>> from singletree import Parser, families
        >>> parser = Parser(families.get("qwen3"))
        >>> parser.feed("<think>Hm.</th") + parser.feed("ink>Yes")
        [ReasoningDelta(text='Hm.', raw='<think>Hm.'), Markup(raw='</think>'), TextDelta(text='Yes', raw='Yes')]
        >>> parser.close()
        []
    """

    def __init__(
        self,
        family: Family,
        tools: Sequence[Tool] = (),
        prompt_tail: str = "",
        *,
        special_tokens: Collection[str] = (),
        mint_id: Callable[[int, str], str] = numbered_id,
    ) -> None:
        self._compiled = compile_family(family, special_tokens)
        self._tools = tools
        self._held = self._compiled.message_header if continues_message(family, prompt_tail) else ""
        self._emitter = EventEmitter(self._compiled, mint_id, len(family.message_header) if self._held else 0)
        if family.no_tools:
            self._emitter.hidden_names = frozenset(family.no_tools) - self._schemas.keys()
        self._emitter.coded = bool(self._held and self._compiled.codes)
        # It refers to the parser, so it is made for a call and dropped at the end.
        self._sink: Sink | None = None
        self._matching = Matching()
        self._match = self._matching.match
        self._reader: ArgumentReader | None = None
        self._form: CallPatterns | None = None
        self._outer_close = self._refused = False
        self._quoting = Quoting()
        self._recent = ""  # the latest output
        # The kind of the span that is open, and what finds text that may do more than continue it; None if any may.
        self._open: type[TextDelta] | type[ReasoningDelta] | type[ArgumentsDelta] = TextDelta
        self._find_break: Callable[[str], object] | None = None
        self.in_reasoning = opens_in_reasoning(family, prompt_tail, special_tokens)
        self._step: Callable[[Parser, str, int], int] = Parser._prose
        self._enter(self.in_reasoning, breaks=1 if self.in_reasoning else 0)

    @cached_property
    def _schemas(self) -> dict[str, Mapping[str, Any] | None]:
        """The schemas of the tools by name: there may be hundreds, and most turns ask for none."""
        return {tool.name: tool.parameters for tool in self._tools}

    def feed(self, text: str, special: bool = False) -> list[Event]:
        """Parse more text, and return the events that are certain now.

        ``special``: whether ``text`` is exactly one special token of the vocabulary.
        """
        # The next piece of the open span comes first and in full, because it is most of the tokens.
        find_break, kind = self._find_break, self._open
        if find_break is not None and text and not special and find_break(text) is None:
            if kind is ArgumentsDelta:
                return [ArgumentsDelta(self._emitter.index, text, text)]
            self._quoting.last = text[-1]
            if self._region.has_unmarked:
                self._recent = (self._recent + text)[-_RECENT:]
            return [TextDelta(text, text) if kind is TextDelta else ReasoningDelta(text, text)]
        if special and text in self._compiled.codes:
            text, self._emitter.coded = self._compiled.codes[text], True
        for at in range(0, len(text), _LONGEST_PIECE):
            self._read(text[at : at + _LONGEST_PIECE] if len(text) > _LONGEST_PIECE else text)
        self._find_open_span()
        return self._emitter.take()

    def _read(self, text: str) -> None:
        if self._held:
            text, self._held = self._held + text, ""
        else:
            self._matching.forget()
        position, length = 0, len(text)
        while position < length:
            position = self._step(self, text, position)
        self._matching.offset += length - len(self._held)

    def continues(self, text: str) -> bool:
        """Return whether ``text``, without special tokens, would do nothing but continue the open span."""
        return self._find_break is not None and self._find_break(text) is None

    def close(self) -> list[Event]:
        """Return the last events: the text ended, for whatever reason. An incomplete call stays incomplete."""
        held, self._held = self._held, ""
        if self._reader is not None:
            held = self._reader.close() + held
            if isinstance(self._reader, JsonCall):
                self._emit_prose(held)
            elif held:
                self._emitter.delta("", held)
        elif self._step is Parser._prose:
            self._close_prose(held)
        elif held and held.strip() and not (self._form and self._form.may_close(held)):
            self._emit_prose(held)
        else:
            self._emitter.markup(held)
        self._emitter.flush()
        self._sink = None
        return self._emitter.take()

    # Functions of the sink, called by the argument readers

    def _start_call(self, name: str, wire_id: str, raw: str) -> None:
        self._refused = False
        self._emitter.start(name, wire_id, raw)

    def _end_call(self) -> None:
        self._emitter.end()
        self._reader = None
        self.in_reasoning = False
        self._outer_close = True
        self._step = Parser._after_call

    def _break_call(self, raw: str) -> None:
        reader, self._reader = self._reader, None
        self._refused = True
        if isinstance(reader, JsonCall):
            self._emit_prose(raw)
        else:
            self._emitter.broken(raw)
            self.in_reasoning = False
        self._enter(self.in_reasoning, blank=False)

    def _hold(self, text: str, position: int) -> int:
        self._held = text[position:]
        return len(text)

    # Prose: visible text and reasoning

    def _enter(self, reasoning: bool, *, breaks: int = 0, blank: bool = True) -> None:
        self.in_reasoning = reasoning
        self._region: Region = self._compiled.reasoning if reasoning else self._compiled.text
        self._blank = blank
        self._blanks = ""
        self._breaks = breaks
        self._step = Parser._prose
        self._quoting.run = 0

    def _prose(self, text: str, position: int) -> int:
        if self._blank:
            position = self._skip_blank(text, position)
            if position == len(text):
                return position
        region = self._region
        trigger = region.trigger.search(text, position)
        if trigger is None:
            self._add_prose(text[position:] if position else text)
            return len(text)
        found = region.pattern.search(text, trigger.start())
        while region.has_unmarked and found is not None and not self._counts(found, text, position):
            found = region.pattern.search(text, found.end())
        if found is None:
            end = region.held(text, trigger.start())
            self._add_prose(text[position:end])
            return self._hold(text, end) if end < len(text) else end
        self._add_prose(text[position : found.start()])
        assert found.lastindex is not None
        if len(text) - found.start() <= region.longest and text[found.start() :] in region.prefixes:
            return self._hold(text, found.start())
        return self._act(region.markers[found.lastindex - 1], text, found.start(), found.end())

    def _find_open_span(self) -> None:
        """Find what is open, prose or a string of arguments, unless something is kept that its next piece changes."""
        self._find_break = None
        if self._held:
            return
        if self._reader is not None:
            if self._emitter.shows_arguments:
                self._open, self._find_break = ArgumentsDelta, self._reader.find_break
        elif (
            self._step is Parser._prose
            and not self._blank
            and self._quoting.is_plain
            and self._emitter.is_settled
        ):
            self._open = ReasoningDelta if self.in_reasoning else TextDelta
            self._find_break = self._region.breaks.search

    def _counts(self, found: re.Match[str], text: str, position: int) -> bool:
        """Return whether the marker counts: an unmarked one only where text or a line starts, or after its lead-in."""
        marker = self._region.markers[(found.lastindex or 1) - 1]
        at = found.end() - len(marker.text)
        if not marker.unmarked or (self._blank and at == position):
            return True
        before = text[max(position, at - _RECENT) : at]
        before = before if len(before) == _RECENT else self._recent + before
        return before.endswith("\n") or bool(marker.behind and marker.behind.search(before))

    def _is_code(self) -> bool:
        """Return whether the next character is in mid-line, inside code of the Markdown text."""
        quoting = self._quoting
        return (quoting.fenced or quoting.inline) and not self._blank and quoting.last != "\n"

    def _skip_blank(self, text: str, position: int) -> int:
        end = _BLANK.match(text, position).end()  # type: ignore[union-attr]
        self._blanks += text[position:end]
        if len(self._blanks) > _LONGEST_BLANK:
            self._add_prose("")
        return end

    def _add_prose(self, piece: str) -> None:
        """Emit prose. White space held before it belongs to it, except the line breaks that belong to the format."""
        if self._blank and (piece or len(self._blanks) > _LONGEST_BLANK):
            blanks, self._blanks, self._blank = self._blanks, "", False
            own = blanks
            for _ in range(self._breaks):
                own = own.removeprefix("\n")
            self._emitter.markup(blanks[: len(blanks) - len(own)])
            piece = own + piece
        self._emit_prose(piece)

    def _emit_prose(self, piece: str) -> None:
        if piece:
            text = self._emitter.prose(piece, self.in_reasoning)
            self._quoting.feed(text, self.in_reasoning)
            if self._region.has_unmarked:
                self._recent = (self._recent + text)[-_RECENT:]

    def _drop_blank(self) -> None:
        if self._blank:
            self._emitter.markup(self._blanks)
            self._blanks = ""

    def _act(self, marker: Marker, text: str, start: int, end: int) -> int:
        action = marker.action
        if action is Action.OPEN_CALL and marker.behind and self._is_code():
            self._add_prose(text[start:end])
            return end
        if action is Action.OPEN_CALL:
            return self._read_opener(text, end - len(marker.text), text[start : end - len(marker.text)])
        result, whole = self._match(marker.whole, text, start) if marker.whole else (Match.FULL, None)
        end = whole.end if whole else end
        quoted = action is not Action.LEAVE_REASONING and self._is_quoted(text, end, marker)
        if quoted is None or result is Match.PARTIAL:
            return self._hold(text, start)
        if quoted or result is Match.NONE:
            self._add_prose(text[start:end])
            return end
        if action is Action.LEAVE_REASONING:
            self._leave_reasoning(text[start : end - len(marker.text)])
            self._enter(False)
            return end - len(marker.text)
        return self._apply(marker, text, start, end)

    def _apply(self, marker: Marker, text: str, start: int, end: int) -> int:
        if marker.action in (Action.OPEN_TEXT, Action.SWALLOW, Action.CLOSE_CALL):
            self._swallow(text[start:end], marker)
        elif marker.action is Action.CLOSE_REASONING:
            self._leave_reasoning(text[start:end])
            self._enter(False, breaks=marker.breaks_after)
        else:
            self._drop_blank()
            self._emitter.flush()
            self._emitter.markup(text[start:end])
            self._enter(True, breaks=marker.breaks_after)
        return end

    def _leave_reasoning(self, closer: str) -> None:
        self._drop_blank()
        self._emitter.markup(closer)
        self._emitter.flush()

    def _swallow(self, piece: str, marker: Marker) -> None:
        if self._refused and marker.action is Action.CLOSE_CALL:
            self._add_prose(piece)
            return
        if self._blank:
            self._drop_blank()
            self._breaks = 0 if marker.action is Action.OPEN_TEXT else max(self._breaks, marker.breaks_after)
        elif self._region.has_unmarked:
            self._recent = (self._recent + self._compiled.decode(piece))[-_RECENT:]
        self._emitter.markup(piece)

    def _is_quoted(self, text: str, end: int, marker: Marker) -> bool | None:
        """Return whether the marker is in code or quotes; None while the next character decides that."""
        if marker.text in self._compiled.codes.values():
            return False
        if self._quoting.fenced and not self.in_reasoning:
            return True
        mate = CLOSING_MARKS.get("" if self._blank else self._quoting.last)
        if not mate:
            return False
        if marker.action is Action.OPEN_REASONING:  # its label may follow
            end = _LABEL.match(text, end).end()  # type: ignore[union-attr]
        return None if end == len(text) else text[end] == mate

    def _close_prose(self, held: str) -> None:
        if self._blank and not self._emitter.has_output and not self.in_reasoning:
            held = self._blanks + held
            self._blank = False
        if held:
            self._close_held(held)
        self._drop_blank()

    def _close_held(self, held: str) -> None:
        found = self._region.pattern.match(held)
        marker = self._region.markers[found.lastindex - 1] if found and found.lastindex else None
        is_whole = found is not None and found.end() == len(held)
        if marker is not None and held in self._compiled.swallowed:
            self._swallow(held, marker)
        elif marker and (marker.whole or (is_whole and marker.action is not Action.OPEN_CALL)):
            self._apply(marker, held, 0, len(held))
        else:
            self._add_prose(held)

    # Calls

    def _read_opener(self, text: str, position: int, breaks: str = "") -> int:
        """Read an opener: open a call if one follows, else emit the opener as text or markup."""
        for form in self._compiled.forms:
            result = self._open_form(form, form.entries, text, position, breaks)
            if result is Match.FULL:
                return self._at
            if result is Match.PARTIAL:
                return self._hold(text, position - len(breaks))
        opener = next(m for m in self._region.markers if text.startswith(m.text, position))
        end = position + len(opener.text)
        quoted = self._is_quoted(text, end, opener) if opener.text in self._compiled.swallowed else True
        empty = self._end_of_empty(text, end) if quoted else end
        if quoted is None or empty is None:
            return self._hold(text, position - len(breaks))
        if quoted:
            self._refused, end = True, empty
            self._add_prose(breaks + text[position:end])
        else:
            self._swallow(breaks + opener.text, opener)
        return end

    def _end_of_empty(self, text: str, end: int) -> int | None:
        """Return the end of a block without a call, ``end`` if there is none; None while more text decides that."""
        closed, maybe = self._closer_at(self._compiled.block_closers, text, end)
        return closed if closed is not None or maybe else end

    def _closer_at(self, closers: Iterable[Pattern], text: str, at: int) -> tuple[int | None, bool]:
        """Return the end of the first of ``closers`` at ``at``, or None and whether more text may become one."""
        maybe = False
        for closer in closers:
            result, found = self._match(closer, text, at)
            if found is not None:
                return found.end, False
            maybe = maybe or result is Match.PARTIAL
        return None, maybe

    def _open_form(
        self, form: CallPatterns, entries: Entries, text: str, position: int, breaks: str = ""
    ) -> Match:
        for pattern, whole in entries:
            result, found = self._match(pattern, text, position)
            if found is not None:
                if not whole and not self._fill_in_name(form, found.slots):
                    continue
                self._drop_blank()
                self._begin_call(form, found.slots, breaks + text[position : found.end], whole)
                self._at = found.end
                return Match.FULL
            if result is Match.PARTIAL:
                return Match.PARTIAL
        return Match.NONE

    def _fill_in_name(self, form: CallPatterns, slots: dict[str, str]) -> bool:
        if form.id is not None and "id" in slots:
            named = form.id.fullmatch(slots["id"].strip())
            if named is None:
                return False
            slots["name"] = named["name"]
        written = slots.get("name", "").strip()
        name = slots["name"] = string_of(written) if form.form.is_json else form.form.unescaped(written)
        return name in self._schemas if form.form.unmarked else bool(name)

    def _begin_call(self, form: CallPatterns, slots: dict[str, str], raw: str, whole: bool) -> None:
        self._form = form
        self._sink = self._sink or Sink(
            self._start_call, self._emitter.delta, self._end_call, self._break_call, self._hold, self._match
        )
        if whole:
            self._reader = JsonCall(raw)
        else:
            name = slots["name"]
            self._start_call(name, slots.get("id", "").strip(), raw)
            self._reader = form.reader(self._schemas.get(name))
        self._step = Parser._arguments

    def _arguments(self, text: str, position: int) -> int:
        assert self._reader is not None
        assert self._sink is not None
        return self._reader.feed(text, position, self._sink)

    def _after_call(self, text: str, position: int) -> int:
        """Read what follows a complete call: its closer, the next call of the pair, the pair's closer, or prose."""
        form = self._form
        assert form is not None
        maybe = False
        if self._outer_close and form.closer is not None:
            end, maybe = self._closer_at((form.closer,), text, position)
            if end is not None:
                self._outer_close = False
                self._emitter.markup(text[position:end])
                return end
        if not maybe and form.following:
            result = self._open_form(form, form.following, text, position)
            if result is Match.FULL:
                return self._at
            maybe = result is Match.PARTIAL
        end, may_close = self._closer_at(form.pair_closers, text, position)
        if end is None and (maybe or may_close):
            return self._hold(text, position)
        self._enter(False, breaks=form.form.joiner.count("\n"))
        if end is None:
            return position
        self._emitter.markup(text[position:end])
        return end


def parse(family: Family, text: str, tools: Sequence[Tool] = (), prompt_tail: str = "") -> Turn:
    """Parse a whole text into an assistant turn: feed, close and fold. The arguments are those of ``Parser``.

    Example:
        >>> from singletree import families, parse
        >>> turn = parse(families.get("hermes"), '<tool_call>\\n{"name": "f", "arguments": {}}\\n</tool_call>')
        >>> turn.tool_calls[0].name
        'f'
    """
    parser = Parser(family, tools, prompt_tail)
    return fold([*parser.feed(text), *parser.close()])
