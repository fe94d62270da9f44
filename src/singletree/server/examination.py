"""What is known of a model before it is served: how it is spoken to and read, and what will not work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from singletree.conversation import Conversation, Reasoning, Text, Thinking, Tool, ToolCall, ToolResult, Turn
from singletree.errors import SingletreeError
from singletree.parsing import constrain
from singletree.parsing.draw import draw
from singletree.prompts import stability
from singletree.prompts.template_reads import Reads
from singletree.prompts.thinking import thinking_arguments
from singletree.prompts.tokenizer import Tokenizer
from singletree.server.catalog import Speech
from singletree.server.template_turns import Trial, tried

Level = Literal["good", "note", "wrong"]

_ASKED = (Turn("user", (Text("hello"),)),)
_CALL = ToolCall("get_weather", '{"city": "Paris"}', "call_1")
_TOOL = Tool(
    "get_weather", "Tells the weather", {"type": "object", "properties": {"city": {"type": "string"}}}
)
_TAIL = 40

_CONTROLS: dict[str, Thinking] = {
    "on": Thinking(enabled=True),
    "off": Thinking(enabled=False),
    "effort low": Thinking(effort="low"),
    "effort high": Thinking(effort="high"),
    "budget of 1024 tokens": Thinking(budget_tokens=1024),
}
"""What a request may ask about reasoning, in whichever protocol."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: what it is about.
        found: what was found.
        level: ``wrong`` where something that a harness relies on cannot work, ``note`` where it works with a loss.
        matter: what will not work, or what is lost; empty where all is good.
        cure: what to do about it.
    """

    topic: str
    found: str
    level: Level = "good"
    matter: str = ""
    cure: str = ""


def examine(speech: Speech, *, tokenizer: bool = True) -> list[Finding]:
    """Everything that can be known without weights; ``tokenizer`` False where only the template is the model's own.

    Takes a second or so: turns are rendered and read back, and a faster encoder is looked for.
    """
    return [
        *_told(speech),
        *_template(speech),
        *_reasoning(speech),
        *_read_back(speech),
        *_tokens(speech, tokenizer),
    ]


def _told(speech: Speech) -> Iterator[Finding]:
    family, reads = speech.family, speech.template.reads
    why = speech.why.partition("; WARNING")[0]
    name_it = "name the family: --tool-call-parser NAME (`singletree families` lists them), or draft one: "
    name_it += "`singletree families draft TEMPLATE`"
    if family.forms or not (reads.tools or reads.calls):
        yield Finding("family", f"{family.name or 'none'}: {why}")
    else:
        matter = "the template knows tools, and how the model calls one is not known: calls come back as text"
        yield Finding("family", f"{family.name}: {why}", "wrong", matter, name_it)
    thought = " … ".join(map(_shown, family.reasoning)) if family.reasoning else "none"
    yield Finding("its reasoning", thought)
    yield Finding("its calls", _shown(draw(family, [_CALL])) if family.forms else "none")
    yield _constrained(speech)


def _constrained(speech: Speech) -> Finding:
    topic = "held to a call"
    if not speech.family.forms:
        matter = "tool_choice required, or of one tool, is refused"
        return Finding(topic, "no", "note", matter, "it comes with a family that has calls")
    try:
        constrain.calls(speech.family, [_TOOL], thinking="over", parallel=True)
    except SingletreeError as error:
        return Finding(
            topic,
            "no",
            "note",
            f"tool_choice required is refused: {error.message}",
            "leave tool_choice at auto",
        )
    return Finding(topic, "yes: tool_choice and strict tools, on engines that take grammars")


def _template(speech: Speech) -> Iterator[Finding]:
    template, reads = speech.template, speech.template.reads
    if template.is_default:
        matter = "prompts are written in plain ChatML, which this model may never have seen"
        yield Finding("template", "none", "wrong", matter, "give the right one: --chat-template FILE")
    other = "give a template that has it: --chat-template FILE"
    yield _has("tools", reads.tools, "printed", "the model is never told of any tool", other, "wrong")
    if not reads.tools:
        return
    calls = "printed, " + ("several in a turn" if reads.parallel_calls else "one in a turn")
    yield _has(
        "earlier calls", reads.calls, calls, "they are written as the family writes them, as text", other
    )
    if reads.calls:
        form = "as a JSON object" if reads.arguments == "object" else "as JSON text, the model's own bytes"
        yield Finding("their arguments", form)
        if not reads.text_with_calls:
            matter = "it is written as the family writes it, in a turn that is drawn, not rendered"
            yield Finding("text beside calls", "not printed", "note", matter, other)
        yield Finding("their ids", _IDS[reads.call_ids])
    yield _has("tool results", reads.results, "role tool", "they are written as the user's words", other)
    yield _has(
        "system inside",
        reads.system_inside,
        "where it stands",
        "a later system message is written as the user's words, in place",
        "none needed; --chat-template FILE to change it",
    )
    yield Finding("system at the head", "printed" if reads.system else "written as the user's words")


_IDS = {
    "any": "any",
    "nine": "nine letters and digits; others are respelled",
    "kimi": "functions.name:index; others are respelled",
}


def _has(topic: str, has: bool, how: str, matter: str, cure: str, level: Level = "note") -> Finding:
    return Finding(topic, how) if has else Finding(topic, "not read", level, matter, cure)


def _reasoning(speech: Speech) -> Iterator[Finding]:
    reads, family = speech.template.reads, speech.family
    if family.reasoning is None and not (reads.switches or reads.efforts or reads.reasoning):
        return
    if reads.reasoning is not None:
        place = "a content part" if reads.reasoning == "part" else f"the field {reads.reasoning}"
        yield Finding("reasoning goes back", f"in {place}")
    else:
        matter = "the template has no field for it: it goes back as text in the turn, where the template keeps that"
        yield Finding(
            "reasoning goes back",
            "as text",
            "note",
            matter,
            "none needed unless the model was trained otherwise",
        )
    if family.reasoning is None:
        matter = "the template knows reasoning, and no family says how it is written: it comes back as text"
        yield Finding("reasoning", "not read", "wrong", matter, "name it: --reasoning-parser NAME")
    if reads.reasoning is not None:
        yield Finding("of earlier turns", _history(speech, reads))
    yield from _controls(speech, reads)


def _history(speech: Speech, reads: Reads) -> str:
    """What becomes of the reasoning of earlier turns, as the template has it and with what keeps it."""
    on = {name: values[0] for name, values in reads.switches.items()}
    told = _kept(speech, on)
    switched = _kept(speech, {**on, **reads.history_switches})
    names = ", ".join(f"{name}={value}" for name, value in reads.history_switches.items())
    return told if told == switched else f"{told}; with {names}, as requests that reason set it: {switched}"


def _kept(speech: Speech, arguments: dict[str, object]) -> str:
    thought = Reasoning("qthought")
    answered = (*_ASKED, Turn("assistant", (thought, Text("hi"))), *_ASKED)
    looped = (
        *_ASKED,
        Turn("assistant", (thought, _CALL)),
        Turn("tool", (ToolResult(_CALL.id, (Text("sun"),)),)),
    )
    words = [
        "kept" if "qthought" in _rendered(speech, t, arguments) else "dropped" for t in (answered, looped)
    ]
    return f"{words[0]} once answered, {words[1]} in a tool loop"


def _rendered(speech: Speech, turns: tuple[Turn, ...], arguments: dict[str, object]) -> str:
    conversation = Conversation(turns, (_TOOL,))
    try:
        return speech.template.render(conversation, draw=_drawn(speech), template_arguments=arguments)
    except SingletreeError:
        return ""


def _controls(speech: Speech, reads: Reads) -> Iterator[Finding]:
    given = {asked: _given(thinking, reads) for asked, thinking in _CONTROLS.items()}
    if not any(given.values()):
        matter = "a request cannot turn it on or off, or weaken it: the template has no switch"
        found = f"no switch → the prompt ends {_shown(_opened(speech, {}))}"
        yield Finding("thinking", found, "note", matter, "none; it thinks as it was trained to")
        return
    for asked, arguments in given.items():
        if asked not in _SWITCHED and arguments == given["on"]:
            continue  # an effort that the template has no word for only turns it on
        said = ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "no switch"
        where = f" → the prompt ends {_shown(_opened(speech, arguments))}" if asked in _SWITCHED else ""
        yield Finding(f"thinking {asked}", said + where)


_SWITCHED = ("on", "off")


def _given(thinking: Thinking, reads: Reads) -> dict[str, object]:
    arguments = thinking_arguments(thinking, reads, Conversation(_ASKED))
    return {name: value for name, value in arguments.items() if name not in reads.history_switches}


def _opened(speech: Speech, arguments: dict[str, object]) -> str:
    text = _rendered(speech, _ASKED, arguments)
    return text[-_TAIL:] if len(text) <= _TAIL else "…" + text[-_TAIL:]


def _drawn(speech: Speech) -> Callable[..., str]:
    return lambda parts: draw(speech.family, parts)


def _read_back(speech: Speech) -> Iterator[Finding]:
    """Whether the family reads what the template writes: turns with known parts, rendered and read."""
    if speech.template.is_default or not (speech.family.forms or speech.family.reasoning):
        return
    trials = tried(speech.family, speech.template)
    wrong = [trial for trial in trials if not trial.agrees]
    if not trials:
        return
    found = f"{len(trials) - len(wrong)} of {len(trials)} turns that the template wrote"
    if not wrong:
        yield Finding("read back", found)
        return
    # A template may spell an earlier turn otherwise than its model; a family named by hand is rather the wrong one.
    by_hand = speech.why.startswith("by --") and any(trial.written.case in _PLAIN_CASES for trial in wrong)
    matter = f"read as something else: {_cases(wrong)}; the first is {_shown(wrong[0].written.text)}"
    cure = "see what the model itself writes: if this, the family is another (`singletree families draft TEMPLATE`)"
    yield Finding("read back", found, "wrong" if by_hand else "note", matter, cure)


_PLAIN_CASES = frozenset({"reasoning and text", "single"})


def _cases(trials: Iterable[Trial]) -> str:
    return ", ".join(trial.written.case for trial in trials)


def _tokens(speech: Speech, tokenizer: bool) -> Iterator[Finding]:
    off = ", ".join(sorted(speech.stability_off))
    on = len(stability.NAMED) - len(speech.stability_off)
    yield Finding("stability rules", f"{on} on" + (f"; off: {off}" if off else ""))
    if not tokenizer:
        yield Finding("tokens", "not looked at: a template has no vocabulary; give the model to see more")
        return
    yield _replayed(speech)
    fast = speech.tokenizer.accelerate()
    yield Finding("encoder", "a faster one with identical ids" if fast else "the checkpoint's own")
    yield _guarded(speech.tokenizer)
    window = speech.tokenizer.context_window
    if window is None:
        yield Finding("window", "not said", "note", "the engine's own limit holds", "--context-window N")
    else:
        yield Finding("window", f"{window} tokens")


def _replayed(speech: Speech) -> Finding:
    layout = speech.layout
    if layout is None:
        matter = "earlier turns go back as rendered, not by their own tokens: a respelled turn costs the engine's cache"
        cure = "give a template whose turns begin and end with added tokens: --chat-template FILE"
        return Finding("exact replay", "no: the template sets no turns apart", "note", matter, cure)
    return Finding("exact replay", f"between {_listed(layout.headers)} and {_listed(layout.ends)}")


def _guarded(tokenizer: Tokenizer) -> Finding:
    """Whether a client can write a special token."""
    broken = [
        text for text in tokenizer.special_tokens if tokenizer.added_tokens[text] in _ids(tokenizer, text)
    ]
    if not broken:
        return Finding("special tokens", f"{len(tokenizer.special_tokens)}; none can be written by a client")
    matter = f"text of a client that spells {_listed(sorted(broken)[:3])} is read as the token"
    return Finding(
        "special tokens",
        f"{len(broken)} unguarded",
        "wrong",
        matter,
        "report this model: it is a fault of singletree",
    )


def _ids(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    return tokenizer.encode(tokenizer.guard(text))


def _listed(texts: Iterable[str]) -> str:
    return " or ".join(map(_shown, texts))


def _shown(text: str) -> str:
    return text.replace("\n", "⏎")
