"""What ends a turn: a family's stop markers, and the tokens that end turns in any vocabulary."""

from __future__ import annotations

import re

import pytest

from singletree import families
from singletree.parsing.family import Family, markers
from singletree.prompts.tokenizer.added_tokens import AddedToken
from singletree.prompts.tokenizer.definition import END_OF_TURN_TOKENS, end_of_turn_ids

TABLE = families.table()
TOKEN = re.compile(r"<[^<> ]+>|\[e~\[|\[[A-Z/_]+\]")


def ends(texts: set[str], family: Family) -> set[str]:
    """Those of ``texts`` that end a turn of ``family``, in a vocabulary where each is a special token."""
    named = dict(enumerate(sorted(texts)))
    tokens = [AddedToken(id, text, special=True) for id, text in named.items()]
    return {named[id] for id in end_of_turn_ids(tokens, family.stop_markers, markers(family))}


def tokens_of(family: Family) -> set[str]:
    return {
        *TOKEN.findall("\n".join(markers(family))),
        *(marker.strip() for marker in family.dropped_markers),
    }


@pytest.mark.parametrize("family", TABLE, ids=lambda f: f.name)
def test_the_stop_markers_of_a_family_end_its_turns_and_its_other_markers_do_not(family: Family) -> None:
    assert ends(tokens_of(family), family) == set(family.stop_markers)


@pytest.mark.parametrize("family", TABLE, ids=lambda f: f.name)
def test_a_stop_marker_is_not_inside_a_turn(family: Family) -> None:
    pairs = [pair for pair in (family.reasoning, *family.also_reasoning) if pair]
    inside = [family.message_header, *family.also_text, *(marker for pair in pairs for marker in pair)]
    inside += [form.opener for form in family.forms] + list(family.text or ())
    assert not [marker for marker in family.stop_markers if any(marker in text for text in inside)]


def test_usual_tokens_end_a_turn_unless_the_format_writes_them_inside() -> None:
    plain = families.get("plain")
    assert ends({"<|im_end|>", "<|im_start|>", "<|eot_id|>"}, plain) == {"<|im_end|>", "<|eot_id|>"}
    closes = Family(name="acme", reasoning=("<|ponder|>", "<|eot_id|>"), stop_markers=("<|stop|>",))
    assert ends({"<|eot_id|>", "<|stop|>", "</s>"}, closes) == {"<|stop|>", "</s>"}


@pytest.mark.parametrize("end", ["<|end|>", "<|eom|>"])
def test_the_end_of_a_message_ends_no_turn_where_a_turn_is_several(end: str) -> None:
    plain = families.get("plain")
    assert end in END_OF_TURN_TOKENS
    assert ends({end, "<|assistant|>"}, plain) == {end}
    assert ends({end, "<|start|>"}, plain) == set()
    assert ends({end, "<|begin|>"}, plain) == set()


def test_only_special_tokens_end_a_turn() -> None:
    tag = AddedToken(1, "</s>", special=False)
    word = AddedToken(2, "<|stop|>", special=False)
    assert end_of_turn_ids([tag, word], ["<|stop|>"]) == frozenset()
