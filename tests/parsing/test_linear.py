"""Whatever a model repeats, and wherever: the work is linear in the text, and what is held back is bounded."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from parsing.ambiguity import ambiguous
from parsing.counting_characters import Count, count_patterns
from singletree import families
from singletree.conversation import Reasoning, Text, Tool, ToolCall
from singletree.events import Event, TextDelta, fold
from singletree.parsing import compiled
from singletree.parsing.arguments import coercion, json_arguments, literal_arguments, tag_parameters
from singletree.parsing.family import Family, markers
from singletree.parsing.parser import Parser
from singletree.parsing.patterns import LONGEST_MARKUP
from singletree.parsing.render_turn import render_turn

LENGTH = int(os.environ.get("SINGLETREE_REPEATED", "192"))
"""How many characters are repeated, whole; 100,000 for a night's run."""

PER_CHARACTER = 40
"""How many calls, and characters looked at, one more character of a text may cost."""

PER_LITERAL_CHARACTER = 60
"""The same in families whose arguments are literals: of Python's, an opening brace takes 52."""

PER_TOKEN = 150
"""The same for a character that comes alone."""

HELD = LONGEST_MARKUP + 4096 + 256
"""How much text may be held: markup, or an atom of Python's literals."""

KINDS = (
    "hermes",
    "kimi_k2",
    "qwen3_coder",
    "glm47",
    "deepseek_v4",
    "minimax_m3",
    "pythonic",
    "gemma4",
    "lfm2",
    "gpt_oss",
)
TYPES = {"s": {"type": "string"}, "n": {"type": "number"}, "o": {"type": "object"}}
TOOLS = (Tool("f", parameters={"properties": TYPES}),)


