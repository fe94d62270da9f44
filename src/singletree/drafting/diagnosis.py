"""Examines a model before it is served: what its template, family and tokenizer support, and what will not work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from singletree.constraints import constrain
from singletree.conversation import (
    Conversation,
    Part,
    Reasoning,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
)
from singletree.drafting.template_turns import find_instructed_calls, try_family
from singletree.errors import SingletreeError
from singletree.parsing.render_turn import render_turn
from singletree.prompts.history import canonicalization
from singletree.prompts.template.capabilities import TemplateCapabilities, thinking_arguments
from singletree.server.models.chat_format import ChatFormat

Level = Literal["good", "note", "wrong"]

_ASKED = (Turn("user", (Text("hello"),)),)
_CALL = ToolCall("get_weather", '{"city": "Paris"}', "call_1")
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
_TOOL = Tool("get_weather", "Tells the weather", _PARAMETERS)
_TAIL = 40

_CONTROLS: dict[str, Thinking] = {
    "on": Thinking(enabled=True),
    "off": Thinking(enabled=False),
    "effort low": Thinking(effort="low"),
    "effort high": Thinking(effort="high"),
    "budget of 1024 tokens": Thinking(budget_tokens=1024),
}
"""The settings of reasoning that a request can ask for, in any protocol."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        topic: what was checked.
        found: what was found.
        level: ``wrong`` if something that a harness relies on cannot work, ``note`` if it works with a loss.
        matter: what will not work, or what is lost; empty if all is good.
        cure: what to do about it.
    """

    topic: str
    found: str
    level: Level = "good"
    matter: str = ""
    cure: str = ""


def diagnose(chat_format: ChatFormat, *, tokenizer: bool = True) -> list[Finding]:
    """Check everything that can be checked without weights. Takes about a second: turns are rendered and parsed.

    ``tokenizer``: whether the tokenizer is the model's own; False if only the template is.
    """
    return [
        *_family(chat_format),
        *_template(chat_format),
        *_reasoning(chat_format),
        *_parsed_back(chat_format),
        *_tokens(chat_format, tokenizer),
    ]


def _family(chat_format: ChatFormat) -> Iterator[Finding]:
    family, reads = chat_format.family, chat_format.template.capabilities
    why = chat_format.why.partition("; WARNING")[0]
    name_it = "name the family: --tool-call-parser NAME (`singletree families` lists them), or draft one: "
    name_it += "`singletree families draft TEMPLATE`"
    if family.forms or not (reads.tools or reads.calls):
        yield Finding("family", f"{family.name or 'none'}: {why}")
    else:
        matter = "the template supports tools, but the format of the model's calls is unknown: calls come back as text"
        yield Finding("family", f"{family.name}: {why}", "wrong", matter, name_it)
    thought = " … ".join(map(_shown, family.reasoning)) if family.reasoning else "none"
    yield Finding("its reasoning", thought)
    yield Finding("its calls", _shown(render_turn(family, [_CALL])) if family.forms else "none")
    yield _constrained(chat_format)


def _constrained(chat_format: ChatFormat) -> Finding:
    topic = "held to a call"
    if not chat_format.family.forms:
        matter = "tool_choice required, or of one tool, is refused"
        return Finding(topic, "no", "note", matter, "choose a family that has calls")
    try:
        constrain.require_call(chat_format.family, [_TOOL], thinking="over", parallel=True)
    except SingletreeError as error:
        matter = f"tool_choice required is refused: {error.message}"
        return Finding(topic, "no", "note", matter, "leave tool_choice at auto")
    return Finding(topic, "yes: tool_choice and strict tools, on engines that take grammars")


def _template(chat_format: ChatFormat) -> Iterator[Finding]:
    template, reads = chat_format.template, chat_format.template.capabilities
    if template.is_default:
        matter = "prompts are written in plain ChatML, which this model may never have seen"
        yield Finding("template", "none", "wrong", matter, "give the right one: --chat-template FILE")
    other = "give a template that has it: --chat-template FILE"
    yield _has("tools", reads.tools, "printed", "the model is never told of any tool", other, "wrong")
    if not reads.tools:
        return
    yield from _instructed(chat_format)
    calls = "printed, " + ("several in a turn" if reads.parallel_calls else "one in a turn")
    matter = "they are written as the family writes them, as text"
    yield _has("earlier calls", reads.calls, calls, matter, other)
    if reads.calls:
        form = "as a JSON object" if reads.arguments == "object" else "as JSON text, the model's own bytes"
        yield Finding("their arguments", form)
        if not reads.text_with_calls:
            matter = "it is written as the family writes it, in a turn that the template does not render"
            yield Finding("text beside calls", "not printed", "note", matter, other)
        yield Finding("their ids", _ids(reads))
    yield _has("tool results", reads.results, "role tool", "they are written as the user's words", other)
    matter = "a later system message is written as the user's words, in place"
    cure = "none needed; --chat-template FILE to change it"
    yield _has("system inside", reads.system_inside, "where it stands", matter, cure)
    yield Finding("system at the head", "printed" if reads.system else "written as the user's words")


def _instructed(chat_format: ChatFormat) -> Iterator[Finding]:
    """Compare the calls that the template tells the model to write with those of the family."""
    topic, family = "calls as instructed", chat_format.family
    found = find_instructed_calls(chat_format.template, family)
    wrong = [call for call in found if not call.fits]
    if found and not wrong:
        yield Finding(topic, "as the family writes them")
    if not wrong:
        return
    matter = f"the template tells the model to write {_shown(wrong[0].text)}, and a call of the family is "
    matter += f"{_shown(render_turn(family, [_CALL]))}: a model that does as it is told may call nothing"
    cure = "correct the call in the template, and give it with --chat-template FILE"
    yield Finding(topic, "in another shape", "wrong", matter, cure)


def _ids(reads: TemplateCapabilities) -> str:
    if reads.call_ids == "nine":
        return "nine letters and digits; others are rewritten"
    form = reads.call_id_format.replace("{", "").replace("}", "")
    return f"{form}; others are rewritten" if form else "any"


def _has(topic: str, has: bool, how: str, matter: str, cure: str, level: Level = "note") -> Finding:
    return Finding(topic, how) if has else Finding(topic, "not read", level, matter, cure)


def _reasoning(chat_format: ChatFormat) -> Iterator[Finding]:
    reads, family = chat_format.template.capabilities, chat_format.family
    if family.reasoning is None and not (reads.switches or reads.efforts or reads.reasoning):
        return
    if reads.reasoning is not None:
        place = "a content part" if reads.reasoning == "part" else f"the field {reads.reasoning}"
        yield Finding("reasoning goes back", f"in {place}")
    else:
        matter = (
            "the template has no field for it: it goes back as text in the turn, if the template keeps it"
        )
        cure = "none needed unless the model was trained otherwise"
        yield Finding("reasoning goes back", "as text", "note", matter, cure)
    if family.reasoning is None:
        matter = "the template supports reasoning, but no family describes its format: it comes back as text"
        yield Finding("reasoning", "not read", "wrong", matter, "name it: --reasoning-parser NAME")
    if reads.reasoning is not None:
        yield Finding("of earlier turns", _history(chat_format, reads))
    yield from _controls(chat_format, reads)


def _history(chat_format: ChatFormat, reads: TemplateCapabilities) -> str:
    """Describe what the template does with the reasoning of earlier turns, by default and with its switches set."""
    on = {name: values[0] for name, values in reads.switches.items()}
    default = _kept(chat_format, on)
    switched = _kept(chat_format, {**on, **reads.history_switches})
    if default == switched:
        return default
    names = ", ".join(f"{name}={value}" for name, value in reads.history_switches.items())
    return f"{default}; with {names}, as requests that reason set it: {switched}"


def _kept(chat_format: ChatFormat, arguments: dict[str, object]) -> str:
    thought, result = Reasoning("qthought"), ToolResult(_CALL.id, (Text("sun"),))
    answered = (*_ASKED, Turn("assistant", (thought, Text("hi"))), *_ASKED)
    looped = (*_ASKED, Turn("assistant", (thought, _CALL)), Turn("tool", (result,)))
    one, other = (
        "kept" if thought.text in _rendered(chat_format, turns, arguments) else "dropped"
        for turns in (answered, looped)
    )
    return f"{one} once answered, {other} in a tool loop"


def _rendered(chat_format: ChatFormat, turns: tuple[Turn, ...], arguments: dict[str, object]) -> str:
    def render_parts(parts: Iterable[Part]) -> str:
        return render_turn(chat_format.family, parts)

    template, conversation = chat_format.template, Conversation(turns, (_TOOL,))
    with suppress(SingletreeError):
        return template.render(conversation, render_parts=render_parts, template_arguments=arguments)
    return ""


def _controls(chat_format: ChatFormat, reads: TemplateCapabilities) -> Iterator[Finding]:
    given = {asked: _arguments(thinking, reads) for asked, thinking in _CONTROLS.items()}
    if not any(given.values()):
        matter = "a request cannot turn it on or off, or change its effort: the template has no switch"
        found = f"no switch → the prompt ends {_shown(_opened(chat_format, {}))}"
        yield Finding("thinking", found, "note", matter, "none; the model thinks as it was trained to")
        return
    for asked, arguments in given.items():
        if asked not in _SWITCHED and arguments == given["on"]:
            continue  # The template has no word for this effort, so it only turns reasoning on.
        switches = ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "no switch"
        where = f" → the prompt ends {_shown(_opened(chat_format, arguments))}" if asked in _SWITCHED else ""
        yield Finding(f"thinking {asked}", switches + where)


_SWITCHED = ("on", "off")


def _arguments(thinking: Thinking, reads: TemplateCapabilities) -> dict[str, object]:
    arguments = thinking_arguments(thinking, reads, Conversation(_ASKED))
    return {name: value for name, value in arguments.items() if name not in reads.history_switches}


def _opened(chat_format: ChatFormat, arguments: dict[str, object]) -> str:
    text = _rendered(chat_format, _ASKED, arguments)
    return text[-_TAIL:] if len(text) <= _TAIL else "…" + text[-_TAIL:]


def _parsed_back(chat_format: ChatFormat) -> Iterator[Finding]:
    """Check that the family parses what the template renders, with turns whose parts are known."""
    if chat_format.template.is_default or not (chat_format.family.forms or chat_format.family.reasoning):
        return
    trials = try_family(chat_format.family, chat_format.template)
    wrong = [trial for trial in trials if not trial.agrees]
    if not trials:
        return
    found = f"{len(trials) - len(wrong)} of {len(trials)} turns that the template wrote"
    if not wrong:
        yield Finding("read back", found)
        return
    # A template may write an earlier turn in another way than its model does; so this is an error only for a family
    # that was named by hand, which is more likely to be the wrong one.
    cases = [trial.rendered.case for trial in wrong]
    by_hand = chat_format.why.startswith("by --") and not _PLAIN_CASES.isdisjoint(cases)
    matter = f"parsed as something else: {', '.join(cases)}; the first is {_shown(wrong[0].rendered.text)}"
    cure = "check what the model itself writes: if it writes this, choose another family "
    cure += "(`singletree families draft TEMPLATE`)"
    yield Finding("read back", found, "wrong" if by_hand else "note", matter, cure)


_PLAIN_CASES = frozenset({"reasoning and text", "single"})


def _tokens(chat_format: ChatFormat, tokenizer: bool) -> Iterator[Finding]:
    off = ", ".join(sorted(chat_format.stability_off))
    on = len(canonicalization.NAMED) - len(chat_format.stability_off)
    yield Finding("stability rules", f"{on} on" + (f"; off: {off}" if off else ""))
    if not tokenizer:
        yield Finding("tokens", "not looked at: a template has no vocabulary; give the model to see more")
        return
    yield _replayed(chat_format)
    fast = chat_format.tokenizer.accelerate()
    yield Finding("encoder", "a faster one with identical ids" if fast else "the checkpoint's own")
    yield _guarded(chat_format)
    window = chat_format.tokenizer.context_window
    if window is None:
        yield Finding("window", "unknown", "note", "the engine's own limit applies", "--context-window N")
    else:
        yield Finding("window", f"{window} tokens")


def _replayed(chat_format: ChatFormat) -> Finding:
    layout = chat_format.layout
    if layout is None:
        matter = "earlier turns go back as rendered, not by their own tokens: where these differ, the engine's prefix "
        matter += "cache is missed"
        cure = "give a template whose turns begin and end with added tokens: --chat-template FILE"
        found = "no: no added tokens separate turns in the template"
        return Finding("exact replay", found, "note", matter, cure)
    return Finding("exact replay", f"between {_listed(layout.headers)} and {_listed(layout.ends)}")


def _guarded(chat_format: ChatFormat) -> Finding:
    """Check that a client cannot write a special token, in its own text or in text that it sends as the assistant's."""
    tokenizer = chat_format.tokenizer
    guards = (tokenizer.guard, chat_format.own_guard)
    broken = [
        text
        for text in tokenizer.special_tokens
        if any(tokenizer.added_tokens[text] in tokenizer.encode(guard(text)) for guard in guards)
    ]
    if not broken:
        return Finding("special tokens", f"{len(tokenizer.special_tokens)}; none can be written by a client")
    matter = f"text of a client that contains {_listed(sorted(broken)[:3])} is read as the token"
    cure = "report this model: it is a fault of singletree"
    return Finding("special tokens", f"{len(broken)} unguarded", "wrong", matter, cure)


def _listed(texts: Iterable[str]) -> str:
    return " or ".join(map(_shown, texts))


def _shown(text: str) -> str:
    return text.replace("\n", "⏎")
