"""Capsules: what was sealed is opened, and nothing else is."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from singletree.errors import BadConfiguration
from singletree.prompts.replay.turn_memory import GenerationPrompt
from singletree.server import capsules as sealing
from singletree.server.capsules import (
    PREFIX,
    Capsules,
    Span,
    Tampered,
    load_capsules,
    model_fingerprint,
    parse_keys,
)
from singletree.server.models.catalog import load_models
from singletree.server.settings.config import Config

from .serving import TEMPLATE, TOKENIZER
from .test_config import read

KEY, OTHER = b"k" * 32, b"o" * 32
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
OPENING = GenerationPrompt(
    "<|im_start|>assistant\n", "<think>\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n", "0" * 16
)
SPAN = Span(b"the turn", 0, False, OPENING, array("I", [1, 151_667, 65_536, 198]))


def capsules(*keys: bytes, of: bytes = b"model", **more: Any) -> Capsules:
    return Capsules(keys or (KEY,), of, **more)


spans = st.builds(
    Span,
    turn=st.binary(min_size=8, max_size=8),
    index=st.integers(0, 1000),
    is_last=st.booleans(),
    opening=st.builds(GenerationPrompt, *[st.text(max_size=64)] * 4),
    token_ids=st.lists(st.integers(0, 2**24 - 1)).map(lambda ids: array("I", ids)),
)


@given(spans)
def test_what_was_sealed_is_opened(span: Span) -> None:  # C34
    assert capsules().open(capsules().seal(span)) == span


def test_every_changed_bit_is_noticed() -> None:  # C34
    """A change of the beginning makes it another server's; any other is known as one."""
    whole = capsules().seal(SPAN)
    data = base64.urlsafe_b64decode(whole[len(PREFIX) :] + "==")
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        text = PREFIX + base64.urlsafe_b64encode(changed).rstrip(b"=").decode()
        if bit < 32:  # the key's id: of a key that is not ours
            assert capsules().open(text) is None
        else:
            with pytest.raises(Tampered):
                capsules().open(text)


def test_every_changed_character_is_noticed() -> None:  # C34
    whole = capsules().seal(SPAN)
    for at in range(len(whole)):
        other = ALPHABET[(ALPHABET.find(whole[at]) + 1) % 64]
        opened: Span | None = None
        try:
            opened = capsules().open(whole[:at] + other + whole[at + 1 :])
        except Tampered:
            assert at >= len(PREFIX)
        assert opened is None


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: whole[:-1],
        lambda whole: whole[:-4],
        lambda whole: whole + "A",
        lambda whole: whole + "=",
        lambda whole: whole + " ",
        lambda whole: whole[: len(PREFIX)],
        lambda whole: whole[: len(PREFIX) + 30],
        lambda whole: PREFIX + "é" * 60,
        lambda whole: PREFIX + "\ud800" * 60,
        lambda whole: whole + "A" * (8 * 2**20),
        lambda whole: whole + whole,
    ],
)
def test_what_was_cut_or_grew_is_noticed(change: Callable[[str], str]) -> None:
    with pytest.raises(Tampered):
        capsules().open(change(capsules().seal(SPAN)))


@pytest.mark.parametrize(
    "foreign", ["", "erased", "EqQBCkgIARABGAIiQL", "gAAAAABo" * 40, "singletree2.AAAA", "\ud800"]
)
def test_what_another_server_gave_is_no_matter(foreign: str) -> None:  # C37
    assert capsules().open(foreign) is None


def test_another_model_or_key_opens_nothing() -> None:
    whole = capsules().seal(SPAN)
    assert capsules(of=b"another").open(whole) is None
    assert capsules(OTHER).open(whole) is None


def test_the_first_key_seals_and_all_open() -> None:
    old, new = capsules(KEY), capsules(OTHER, KEY)
    assert new.open(old.seal(SPAN)) == SPAN
    assert old.open(new.seal(SPAN)) is None


def test_no_two_are_alike() -> None:
    one = capsules(salt=b"s" * 16)
    assert len({one.seal(SPAN) for _ in range(100)}) == 100
    assert capsules(salt=b"s" * 16).seal(SPAN) == capsules(salt=b"s" * 16).seal(SPAN)
    assert capsules().seal(SPAN) != capsules().seal(SPAN)


