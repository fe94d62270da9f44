"""A session that one family wrote goes on in the template of another: its turns say the same there.

All ordered pairs: each family writes the session as its models do, its own parser reads it, and so it comes back from a
client. The template of every other family prints it, and the parser of that family reads the turns in its prompt.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from families.make_templates import ROLES
from families.sample_rows import EVERY_PLACE
from parsing.reading import EXAMPLES
from parsing.test_round_trip import as_written_by, generated_turns, is_nested
from prompts.template_sources import cached_template, collected, label
from singletree import families
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
from singletree.drafting import draft
from singletree.drafting.template_turns import TemplateTurns
from singletree.errors import BadConfiguration
from singletree.parsing.family import Family, markers, with_variant
from singletree.parsing.parser import parse
from singletree.parsing.render_turn import render_turn
from singletree.prompts.template.capabilities import thinking_arguments
from singletree.prompts.template.chat_template import ChatTemplate

FAMILIES = {family.name: family for family in families.table()}
SOURCES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in (Path(__file__).parent / "templates").glob("*.jinja")
}
"""Templates of our own, of all families that write calls."""
COLLECTED = {label(path): path for path in collected()}
WRITERS = len(FAMILIES) if EVERY_PLACE else 2
"""How many families write for each template, chosen by its name; ``SINGLETREE_EXAMPLES`` asks for all of them."""

KEPT: Mapping[tuple[int, ...], str] = {
    (0, 0, 0, 1): """
        axolotl/gemma4 axolotl/qwen3 axolotl/qwen3_5 dynamo/gemma4_tool
        llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use llama.cpp/GLM-4.6 llama.cpp/Kimi-K2-Thinking
        llama.cpp/MiniMax-M2 llama.cpp/Qwen-Qwen3-0.6B llama.cpp/Qwen3.5-4B llama.cpp/Reka-Edge
        llama.cpp/StepFun3.5-Flash llama.cpp/deepseek-ai-DeepSeek-V3.2 llama.cpp/google-gemma-4-31B-it
        llama.cpp/google-gemma-4-31B-it-interleaved llama.cpp/openai-gpt-oss-120b
        llama.cpp/upstage-Solar-Open-100B smg/kimi_k25 smg/minimax_m2 trl/gemma4
        trl/gemma4_v3 trl/gemma4_v4 trl/gemma4_v5 trl/glm4moe trl/qwen3 trl/qwen3_5_nothink vllm/qwen3
        vllm/qwen35
    """,
    (
        1,
        0,
        0,
        1,
    ): "llama.cpp/ggml-vocab-gemma-4.embedded llama.cpp/llama-cpp-deepseek-r1 trl/diffusion_gemma trl/gemma4_v2",
    (0, 0, 0, 0): """
        axolotl/exaone4 llama.cpp/Apriel-1.6-15b-Thinker-fixed llama.cpp/NVIDIA-Nemotron-Nano-v2
        llama.cpp/Qwen-QwQ-32B vllm/tool_chat_template_deepseekr1
    """,
}
"""How much reasoning of each turn of the session a template prints, where that is not all; by ``label``."""
KEPT_BY = {name: kept for kept, names in KEPT.items() for name in names.split()}

OTHER_CALLS = {
    "axolotl/llama4": "prints nothing between two calls",
    "llama.cpp/ByteDance-Seed-OSS": "prints an object as Python does",
    "llama.cpp/CohereForAI-c4ai-command-r-plus-tool_use": "refuses nested schemas without additionalProperties",
    "llama.cpp/openbmb-MiniCPM5-1B": "prints an object as Python does",
    "trl/deepseekv3": "prints the text and the opener of the first turn with calls only",
    "vllm/tool_chat_template_gemma3_pythonic": "prints several arguments without commas",
    "vllm/tool_chat_template_llama3.2_pythonic": "prints strings without quotes",
    "vllm/tool_chat_template_llama4_json": "prints nothing between two calls",
    "vllm/tool_chat_template_llama4_pythonic": "prints an object as Python does",
    "vllm/tool_chat_template_phi4_mini": "prints a call without its markers",
    "vllm/tool_chat_template_toolace": "prints strings without quotes",
}
"""Templates that print calls in another way than their model writes them, whoever wrote them."""

NESTED = {"where": {"path": "a b/c", "lines": [1, 2]}, "deep": [{"x": {"y": "z"}}], "n": 3}
CODE = {"code": 'if a < b:\n    print("é — 漢字 🌲", c)\n', "note": "it's 100% {ok} [1]"}
STRING, WHOLE = {"type": "string"}, {"type": "integer"}


def tool(name: str, **properties: object) -> Tool:
    return Tool(name, "does something", {"type": "object", "properties": properties})


TOOLS = (
    tool("read_file", path=STRING),
    tool(
        "run",
        where={"type": "object", "properties": {"path": STRING, "lines": {"type": "array", "items": WHOLE}}},
        deep={"type": "array", "items": {"type": "object"}},
        n=WHOLE,
        code=STRING,
        note=STRING,
    ),
    tool("now"),
)


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False), f"call{len(name)}{len(arguments)}xyz")


WRITTEN: Sequence[tuple[Part, ...]] = (
    (
        Reasoning("I look at “a” — naïvely, 漢字.\n\nTwo at once."),
        Text("Let me read both."),
        call("read_file", path="src/é.py"),
        call("run", **NESTED),
    ),
    (Reasoning("First."), Text("One."), call("now"), Reasoning("Second."), call("run", **CODE)),
    (Reasoning("I know all."), Text("Done: a < b, 5 > 3 & “so on”.")),
    (Reasoning("Once more."), call("read_file", path="b.py")),
)
"""What the model means to write, turn by turn."""


class Session(NamedTuple):
    """A conversation; ``around`` has the words before and after each turn of the assistant."""

    turns: tuple[Turn, ...]
    around: tuple[tuple[str, str], ...]

    @property
    def answers(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.role == "assistant"]


@cache
def session_of(writer: str) -> Session:
    """What a model of the family ``writer`` wrote, as a client gives it back; the server made the ids unique."""
    family = FAMILIES[writer]
    turns, around, last = [Turn("user", (Text("quser"),))], [], "quser"
    ids: set[str] = set()
    for number, meant in enumerate(WRITTEN):
        known = [part for part in meant if _writes(family, part)]
        text = render_turn(family, known)
        read = parse(family, text, TOOLS, prompt_tail=family.message_header or " ").parts
        assert meaning(read, family) == meaning(known, family), text
        named: list[Part] = []
        for part in read:
            if isinstance(part, ToolCall):
                id = part.id if part.id and part.id not in ids else f"call_{len(ids):024}"
                ids.add(id)
                part = replace(part, id=id, written_id="")
            named.append(part)
        turn = Turn("assistant", tuple(named))
        if not named:
            continue
        words = [f"qresult{number}x{i}" for i, _ in enumerate(turn.tool_calls)] or [f"quser{number}"]
        results = [ToolResult(c.id, (Text(w),)) for c, w in zip(turn.tool_calls, words, strict=False)]
        turns += [turn, Turn("tool", tuple(results)) if results else Turn("user", (Text(words[0]),))]
        around.append((last, words[0]))
        last = words[-1]
    return Session(tuple(turns), tuple(around))


def _writes(family: Family, part: Part) -> bool:
    return isinstance(part, Text) or bool(family.reasoning if isinstance(part, Reasoning) else family.forms)


def meaning(parts: Sequence[Part], reader: Family) -> list[tuple[str, object]]:
    """What the parts say to a model of the family ``reader``."""
    found: list[tuple[str, object]] = []
    for part in parts:
        if isinstance(part, ToolCall):
            assert part.complete
            found.append((f"call {part.name}", json.loads(part.arguments)))
        elif isinstance(part, Text | Reasoning) and part.text.strip() and _writes(reader, part):
            found.append((type(part).__name__, part.text.strip()))
    return found


def printed_turns(template: ChatTemplate, reader: Family, session: Session) -> Iterator[str]:
    """What stands in the prompt between the words around each turn of the assistant."""
    conversation = Conversation(session.turns, TOOLS)
    arguments = thinking_arguments(Thinking(), template.capabilities, conversation, default=Thinking())
    write = partial(render_turn, reader)
    prompt = template.render(conversation, render_parts=write, template_arguments=arguments)
    at = 0
    for before, after in session.around:
        at = prompt.index(before, at) + len(before)
        yield prompt[at : prompt.index(after, at)]


def writers(template: str) -> list[str]:
    return random.Random(template).sample(sorted(FAMILIES), WRITERS)


@pytest.mark.parametrize("reader", SOURCES)
def test_a_turn_says_the_same_in_the_template_of_another_family(
    reader: str, subtests: pytest.Subtests
) -> None:
    source = SOURCES[reader]
    family = with_variant(FAMILIES[reader], source)
    for writer in writers(reader):
        with subtests.test(writer):
            session = session_of(writer)
            printed = printed_turns(cached_template(source), family, session)
            for turn, text in zip(session.answers, printed, strict=True):
                own = _own_text(reader, family, text)
                read = parse(family, own, TOOLS, prompt_tail=family.message_header or " ").parts
                assert meaning(read, family) == meaning(turn.parts, family), own
                ids = [part.id for part in read if isinstance(part, ToolCall) and part.id]
                assert len(ids) == len({*ids}) or family.forms[0].id_format, own


def _own_text(name: str, family: Family, text: str) -> str:
    """The text of a turn, of what a template of our own prints between two messages that are not the assistant's."""
    whole = family.message_header, ""
    header, end = ROLES.get(name, whole if whole[0] else ("<|im_start|>assistant\n", "<|im_end|>\n"))
    own = text.removeprefix("<|im_end|>\n").rpartition("<|im_start|>")[0]
    assert own.startswith(header)
    assert own.endswith(end)
    return own.removeprefix(header).removesuffix(end)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_turn_says_the_same_in_the_template_of_another_family(data: st.DataObject) -> None:
    writer = FAMILIES[data.draw(st.sampled_from(sorted(FAMILIES)))]
    name = data.draw(st.sampled_from(sorted(SOURCES)))
    reader = with_variant(FAMILIES[name], SOURCES[name])
    parts, tools = as_written_by(writer, data.draw(generated_turns(is_nested(writer) or is_nested(reader))))
    words = [p.arguments if isinstance(p, ToolCall) else getattr(p, "text", "") for p in parts]
    marks = {mark.strip("[] \n") for family in (writer, reader) for mark in markers(family)}
    assume(parts and not any(len(mark) > 1 and mark in word for mark in marks for word in words))
    turn = Turn("assistant", tuple(parts))
    conversation = Conversation(
        (Turn("user", (Text("quser"),)), turn, Turn("user", (Text("qagain"),))), tuple(tools)
    )
    prompt = cached_template(SOURCES[name]).render(conversation, render_parts=partial(render_turn, reader))
    own = _own_text(name, reader, prompt.rpartition("quser")[2].rpartition("qagain")[0])
    read = parse(reader, own, tools, prompt_tail=reader.message_header or " ").parts
    assert _joined(meaning(read, reader)) == _joined(meaning(parts, reader)), own


