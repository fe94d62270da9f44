"""Where a remembered turn is set into a prompt, and where it is not."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from random import Random

import pytest

from prompts.conversations import call, result, turn
from prompts.template_sources import HERMES
from singletree import families
from singletree.conversation import Conversation, Part, Reasoning, Turn
from singletree.parsing.parser import parse
from singletree.parsing.render_turn import render_turn
from singletree.prompts.replay.splicing import splice
from singletree.prompts.replay.turn_memory import GeneratedTurn, GenerationPrompt
from singletree.prompts.replay.turn_places import TurnDelimiters, anchor_digest, anchor_of
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.prompts.template.turn_delimiters import find_turn_delimiters
from singletree.prompts.tokenizer.encode_prompt import TextSpan

FAMILY = families.get("qwen3")
LAYOUT = TurnDelimiters(("<A>", "<R>"), ("<E>",))
USER = turn("user", "How is it?")
IDS = array("I", [7, 8, 9])


def read(text: str, opened: str) -> Turn:
    return parse(FAMILY, text, (), opened)


def known(*parts: Part | str, opening: str = "", header: str = "<A>") -> GeneratedTurn:
    return GeneratedTurn(turn("assistant", *parts), GenerationPrompt(header, opening), IDS)


def spliced(
    text: str, turns: Sequence[Turn], recalled: dict[int, GeneratedTurn], layout: TurnDelimiters = LAYOUT
) -> list[str | array[int]]:
    pieces = splice(text, turns, recalled, layout, read).pieces
    return [piece.text_in(text) if isinstance(piece, TextSpan) else piece for piece in pieces]


def test_a_turn_stands_in_place_of_what_was_printed_of_it() -> None:  # C3
    answer = turn("assistant", "Fine.")
    text = "<U>How is it?<A><think>\n\n</think>\n\nFine.<E><U>Again<A>"
    again = spliced(text, [USER, answer, turn("user", "Again")], {1: known("Fine.", opening="<think>")})
    assert again == ["<U>How is it?<A><think>", IDS, "<E><U>Again<A>"]


@pytest.mark.parametrize("printed", ["Fine, thanks.", "Not fine.", ""])
def test_a_turn_that_says_something_else_stays_text(printed: str) -> None:
    text = f"<U>How is it?<A>{printed}<E>"
    assert spliced(text, [USER, turn("assistant", printed)], {1: known("Fine, so far.")}) == [text]


def test_a_turn_keeps_no_long_text_in_which_it_was_not_found() -> None:
    """The memory of turns counts no memo: each may be as long as a few words a token, and not as a prompt."""
    remembered, printed = known("Fine."), "Not fine. " * 1000
    text = f"<U>How is it?<A>{printed}<E>"
    for _ in range(2):
        assert spliced(text, [USER, turn("assistant", printed)], {1: remembered}) == [text]
    assert [argument for argument, _ in remembered.memo.values() if len(str(argument)) > 100] == []


def test_results_with_the_same_words_are_not_taken_for_a_turn() -> None:
    """A header that only a result's end stands for is found behind each result; all of them stay."""
    calling = turn("assistant", call(id="1"), call(id="2"))
    results = Turn("tool", (*result("Sunny.", "1").parts, *result("Sunny.", "2").parts))
    text = "<U>How is it?<A>f f<E>Sunny.<R>Sunny.<R>Fine.<E>"
    turns = [USER, calling, results, turn("assistant", "Fine.")]
    assert spliced(text, turns, {3: known("Fine.", header="<R>")}) == [
        "<U>How is it?<A>f f<E>Sunny.<R>Sunny.<R>",
        IDS,
        "<E>",
    ]


def test_a_turn_opened_behind_another_header_stays_text() -> None:
    text = "<U>How is it?<A>Fine.<E>"
    assert spliced(text, [USER, turn("assistant", "Fine.")], {1: known("Fine.", header="<R>")}) == [text]


def test_words_alone_are_enough_only_where_the_turn_is_sure_to_stand() -> None:
    """A call in a format that the family does not read; the tool's name stands in the system prompt as well."""
    calling = turn("assistant", call(id="1"))
    text = "<A>tools: f<E><U>How is it?<A>CALL f(k=1)<E>"
    sure = spliced(text, [USER, calling], {1: known(call(id="1"))})
    assert sure == ["<A>tools: f<E><U>How is it?<A>", IDS, "<E>"]
    unsure = [turn("user", "Something that is not printed so"), calling]
    assert spliced(text, unsure, {1: known(call(id="1"))}) == [text]


@pytest.mark.parametrize("tools", [0, 100, 100_000, 1_000_000])
def test_tools_of_any_length_can_stand_before_the_first_turn(tools: int) -> None:
    """They are no turn, and a template prints them anywhere before it."""
    head = f"<S>Be brief.{'a tool ' * (tools // 7)}<U>How is it?<A>"
    turns = [turn("system", "Be brief."), USER, turn("assistant", call(id="1"))]
    # A call in a format that the family does not read.
    assert spliced(f"{head}CALL f(k=1)<E>", turns, {2: known(call(id="1"))}) == [head, IDS, "<E>"]


