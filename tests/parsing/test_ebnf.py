"""Grammars in EBNF: told from Lark, checked, and taken as they are meant. The oracle is LLGuidance."""

from __future__ import annotations

from contextlib import suppress

import pytest
from llguidance import LLMatcher, LLTokenizer

from parsing.asking import BAD_PATCH, GOOD_PATCH, PATCH
from singletree import families
from singletree.constraints.constrain import require_format, to_constraint
from singletree.constraints.expression import Grammar, NotExpressible, lark, structural_tag
from singletree.constraints.grammars import check_ebnf, syntax_of, to_ebnf, to_lark
from singletree.conversation import ResponseFormat
from singletree.errors import InvalidRequest

BYTES = LLTokenizer("byte")
QWEN3, PLAIN = families.get("qwen3"), families.get("plain")


def takes(grammar: str, text: str) -> bool:
    assert not LLMatcher.validate_grammar(grammar, BYTES), LLMatcher.validate_grammar(grammar, BYTES)
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    return bool(matcher.consume_tokens(BYTES.tokenize_bytes(text.encode()))) and matcher.is_accepting()


GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    ('root ::= "yes" | "no"', ["yes", "no"], ["maybe", "yesno", ""]),
    ('root ::= [0-9]+ ("-" [0-9]{4})?', ["12", "12-3456"], ["", "a", "12-345"]),
    ('root ::= word " " word\nword ::= [a-z]+', ["ab c"], ["ab", "ab  c"]),
    (
        'root ::= word "b"  # the last letter belongs to the rule behind\nword ::= [a-z]+',
        ["ab", "bbb"],
        ["a"],
    ),
    ('root ::= (pair\n  | "none")\npair ::= "(" root ")"\n', ["none", "((none))"], ["(none"]),
    (r'root ::= "\"" [^"\\/[\]]* "\"" "\n"', ['"a b"\n'], ['"a/b"\n', '"a[b"\n']),
    (r'root ::= "\x41\u00e9" .', ["Aé\n", "Aéx"], ["Aé", "A"]),
    ('root ::= "a" | \nnext-one\nnext-one ::= "b" (| "c")', ["a", "b", "bc"], ["", "c"]),
    ('camelCase ::= "x"\nroot ::= camelCase{2,3}', ["xx", "xxx"], ["x", "xxxx"]),
    ("root ::= [a-c&~-]+", ["a-b&~c"], ["d"]),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), GRAMMARS)
def test_takes_what_the_grammar_generates(grammar: str, good: list[str], bad: list[str]) -> None:
    assert syntax_of(grammar) == "ebnf"
    form = ResponseFormat(grammar=grammar, schema_at="ebnf")
    alone = lark(require_format(PLAIN, form, thinking="over", parallel=True))
    thinks = lark(require_format(QWEN3, form, thinking="possible", parallel=True))
    for text in good:
        assert takes(alone, text), text
        assert takes(thinks, text), text
        assert takes(thinks, f"<think>\nso\n</think>\n\n{text}"), text
    for text in bad:
        assert not takes(alone, text), text


def test_each_engine_gets_it_in_its_own_format() -> None:
    grammar = 'root ::= "a"'
    expression = require_format(PLAIN, ResponseFormat(grammar=grammar), thinking="over", parallel=True)
    assert expression == Grammar(grammar, "ebnf")
    assert to_constraint(expression, "gbnf", {}) == grammar
    assert structural_tag(expression)["format"] == {"type": "grammar", "grammar": grammar}
    thinks = require_format(QWEN3, ResponseFormat(grammar=grammar), thinking="open", parallel=True)
    assert to_constraint(thinks, "gbnf", {}) is None, (
        "the thought before it stands in no grammar of the client's"
    )
    assert {"type": "grammar", "grammar": grammar} in structural_tag(thinks)["format"]["elements"]


WRONG: list[tuple[str, str]] = [
    ('start ::= "a"', "no rule 'root'"),
    ('root ::= "a', "line 1 has a syntax error"),
    ('root ::= "a"\nword ::= [a-z', "line 2 has a syntax error"),
    ("root ::= word", "'word', which 'root' refers to"),
    ('root ::= ("a"', "not balanced"),
    ('root ::= "a")', "not balanced"),
    ('root ::= "a"\nroot ::= "b"', "twice"),
    ("root ::= * [a-z]", "there is nothing before '*'"),
    ('"a"\nroot ::= "b"', "begin with a rule"),
]