def _joined(meant: Sequence[tuple[str, object]]) -> list[tuple[str, object]]:
    """With texts in a row as one, which they become where what stood between them is not written."""
    found: list[tuple[str, object]] = []
    for kind, words in meant:
        if kind == "Text" and found and found[-1][0] == kind:
            words = f"{found.pop()[1]}{words}"
        found.append((kind, "".join(words.split()) if kind == "Text" and isinstance(words, str) else words))
    return found


@cache
def _headers(source: str) -> Sequence[str]:
    """What the template may print before a turn of the assistant: no part of the turn itself."""
    turns, text = TemplateTurns(cached_template(source)).turns(), families.find(source).family.text
    headers = (turns.opened, draft.turn_header_of(turns))
    return [header for header in headers if header and header != (text or ("",))[0]]


def _after_header(source: str, text: str) -> tuple[str, str]:
    """The first header of an assistant in ``text``, the longest of those that begin there, and what follows it."""
    found = [(text.index(header), -len(header), header) for header in _headers(source) if header in text]
    header = min(found)[2] if found else ""
    return header or " ", text.partition(header)[2] if header else text


@pytest.mark.skipif(not COLLECTED, reason="the collection of chat templates is not here")
@pytest.mark.parametrize("name", [name for name in COLLECTED if name not in OTHER_CALLS])
def test_a_turn_says_the_same_in_the_template_of_another_model(name: str, subtests: pytest.Subtests) -> None:
    source = COLLECTED[name].read_text(encoding="utf-8")
    try:
        template = cached_template(source)
    except BadConfiguration as error:
        pytest.skip(error.message)
    family = families.find(source).family
    for writer in writers(name):
        with subtests.test(writer):
            session = session_of(writer)
            printed = list(printed_turns(template, family, session))
            if not family.forms:
                _check_texts(session, printed)
                continue
            kept = KEPT_BY.get(name, (1, 2, 1, 1))
            for number, (turn, text) in enumerate(zip(session.answers, printed, strict=True)):
                tail, own = _after_header(source, text)
                read = parse(family, own, TOOLS, prompt_tail=tail).parts
                _check_texts_and_calls(turn, read, family)
                if FAMILIES[writer].forms:  # Without calls, each turn is followed by words of the user.
                    thoughts = [part for part in turn.parts if _is_thought(part, family)]
                    found = [part for part in read if _is_thought(part, family)]
                    assert meaning(found, family) == meaning(thoughts if kept[number] else (), family), text


def _is_thought(part: Part, reader: Family) -> bool:
    return isinstance(part, Reasoning) and bool(reader.reasoning and part.text.strip())


def _check_texts_and_calls(turn: Turn, read: Sequence[Part], reader: Family) -> None:
    """Compare a turn with what is read of it, between headers of other turns, which are read as text."""
    assert meaning([part for part in read if isinstance(part, ToolCall)], reader) == meaning(
        turn.tool_calls, reader
    ), read
    texts = "".join(part.text for part in read if isinstance(part, Text))
    assert _in_order([part.text.strip() for part in turn.parts if isinstance(part, Text)], texts), read


def _check_texts(session: Session, printed: Sequence[str]) -> None:
    """A model without calls is shown those of another one as text."""
    for turn, text in zip(session.answers, printed, strict=True):
        wanted = [
            part.text.strip() if isinstance(part, Text) else f'{{"name": "{part.name}", "arguments": '
            for part in turn.parts
            if isinstance(part, Text | ToolCall)
        ]
        assert _in_order(wanted, text), text


def _in_order(wanted: Sequence[str], text: str) -> bool:
    at = 0
    for each in wanted:
        at = text.find(each, at)
        if at < 0:
            return False
    return True
