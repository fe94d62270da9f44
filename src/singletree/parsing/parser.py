"""Text of a turn in, events out.

1. Batch is one feed and a close; there is no other entrance.
2. Nothing that a model writes raises. What fits no rule is text; what is cut is closed as cut.
3. Text is held back only while it is a proper prefix of something that could end the region.
4. A marker that is a special token in this vocabulary matches only that token; any other marker matches by text.
   A quoted marker falls back to text because nothing sensible follows it. Without a vocabulary, text matches.
5. No family is named here.
6. The events' raw spans, concatenated, give the input back byte for byte.
7. Time is linear in the length and memory is bounded by what is held back.
8. The tail of the prompt is an input (a template may already have opened the reasoning), never a guess.
9. Reasoning and tool calls are one grammar with one owner: no second pass over the content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from singletree.conversation import Tool, Turn
from singletree.events import Event, fold
from singletree.parsing.arguments import Codec, JsonCall, unescaped
from singletree.parsing.codecs import codec_for
from singletree.parsing.family import Family
from singletree.parsing.grammar import Action, CallPatterns, Entries, Marker, Region, compile_family
from singletree.parsing.opening import begun, opens_in_reasoning
from singletree.parsing.picture import Verdict
from singletree.parsing.quoting import Quoting
from singletree.parsing.telling import Telling, numbered

_LONGEST_BLANK = 4096
"""White space beside a marker is the format's up to this many characters; a longer run is what the model says."""
_LONGEST_HEADER = 1024
"""Nothing that has not become a call after this many characters will."""

_LABEL = re.compile(r"\w{0,32}")