def test_a_turn_of_several_messages_is_one() -> None:
    parts = (Reasoning("Why."), "Fine.")
    text = "<U>How is it?<A>Why.<E><A>Fine.<E><U>Again<A>"
    turns = [USER, turn("assistant", *parts), turn("user", "Again")]
    assert spliced(text, turns, {1: known(*parts)}) == ["<U>How is it?<A>", IDS, "<E><U>Again<A>"]


def test_turns_nobody_remembers_do_not_shift_the_others() -> None:
    turns = [USER, turn("assistant", "One."), turn("user", "More"), turn("assistant", "Two.")]
    text = "<U>How is it?<A>One.<E><U>More<A>Two.<E>"
    assert spliced(text, turns, {3: known("Two.")}) == ["<U>How is it?<A>One.<E><U>More<A>", IDS, "<E>"]


def test_the_open_turn_at_the_end_is_no_place() -> None:
    text = "<U>How is it?<A>One.<E><U>More<A>It is fi"
    turns = [USER, turn("assistant", "One."), turn("user", "More"), turn("assistant", "It is fi")]
    assert spliced(text, turns, {1: known("One."), 3: known("It is fine.")}) == [
        "<U>How is it?<A>",
        IDS,
        "<E><U>More<A>It is fi",
    ]


PLAIN = """\
{%- for m in messages %}{{ '\\n\\n' ~ m.role | upper }}: {{ m.content }}{{ ' DONE' if m.role == 'assistant' }}
{%- endfor %}{% if add_generation_prompt %}{{ '\\n\\nASSISTANT: ' }}{% endif %}"""
ALWAYS_OPEN = """\
{%- for m in messages %}<U>{{ m.content }}<E>{% if m.role == 'user' %}<A>{% endif %}{% endfor %}"""
BARE_RESULT = """\
{%- for m in messages %}
{%- if m.role == 'tool' %}<result>{{ m.content }}</result>{{ '\\n\\n' }}
{%- else %}{{ '<A>' if m.role == 'assistant' and (loop.first or loop.previtem.role != 'tool') }}{{ m.content }}
{%- for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}
{{- '<E>' if m.role == 'assistant' }}
{%- endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}<A>{% endif %}"""

BARE_CALL = """\
{%- for m in messages %}
{%- if m.role == 'tool' %}[{{ m.content }}]{% else %}{{ '<A>' if m.role == 'assistant' }}{{ m.content }}
{%- for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments }}</C>{% endfor %}
{{- '<E>' if m.role == 'assistant' and not m.tool_calls }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}<A>{% endif %}"""
"""Nothing but a bracket stands between a call and its result."""
INDENTED = """\
{% for m in messages %}
{{- '    <A>' if m.role == 'assistant' else '<U>' }}{{ m.content }}{{ '<E>' if m.role == 'assistant' }}
{%- endfor %}{% if add_generation_prompt %}{{ '  <A>' }}{% endif %}"""
"""Other white space before a turn that is asked for than before one that is over."""


@pytest.mark.parametrize(
    ("source", "tokens", "expected"),
    [
        (
            HERMES,
            ["<|im_start|>", "<|im_end|>"],
            TurnDelimiters(("<|im_start|>assistant\n",), ("<|im_end|>",)),
        ),
        (PLAIN, [], TurnDelimiters(("\n\nASSISTANT:",), (" DONE\n\nUSER: ",))),
        (ALWAYS_OPEN, ["<U>", "<A>", "<E>"], TurnDelimiters(("<A>", "<E>"), ("<E>",))),
        (BARE_RESULT, ["<A>", "<E>"], TurnDelimiters(("<A>", "</result>\n\n"), ("<E>",))),
        (BARE_CALL, ["<A>", "<E>", "</C>"], TurnDelimiters(("<A>",), ("<E>", "</C>["))),
        (INDENTED, ["<U>", "<A>", "<E>"], TurnDelimiters(("<A>",), ("<E>",))),
        ("{{ messages[-1].content }}", [], None),
    ],
    ids=["tokens", "plain", "always open", "bare result", "bare call", "indented", "none"],
)
def test_what_a_template_writes_around_a_turn(
    source: str, tokens: list[str], expected: TurnDelimiters | None
) -> None:
    template = ChatTemplate(source)
    assert find_turn_delimiters(template.render_messages, tokens, ["<E>"]) == expected


