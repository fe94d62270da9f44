"""Places of pictures in a prompt, and what they take of it."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from singletree.conversation import Image
from singletree.engines.engine import Chunk
from singletree.pictures import FIRST_PICTURE_NUMBER, Picture, PromptPicture, comparable_tokens
from singletree.prompts.template.pictures import place_pictures, positions_of
from singletree.server.models.chat_format import Eyes, known_length, learn_counts, without_expansion

PAD = 257


def eyes() -> Eyes:
    return Eyes(PAD, "", frozenset())


def placed(*positions: int, keys: str = "abcdef") -> tuple[PromptPicture, ...]:
    return tuple(
        PromptPicture(at, PAD, key * 64, "image/png", b"") for at, key in zip(positions, keys, strict=False)
    )


@given(st.lists(st.sampled_from([0, 1, 255, 256, PAD, 257 << 8, 1 << 8 | 1 << 16, 2**31])))
def test_positions_are_those_of_whole_tokens(ids: list[int]) -> None:
    assert positions_of(array("I", ids), PAD) == [at for at, id in enumerate(ids) if id == PAD]


def test_pictures_are_placed_in_order_or_not_at_all() -> None:
    found = {key: Picture(key, "image/png", key.encode()) for key in ("a", "b")}
    shown = [Image(key="a"), Image(key="b"), Image(key="a")]
    ids = array("I", [1, PAD, PAD, 2, PAD])
    pictures = place_pictures(PAD, ids, shown, found)
    assert pictures is not None
    assert [(p.position, p.key, p.data) for p in pictures] == [(1, "a", b"a"), (2, "b", b"b"), (4, "a", b"a")]
    assert place_pictures(PAD, ids[:-1], shown, found) is None
    assert place_pictures(PAD, ids + ids, shown, found) is None
    assert place_pictures(PAD, ids, [*shown[:2], Image(key="c")], found) is None
    assert place_pictures(PAD, ids, [], found) == ()


def test_a_comparable_prompt_differs_at_its_picture_alone() -> None:
    ids = array("I", [1, PAD, 2, PAD])
    one, other = (comparable_tokens(ids, placed(1, 3, keys=keys)) for keys in ("ab", "ac"))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, True, False]
    assert one[1] >= FIRST_PICTURE_NUMBER
    assert list(ids) == [1, PAD, 2, PAD], "the prompt itself stays as it is"
    assert comparable_tokens(ids, ()) is ids


def test_counts_are_learned_from_the_whole_or_from_each() -> None:
    seen, pictures = eyes(), placed(1, 3, keys="ab")
    learn_counts(seen, 10, pictures, Chunk((), prompt_tokens=10 + 15 + 3, picture_tokens=[16, 4]))
    assert known_length(seen, 10, pictures) == 28
    third = placed(1, 3, 5, keys="abc")
    assert known_length(seen, 10, third) == 28
    learn_counts(seen, 10, third, Chunk((), prompt_tokens=10 + 15 + 3 + 7))
    assert known_length(seen, 10, third) == 35
    unknown, two = eyes(), placed(1, 3, keys="xy")
    learn_counts(unknown, 10, two, Chunk((), prompt_tokens=40))
    assert known_length(unknown, 10, two) == 10, (
        "what two unknown pictures take together says nothing about each"
    )


def test_cached_tokens_are_reported_in_ids() -> None:
    seen, pictures = eyes(), placed(2, 4, keys="ab")
    learn_counts(seen, 8, pictures, Chunk((), prompt_tokens=8 + 2 + 3, picture_tokens=[3, 4]))
    # Read as: 0 1 [a a a] 3 [b b b b] 5 6 7
    found = [without_expansion(seen, pictures, tokens) for tokens in range(14)]
    assert found == [0, 1, 2, 2, 2, 3, 4, 4, 4, 4, 5, 6, 7, 8]
    assert without_expansion(None, (), 5) == 5