class Parser:
    """Reads one assistant turn. One parser a generation; it is not shared between threads.

    Args:
        family: how the model writes.
        tools: the tools of the request, for the types of tag parameters.
        prompt_tail: the end of the rendered prompt, from the last turn boundary on; empty when not known.
        special_tokens: texts of the vocabulary's special tokens; empty when not known.
        mint_id: (index, name) -> id for calls whose format carries none.
    """

    def __init__(
        self,
        family: Family,
        tools: Sequence[Tool] = (),
        prompt_tail: str = "",
        *,
        special_tokens: Collection[str] = (),
        mint_id: Callable[[int, str], str] = numbered,
    ) -> None:
        self._grammar = compile_family(family, special_tokens)
        self._schemas = {t.name: t.parameters for t in tools}
        self._held = self._grammar.turn if begun(family, prompt_tail) else ""
        self._told = Telling(self._grammar, mint_id, len(family.turn) if self._held else 0)
        self._told.silent = frozenset(family.no_tools) - self._schemas.keys()
        self._told.coded = bool(self._held and self._grammar.codes)
        self._codec: Codec | None = None
        self._form: CallPatterns | None = None
        self._outer_close = False
        self._refused = False
        self._quoting = Quoting()
        self.in_reasoning = opens_in_reasoning(family, prompt_tail, special_tokens)
        self._step = self._prose
        self._enter(self.in_reasoning, breaks=1 if self.in_reasoning else 0)

    def feed(self, text: str, special: bool = False) -> list[Event]:
        """More text, or one special token's text. Returns the events that are certain now."""
        if special:
            code = self._grammar.codes.get(text)
            if code is not None:
                text, self._told.coded = code, True
        if self._held:
            text, self._held = self._held + text, ""
        position, length = 0, len(text)
        while position < length:
            position = self._step(text, position)
        return self._told.take()

    def close(self) -> list[Event]:
        """The text ended, for whatever reason. A call that is not complete stays so."""
        held, self._held = self._held, ""
        if self._codec is not None:
            held = self._codec.close() + held
            if isinstance(self._codec, JsonCall):
                self._tell_prose(held)
            elif held:
                self._told.delta("", held)
        elif self._step == self._prose:
            self._close_prose(held)
        elif held and held.strip() and not (self._form and self._form.may_close(held)):
            self._tell_prose(held)
        else:
            self._told.markup(held)
        self._told.flush()
        return self._told.take()

    # Sink: what the codecs tell

    def start(self, name: str, wire_id: str, raw: str) -> None:
        """See ``arguments.Sink``."""
        self._refused = False
        self._told.start(name, wire_id, raw)

    def delta(self, json_text: str, raw: str) -> None:
        """See ``arguments.Sink``."""
        self._told.delta(json_text, raw)

    def end(self) -> None:
        """See ``arguments.Sink``."""
        self._told.end()
        self._codec = None
        self.in_reasoning = False
        self._outer_close = True
        self._step = self._after_call

    def broken(self, raw: str) -> None:
        """See ``arguments.Sink``."""
        codec, self._codec = self._codec, None
        self._refused = True
        if isinstance(codec, JsonCall):
            self._tell_prose(raw)
        else:
            self._told.broken(raw)
            self.in_reasoning = False
        self._enter(self.in_reasoning, blank=False)

    def hold(self, text: str, position: int) -> int:
        """See ``arguments.Sink``."""
        self._held = text[position:]
        return len(text)

    # Prose: visible text and reasoning

    def _enter(self, reasoning: bool, *, breaks: int = 0, blank: bool = True) -> None:
        self.in_reasoning = reasoning
        self._region: Region = self._grammar.reasoning if reasoning else self._grammar.text
        self._blank = blank
        self._blanks = ""
        self._breaks = breaks
        self._step = self._prose

    def _prose(self, text: str, position: int) -> int:
        if self._blank:
            position = self._skip_blank(text, position)
            if position == len(text):
                return position
        region = self._region
        trigger = region.trigger.search(text, position)
        if trigger is None:
            self._speak(text[position:] if position else text)
            return len(text)
        found = region.pattern.search(text, trigger.start())
        while region.has_bare and found is not None and not self._stands(found, text, position):
            found = region.pattern.search(text, found.end())
        if found is None:
            end = region.held(text, trigger.start())
            self._speak(text[position:end])
            return self.hold(text, end) if end < len(text) else end
        self._speak(text[position : found.start()])
        assert found.lastindex is not None
        if len(text) - found.start() <= region.longest and text[found.start() :] in region.prefixes:
            return self.hold(text, found.start())
        return self._act(region.markers[found.lastindex - 1], text, found.start(), found.end())

    def _stands(self, found: re.Match[str], text: str, position: int) -> bool:
        """Whether the marker found counts where it stands: a bare one only at the start of the text or of a line."""
        marker = self._region.markers[(found.lastindex or 1) - 1]
        at = found.end() - len(marker.text)
        if not marker.bare or at != position:
            return not marker.bare or text[at - 1] == "\n"
        return self._blank or self._quoting.last == "\n"

    def _skip_blank(self, text: str, position: int) -> int:
        rest = text[position:].lstrip()
        end = len(text) - len(rest)
        self._blanks += text[position:end]
        if len(self._blanks) > _LONGEST_BLANK:
            self._speak("")
        return end

    def _speak(self, piece: str) -> None:
        """Tell prose; white space held before it is its own but for the line breaks that are the format's."""
        if self._blank and (piece or len(self._blanks) > _LONGEST_BLANK):
            blanks, self._blanks, self._blank = self._blanks, "", False
            own = blanks
            for _ in range(self._breaks):
                own = own.removeprefix("\n")
            self._told.markup(blanks[: len(blanks) - len(own)])
            piece = own + piece
        self._tell_prose(piece)

    def _tell_prose(self, piece: str) -> None:
        if piece:
            self._quoting.feed(self._told.prose(piece, self.in_reasoning))

    def _drop_blank(self) -> None:
        if self._blank:
            self._told.markup(self._blanks)
            self._blanks = ""

    def _act(self, marker: Marker, text: str, start: int, end: int) -> int:
        action = marker.action
        if action is Action.OPEN_CALL:
            return self._opening(text, end - len(marker.text), text[start : end - len(marker.text)])
        verdict, whole = marker.whole.match(text, start) if marker.whole else (Verdict.YES, None)
        end = whole.end() if whole else end
        quoted = action is not Action.LEAVE_REASONING and self._is_quoted(text, end, marker)
        if quoted is None or verdict is Verdict.MAYBE:
            return self.hold(text, start)
        if quoted or verdict is Verdict.NO:
            self._speak(text[start:end])
            return end
        if action is Action.LEAVE_REASONING:
            self._leave(text[start : end - len(marker.text)])
            self._enter(False)
            return end - len(marker.text)
        return self._obey(marker, text, start, end)

    def _obey(self, marker: Marker, text: str, start: int, end: int) -> int:
        action = marker.action
        if action in (Action.SWALLOW, Action.CLOSE_CALL):
            self._swallow(text[start:end], marker)
        elif action is Action.CLOSE_REASONING:
            self._leave(text[start:end])
            self._enter(False, breaks=marker.breaks_after)
        else:
            self._drop_blank()
            self._told.flush()
            self._told.markup(text[start:end])
            self._enter(True, breaks=marker.breaks_after)
        return end

    def _leave(self, closer: str) -> None:
        self._drop_blank()
        self._told.markup(closer)
        self._told.flush()

    def _swallow(self, piece: str, marker: Marker) -> None:
        if self._refused and marker.action is Action.CLOSE_CALL:
            self._speak(piece)
            return
        if self._blank:
            self._drop_blank()
            self._breaks = max(self._breaks, marker.breaks_after)
        self._told.markup(piece)

    def _is_quoted(self, text: str, end: int, marker: Marker) -> bool | None:
        """Whether the marker stands in code or quotes; None while the next character would tell."""
        if marker.text in self._grammar.codes.values():
            return False
        if self._quoting.fenced and not self.in_reasoning:
            return True
        mate = self._quoting.mates("" if self._blank else self._quoting.last)
        if not mate:
            return False
        if marker.action is Action.OPEN_REASONING:  # its label may follow
            end = _LABEL.match(text, end).end()  # type: ignore[union-attr]
        return None if end == len(text) else text[end] == mate

    def _close_prose(self, held: str) -> None:
        if self._blank and not self._told.said and not self.in_reasoning:
            held = self._blanks + held
            self._blank = False
        if held:
            self._close_held(held)
        self._drop_blank()

    def _close_held(self, held: str) -> None:
        region = self._region
        found = region.pattern.match(held)
        if found is not None and found.lastindex is not None:
            marker = region.markers[found.lastindex - 1]
            if held in self._grammar.swallowed:
                self._swallow(held, marker)
                return
            if marker.whole or (found.end() == len(held) and marker.action is not Action.OPEN_CALL):
                self._obey(marker, held, 0, len(held))
                return
        self._speak(held)

    # Calls

    def _opening(self, text: str, position: int, breaks: str = "") -> int:
        """At an opener: does a call follow?"""
        for form in self._grammar.forms:
            verdict = self._open_form(form, form.entries, text, position, breaks)
            if verdict is Verdict.YES:
                return self._at
            if verdict is Verdict.MAYBE:
                return self.hold(text, position - len(breaks))
        opener = next(m for m in self._region.markers if text.startswith(m.text, position))
        end = position + len(opener.text)
        quoted = self._is_quoted(text, end, opener) if opener.text in self._grammar.swallowed else True
        if quoted is None:
            return self.hold(text, position - len(breaks))
        if quoted:
            self._refused = True
            self._speak(breaks + opener.text)
        else:
            self._swallow(breaks + opener.text, opener)
        return end

    def _open_form(
        self, form: CallPatterns, entries: Entries, text: str, position: int, breaks: str = ""
    ) -> Verdict:
        for pattern, whole in entries:
            verdict, found = pattern.match(text, position)
            if found is not None:
                slots = {} if whole else found.groupdict()
                if not whole and not self._names(form, slots):
                    continue
                self._drop_blank()
                self._begin(form, slots, breaks + found.group(), whole)
                self._at = found.end()
                return Verdict.YES
            if verdict is Verdict.MAYBE and len(text) - position < _LONGEST_HEADER:
                return Verdict.MAYBE
        return Verdict.NO

    def _names(self, form: CallPatterns, slots: dict[str, str]) -> bool:
        """Fill in ``slots['name']``; False when the header holds none."""
        if form.id is not None and "id" in slots:
            named = form.id.fullmatch(slots["id"].strip())
            if named is None:
                return False
            slots["name"] = named["name"]
        name = slots["name"] = unescaped(slots.get("name", "").strip(), form.form.escapes)
        return name in self._schemas if form.form.bare else bool(name)

    def _begin(self, form: CallPatterns, slots: dict[str, str], raw: str, whole: bool) -> None:
        self._form = form
        if whole:
            self._codec = JsonCall(raw)
        else:
            name = slots["name"]
            self.start(name, slots.get("id", "").strip(), raw)
            self._codec = codec_for(form, self._schemas.get(name))
        self._step = self._arguments

    def _arguments(self, text: str, position: int) -> int:
        codec = self._codec
        assert codec is not None
        return codec.feed(text, position, self)

    def _after_call(self, text: str, position: int) -> int:
        """Behind a complete call: its closer, the next call of the same pair, the pair's closer, or prose again."""
        form = self._form
        assert form is not None
        maybe = False
        if self._outer_close and form.closer is not None:
            verdict, found = form.closer.match(text, position)
            if found is not None:
                self._outer_close = False
                return self._take(found.end(), text, position)
            maybe = verdict is Verdict.MAYBE
        if not maybe and form.following:
            verdict = self._open_form(form, form.following, text, position)
            if verdict is Verdict.YES:
                return self._at
            maybe = verdict is Verdict.MAYBE
        for closer in form.pair_closers:
            verdict, found = closer.match(text, position)
            if found is not None:
                trimmed = found.group().rstrip()
                self._enter(False, breaks=form.form.joiner.count("\n"))
                return self._take(position + len(trimmed), text, position)
            maybe = maybe or verdict is Verdict.MAYBE
        if maybe and len(text) - position < _LONGEST_HEADER:
            return self.hold(text, position)
        self._enter(False, breaks=form.form.joiner.count("\n"))
        return position

    def _take(self, end: int, text: str, position: int) -> int:
        self._told.markup(text[position:end])
        return end


def parse(family: Family, text: str, tools: Sequence[Tool] = (), prompt_tail: str = "") -> Turn:
    """The turn that ``text`` says: feed, close and fold.

    Example:
        >>> from singletree import families, parse
        >>> turn = parse(families.get("hermes"), '<tool_call>\\n{"name": "f", "arguments": {}}\\n</tool_call>')
        >>> turn.tool_calls[0].name
        'f'
    """
    parser = Parser(family, tools, prompt_tail)
    return fold([*parser.feed(text), *parser.close()])