def test_what_is_opened_with_an_effort_alone_is_no_header() -> None:
    """Hunyuan 3 closes its reasoning at once unless an effort is given."""
    source = """\
{%- for m in messages %}{{ '<A><think>\\n' if m.role == 'assistant' else '<U>' }}{{ m.content }}<E>{% endfor %}
{%- if add_generation_prompt %}<A><think>{{ '' if effort == 'high' else '</think>' }}{% endif %}"""
    render = ChatTemplate(source).render_messages
    tokens = ["<A>", "<U>", "<E>", "<think>", "</think>"]
    silent, reported = (
        find_turn_delimiters(render, tokens, ["<E>"], settings) for settings in ([], [{"effort": "high"}])
    )
    assert silent == reported == TurnDelimiters(("<A><think>",), ("<E>",))


def test_words_rendered_in_a_family_of_channels_have_one_header() -> None:
    """The template names the channel of what it is given as content; so does the model."""
    source = """\
{%- for m in messages %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>
{{- m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
    family = families.get("gpt_oss")
    generated = turn("assistant", "Looking.", call(id="1"))
    text = ChatTemplate(source).render(
        Conversation((USER, generated, result(id="1"))), render_parts=partial(render_turn, family)
    )
    assert text.count("<|channel|>final<|message|>") == 1
    assert "<|start|>assistant<|channel|>final<|message|>Looking." in text


def asked(behind: str, header: str = "<A>") -> GeneratedTurn:
    """A turn that was said behind ``behind``, which stood behind the user's words."""
    opening = GenerationPrompt(header, "", behind, anchor_digest(anchor_of(USER)))
    return GeneratedTurn(turn("assistant", "Fine."), opening, IDS)


@pytest.mark.parametrize(
    ("then", "printed"),
    [("\n<E><A>", "<E>\n<A>"), ("<E><A>", "<E>\n\n<A>"), ("<E>\n<A>", "<E>\n<A>")],
    ids=["moved", "more", "same"],
)
def test_what_opened_a_turn_comes_back_as_it_was(then: str, printed: str) -> None:
    """Hermes' template has a line break behind the last result only once something follows."""
    text = f"<U>How is it?{printed}Fine.<E>"
    assert spliced(text, [USER, turn("assistant", "Fine.")], {1: asked(then)}) == [
        f"<U>How is it?{then}",
        IDS,
        "<E>",
    ]


def test_what_opened_a_turn_is_not_put_behind_other_words() -> None:
    other = turn("user", "Another question?")
    text = "<U>Another question?<E>\n<A>Fine.<E>"
    assert spliced(text, [other, turn("assistant", "Fine.")], {1: asked("<E><A>")}) == [
        "<U>Another question?<E>\n<A>",
        IDS,
        "<E>",
    ]


@pytest.mark.parametrize(
    "printed",
    ["<E></R>", "<E></R><A>", "<E>", "<E></think>"],
    ids=["same", "with a header", "less", "parts in a tag"],
)
def test_a_turn_that_no_header_opened_comes_back_behind_what_asked_for_it(printed: str) -> None:
    text = f"<U>How is it?{printed}Fine.<E>"
    assert spliced(text, [USER, turn("assistant", "Fine.")], {1: asked("<E></R>", header="")}) == [
        "<U>How is it?<E></R>",
        IDS,
        "<E>",
    ]


def test_what_opened_a_turn_takes_nothing_out_of_the_prompt() -> None:
    """Words between the question and the answer, which were not there when it was said, stay."""
    text = "<U>How is it?<E>A note.<A>Fine.<E>"
    assert spliced(text, [USER, turn("assistant", "Fine.")], {1: asked("<E><A>")}) == [
        "<U>How is it?<E>A note.<A>",
        IDS,
        "<E>",
    ]


@pytest.mark.parametrize("seed", range(60))
def test_what_lies_beyond_a_mark_does_not_change_it(seed: int) -> None:  # C41
    """Where the turns before a mark stand is told by the text up to its reach, whatever follows."""
    random = Random(seed)
    words = ["<A>", "<R>", "<E>", "<E><A>", "\n", "Fine.", "Sunny today.", "How is it?", "Not so fine."]
    text = "".join(random.choices(words, k=30))
    answers = random.choices(["Fine.", "Not so fine.", "Fine.<E>\n<A>Fine."], k=6)
    turns = [
        t for a in answers for t in (random.choice([USER, result("Sunny today.")]), turn("assistant", a))
    ]
    recalled = {i: known(str(turns[i].text), header="") for i in range(1, 12, 2) if random.random() < 0.8}
    for end in range(0, len(text), 3):
        cut = splice(text[:end], turns, recalled, LAYOUT, read)
        whole = splice(text, turns, recalled, LAYOUT, read)
        certain = [point for point in cut.points if point.reach <= end]
        assert whole.points[: len(certain)] == certain
        for point in certain:
            rest = splice(text, turns, recalled, LAYOUT, read, begin=point)
            assert whole.pieces[point.pieces :] == rest.pieces
            assert whole.points[-len(rest.points) :] == rest.points or not rest.points