@pytest.mark.parametrize(("grammar", "words"), WRONG)
def test_what_is_no_grammar_is_refused_by_path(grammar: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_ebnf(grammar, "guided_grammar")
    assert refused.value.param == "guided_grammar"
    assert words in refused.value.message


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_grammar_that_is_cut_anywhere_is_read_or_refused(cut: int) -> None:
    grammar = 'root ::= word (" " word){0,3}\nword ::= [a-z\\]]+ | "\\"" # x\n'
    with suppress(InvalidRequest):
        check_ebnf(grammar[:cut], "ebnf")


def test_lark_is_distinguished_from_ebnf() -> None:
    assert syntax_of('start: "a" ("::=")?') == "lark"
    form = ResponseFormat(grammar='start: "a" b\nb: /[0-9]+/')
    grammar = lark(require_format(QWEN3, form, thinking="open", parallel=True))
    assert takes(grammar, "so\n</think>\n\na12")


LARK: list[tuple[str, list[str], list[str]]] = [
    (
        'start: "a" [B] "z" | c~2..3 -> named\nB: "0".."4"\n!c: "\\u00e9\\n" // end',
        ["az", "a4z", "é\né\n"],
        ["a5z", "é\n"],
    ),
    (
        "?start: /(.+)/ LF | LF /[^\\]\\d-]*\\.\\S{2,}/\n%import common.LF",
        ["a b\n", "\na.bc"],
        ["\n", "\n1.bc", "\na.b"],
    ),
    (r"start: _x+" + "\n" + r'_x: /\/(?:a|b\t)?\[/ "\""', ['/a["', '/["/b\t["'], ["/c["]),
    ('start: pair | \npair: "(" start ")"', ["", "(())"], ["(()"]),
    (PATCH, [GOOD_PATCH, GOOD_PATCH + "\n"], [BAD_PATCH]),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), LARK)
def test_lark_becomes_ebnf_that_takes_the_same(grammar: str, good: list[str], bad: list[str]) -> None:
    converted = to_ebnf(grammar)
    assert converted is not None
    check_ebnf(converted, "grammar")
    for text in (*good, *bad):
        assert takes(grammar, text) is takes(to_lark(converted), text) is (text in good), text
    assert structural_tag(Grammar(grammar))["format"] == {"type": "grammar", "grammar": converted}


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a"i',
        "start: /a(?=b)/",
        r"start: /a\b/",
        "start: /a/i",
        "start.2: /a/",
        "start: /a*?b/",
        "start: /[\\D]/",
        'start: "a" b',
        'start: ("a"',
        '%ignore " "\nstart: "a"',
        "%import common.ESCAPED_STRING\nstart: ESCAPED_STRING",
        "start: %json {}",
        "start: <think>",
        "start[lazy]: /a*/",
        'begin: "a"',
    ],
)
def test_lark_that_ebnf_cannot_express_goes_to_no_xgrammar(grammar: str) -> None:
    assert to_ebnf(grammar) is None
    with pytest.raises(NotExpressible):
        structural_tag(Grammar(grammar))


def test_half_a_character_is_replaced_in_both_notations() -> None:
    for converted in (to_ebnf(r'start: "\ud800"'), to_lark(r'root ::= "\ud800"')):
        assert converted is not None
        assert "\ufffd" in converted
        assert converted.encode()


@pytest.mark.parametrize("cut", range(len(PATCH)))
def test_lark_that_is_cut_anywhere_is_converted_or_not(cut: int) -> None:
    converted = to_ebnf(PATCH[:cut])
    if converted is not None:
        check_ebnf(converted, "grammar")


CHOICES = ("yes", "yesterday", "a|b", "(c)", "d/e\n")


@pytest.mark.parametrize("text", CHOICES)
def test_choices_are_taken_letter_by_letter(text: str) -> None:
    grammar = lark(require_format(QWEN3, ResponseFormat(choices=CHOICES), thinking="over", parallel=True))
    assert takes(grammar, text)
    assert not takes(grammar, text + "x")
    assert not takes(grammar, "a")


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\d{3}-\d{4}$", "555-1234", "x555-1234"),
        (r"(red|green)/[ab]+", "red/a", "red"),
        (r"cost: \$", "cost: $", "cost: "),
        (r"[$^]x", "$x", "x"),
        (r"a|b$", "b", "ab"),
    ],
)
def test_a_pattern_holds_for_the_whole_text(pattern: str, good: str, bad: str) -> None:
    grammar = lark(require_format(PLAIN, ResponseFormat(pattern=pattern), thinking="over", parallel=True))
    assert takes(grammar, good)
    assert not takes(grammar, bad)


@pytest.mark.parametrize("pattern", ["(", "(?=a)b", r"\bword\b", "a^b", r"(^a)", r"\Aa\Z", r"(a)\1"])
def test_a_pattern_that_cannot_be_held_to_is_refused_by_path(pattern: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        require_format(
            PLAIN, ResponseFormat(pattern=pattern, schema_at="regex"), thinking="over", parallel=True
        )
    assert refused.value.param == "regex"