def test_it_reports_nothing() -> None:
    text = array("I", b"attack at dawn" * 20)
    data = base64.urlsafe_b64decode(capsules().seal(Span(b"the turn", 0, True, OPENING, text))[12:] + "==")
    assert b"dawn" not in data
    assert b"think" not in data


@settings(max_examples=20)
@given(st.integers(0, 3000))
def test_it_grows_with_its_span_alone(tokens: int) -> None:
    ids = array("I", [(i * 7919) % 50_000 for i in range(tokens)])
    sealed = capsules().seal(Span(b"the turn", 900, False, GenerationPrompt(), ids))
    assert len(sealed) < 130 + 4 * tokens


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even under our own key no more is unpacked than the count says."""
    many = Span(b"the turn", 0, True, GenerationPrompt(), array("I", bytes(4 * 2**20)))
    assert len(capsules().seal(many)) < 10_000
    monkeypatch.setattr(sealing, "_MAX_TOKENS", 1000)
    assert capsules().seal(many) == ""
    monkeypatch.undo()
    sealed = capsules().seal(many)
    monkeypatch.setattr(sealing, "_MAX_TOKENS", 1000)
    with pytest.raises(Tampered):
        capsules().open(sealed)


@pytest.mark.parametrize(
    "text",
    [
        KEY.hex(),
        KEY.hex().upper(),
        f" {KEY.hex()}\n",
        base64.b64encode(KEY).decode(),
        base64.b64encode(KEY).decode().rstrip("="),
    ],
)
def test_a_key_is_read(text: str) -> None:
    assert parse_keys([text]) == (KEY,)


def test_both_alphabets_of_base64_are_read() -> None:
    key = bytes(range(224, 256))
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        assert parse_keys([encode(key).decode()]) == (key,)


def test_a_passphrase_makes_a_key() -> None:
    first, second, again = parse_keys(
        ["correct horse battery", "correct horse batterz", "correct horse battery"]
    )
    assert len(first) == 32
    assert first == again != second


def test_a_short_passphrase_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="has 6 characters; give 32 bytes in base64 or hex"):
        parse_keys(["secret"])


def test_without_a_key_each_process_has_its_own() -> None:
    one, two = (load_capsules((), b"model", strict=False, report=print) for _ in range(2))
    assert one is not None
    assert two is not None
    assert one.open(one.seal(SPAN)) == SPAN
    assert two.open(one.seal(SPAN)) is None


def test_without_the_package_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    sealing._cipher.cache_clear()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    lines: list[str] = []
    assert load_capsules((), b"model", strict=True, report=lines.append) is None
    assert len(lines) == 1
    assert "pip install cryptography" in lines[0]


def test_different_models_have_different_fingerprints() -> None:
    here = model_fingerprint("m", TOKENIZER, TEMPLATE.source)
    assert here == model_fingerprint("m", TOKENIZER, TEMPLATE.source)
    assert here != model_fingerprint("n", TOKENIZER, TEMPLATE.source)
    assert here != model_fingerprint("m", TOKENIZER, TEMPLATE.source + " ")


async def test_servers_that_are_given_one_key_open_what_the_other_sealed() -> None:
    async def loaded(*keys: str, strict: bool = False) -> Capsules:
        config = Config(engine="scripted", capsule_key=keys, strict_capsules=strict)
        served = await load_models(config, lambda line: None)
        await served.close()
        found = served.models[0].capsules
        assert found is not None
        return found

    one, two, third = (
        await loaded("a passphrase of ours"),
        await loaded("a passphrase of ours"),
        await loaded(),
    )
    assert two.open(one.seal(SPAN)) == SPAN
    assert third.open(one.seal(SPAN)) is None
    assert (await loaded(strict=True)).strict
    with pytest.raises(BadConfiguration, match="--capsule-key has 5 characters"):
        await loaded("short")


def test_keys_in_the_environment_may_hold_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINGLETREE_CAPSULE_KEY", "correct horse battery, the old passphrase")
    assert read().capsule_key == ("correct horse battery", "the old passphrase")
    assert read("--capsule-key", "one, with a comma in it").capsule_key == ("one, with a comma in it",)