def positions(family: Family) -> list[str]:
    """A turn of the family, cut off at every kind of place."""
    call = ToolCall("f", '{"s": "word", "n": 17, "o": {"k": "v"}}', "functions.f:0")
    calls = render_turn(family, [call, call]) if family.forms else ""
    thought = render_turn(family, [Reasoning("thought"), Text("said")]) if family.reasoning else "said"
    marks = [m for form in family.forms for m in (form.opener, form.calls[0]) if m]
    begun = [calls[: at + n] for word, n in PLACES for at in [calls.find(word)] if at >= 0]
    half = calls[: len(calls) // 2]
    return list(
        dict.fromkeys(["", thought[: thought.find("thought") + 4], *marks, *begun, half, half + "\n", calls])
    )


PLACES = (("f", 0), ("f", 1), ("s", 0), ("word", 0), ("word", 4), ("17", 0), ("17", 2), ("k", 0), ("v", 1))


def fillers(family: Family) -> Iterator[str]:
    yield from (" ", "\n", "\t", '"', "'", "1", "{", "}", "<", "[", "]", "(", ",", "\\", "`", ' "', "\\n")
    yield from dict.fromkeys(m.strip()[:-1] for m in markers(family) if len(m.strip()) > 1)


def spend(family: Family, begun: str, pieces: list[str], count: Count) -> int:
    """Read ``begun`` and then ``pieces``; return the most that was held."""
    parser = Parser(family, TOOLS, family.message_header or " ")
    parser.feed(begun)
    held = 0
    with count.running():
        for piece in pieces:
            parser.feed(piece)
            held = max(held, len(parser._held) + len(parser._blanks))
        parser.close()
    return held


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Iterator[Count]:
    compiled._compiled.cache_clear()
    literal_arguments._closing.cache_clear()
    yield count_patterns(monkeypatch)
    compiled._compiled.cache_clear()
    literal_arguments._closing.cache_clear()


def repeated(filler: str, length: int) -> str:
    return (filler * (length // len(filler) + 1))[:length]


@pytest.mark.parametrize("family", families.table(), ids=lambda f: f.name)
def test_a_text_that_repeats_costs_what_it_is_long(family: Family, count: Count) -> None:
    each = PER_LITERAL_CHARACTER if any(form.literals for form in family.forms) else PER_CHARACTER
    for begun in positions(family):
        for filler in fillers(family):
            text = repeated(filler, LENGTH)
            spend(family, begun, [text], count)
            assert count.work <= each * (LENGTH + len(begun)) + 2000, (begun, filler)
    near = {rf"(?:{form.behind})\Z" for form in family.forms}  # These see a few characters only.
    for pattern, methods in count.used.items():
        assert pattern.pattern in near or not ambiguous(pattern, searched="search" in methods), (
            pattern.pattern
        )


@pytest.mark.parametrize("name", KINDS)
def test_each_token_costs_the_same_however_much_is_held(name: str, count: Count) -> None:
    family = families.get(name)
    for begun in positions(family):
        for filler in (" ", "\n", '"', "1", "{", "<", *list(fillers(family))[-2:]):
            length = LENGTH // 2
            held = spend(family, begun, list(repeated(filler, length)), count)
            assert count.work <= PER_TOKEN * (length + len(begun)) + 2000, (begun, filler)
            assert held <= HELD


def read(family: Family, pieces: list[str]) -> list[Event]:
    parser = Parser(family, TOOLS, family.message_header or " ")
    return [event for piece in pieces for event in parser.feed(piece)] + parser.close()


@pytest.mark.parametrize("spaces", [LONGEST_MARKUP - 200, LONGEST_MARKUP, 5000])
@pytest.mark.parametrize("name", KINDS)
def test_white_space_in_markup_is_the_same_whole_and_in_pieces(name: str, spaces: int) -> None:
    family = families.get(name)
    call = render_turn(family, [ToolCall("f", '{"s": "word"}', "functions.f:0")])
    for begun in positions(family):
        if not call.startswith(begun):
            continue
        text = begun + " " * spaces + call[len(begun) :]
        whole = read(family, [text])
        assert fold(whole) == fold(read(family, list(text)))
        assert "".join(event.raw for event in whole) == text


def test_a_call_with_too_much_white_space_is_text() -> None:
    for spaces, is_call in ((500, True), (5000, False)):
        text = "<tool_call>" + "\n" * spaces + '{"name": "f", "arguments": {}}</tool_call>'
        turn = fold(read(families.get("hermes"), [text]))
        assert bool(turn.tool_calls) is is_call
        assert is_call or "".join(p.text for p in turn.parts if isinstance(p, Text)) == text


def test_what_is_held_until_it_is_whole_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (json_arguments, tag_parameters):
        monkeypatch.setattr(module, "LONGEST_VALUE", 1000)
    begun = '<tool_call>{"arguments": {"s": "'
    events = read(families.get("hermes"), [begun, *("x" * 100 for _ in range(20))])
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == begun + "x" * 2000
    begun = "<tool_call>\n<function=f>\n<parameter=o>\n"
    text = [begun, '{"k": "', *("x" * 100 for _ in range(20)), '"}\n</parameter>\n</function>\n</tool_call>']
    parser = Parser(families.get("qwen3_coder"), TOOLS)
    early = [e for piece in text[:-1] for e in parser.feed(piece)]
    assert sum(len(e.raw) for e in early) >= len("".join(text[:-1])) - 200
    turn = fold([*early, *parser.feed(text[-1]), *parser.close()])
    assert turn.tool_calls[0].arguments == '{"o": "{\\"k\\": \\"' + "x" * 2000 + '\\"}"}'


def test_a_number_that_is_none_costs_what_it_is_long(count: Count) -> None:
    assert coercion.to_json("1" * 100_000 + "x", {"number"}).startswith('"1')
    assert all(not ambiguous(pattern) for pattern in count.used)


@pytest.mark.parametrize(("name", "begun"), [("lfm2", "<|tool_call_start|>[f(s="), ("pythonic", "[f(s=")])
def test_brackets_in_any_number_around_a_string_with_quotes_raise_nothing(name: str, begun: str) -> None:
    for depth in (10, 100, 3000):
        text = begun + "[" * depth + "'a'b' c'" + "]" * depth + ")]"
        assert "".join(e.raw for e in read(families.get(name), [text])) == text


def test_a_name_nested_as_deep_as_python_reads_raises_nothing() -> None:
    for depth in range(800, 1000, 7):
        text = '<tool_call>{"name": ' + "[" * depth + "]" * depth + ', "arguments": {}}</tool_call>'
        assert not fold(read(families.get("hermes"), [text])).tool_calls


def test_a_schema_that_refers_to_itself_is_read_once() -> None:
    schema = {
        "anyOf": [{"$ref": "#"}] * 12,
        "properties": {"s": {"type": "integer", "anyOf": [{"$ref": "#"}] * 12}},
    }
    assert coercion.property_names(schema) == {"s"}
    assert coercion.parameter_types(schema, "s") == {"integer", "object"}


JSON_CALLS = [f for f in families.table() if f.forms and f.forms[0].is_json and not f.forms[0].unmarked]


@pytest.mark.parametrize("family", JSON_CALLS, ids=lambda f: f.name)
def test_a_call_in_doubled_braces_is_that_call(family: Family) -> None:
    call = ToolCall("f", '{"s": "{{word}}"}', "abcdefghi")
    form = family.forms[0]
    doubled = render_turn(family, [call]).replace(call.arguments, "ARGUMENTS")
    at, ends = doubled.index('{"'), doubled.rindex("}")
    doubled = f"{doubled[:at]}{{{doubled[at:ends]}}}{doubled[ends:]}".replace("ARGUMENTS", call.arguments)
    for pieces in ([doubled], list(doubled)):
        turn = fold(read(family, pieces))
        assert [(c.name, c.arguments, c.complete) for c in turn.tool_calls] == [("f", call.arguments, True)]
        assert not any(isinstance(p, Text) for p in turn.parts), form


def test_doubled_braces_in_the_arguments_are_not_mended() -> None:
    text = '<tool_call>{{"name": "f", "arguments": {{"s": "x"}}}}</tool_call>'
    turn = fold(read(families.get("hermes"), [text]))
    assert turn.parts == (Text(text),)


@pytest.mark.parametrize("space", [" ", "", "Ġ"])
def test_the_space_in_a_tag_of_minicpm5_may_be_damaged(space: str) -> None:
    text = f'<function{space}name="f"><param{space}name="s">x</param><param name="n">7</param></function>'
    for pieces in ([text], list(text)):
        turn = fold(read(families.get("minicpm5"), ["</think>\n", *pieces]))
        assert [(c.name, c.arguments) for c in turn.tool_calls] == [("f", '{"s": "x", "n": 7}')]
        assert not any(isinstance(p, Text) for p in turn.parts)
