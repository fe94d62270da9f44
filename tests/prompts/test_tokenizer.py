"""By segments is as whole; pieces never split a character; what is guarded is never read as a token."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from prompts.tiny_vocabulary import ORDINARY, SPECIAL, byte_level, sentencepiece, write_directory
from singletree.errors import BadConfiguration
from singletree.prompts.tokenizer.added_tokens import GUARD, strip_guards
from singletree.prompts.tokenizer.tokenizer import Tokenizer, load_tokenizer

KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "always": lambda: sentencepiece("always"),
    "first": lambda: sentencepiece("first"),
    "never": lambda: sentencepiece("never"),
}
BITS = st.sampled_from(
    [*SPECIAL, *ORDINARY, "<|im_", "end|>", "<think", ">", " ", "  ", "\n", "dog", "the ", "ä", "👍🏽", "1"]
)
TEXTS = st.one_of(st.lists(BITS, max_size=12).map("".join), st.text(max_size=40))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {name: make() for name, make in KINDS.items()}
    return {
        name: (load_tokenizer(write_directory(folder / name, reference)), reference)
        for name, reference in made.items()
    }


def _whole(reference: tokenizers.Tokenizer, text: str) -> list[int]:
    ids: list[int] = reference.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_by_segments_is_as_whole(
    loaded: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]], kind: str, text: str
) -> None:  # C7
    tokenizer, reference = loaded[kind]
    assert tokenizer.encode(text) == _whole(reference, text)
    assert tokenizer.encode(text) == _whole(reference, text), "from the cache"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_guarded_text_holds_no_added_token(
    loaded: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]], kind: str, text: str
) -> None:
    tokenizer, _ = loaded[kind]
    prompt = f"<|im_start|>{tokenizer.guard(text)}<|im_end|>"
    ids = tokenizer.encode(prompt)
    added = set(tokenizer.added_tokens.values())
    assert [id for id in ids if id in added] == [
        tokenizer.added_tokens["<|im_start|>"],
        tokenizer.added_tokens["<|im_end|>"],
    ]
    assert strip_guards(prompt) == f"<|im_start|>{text}<|im_end|>"
    if kind == "byte_level":
        assert tokenizer.decode(ids) == strip_guards(prompt)


def test_a_token_cannot_be_completed_across_an_edge(
    loaded: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]],
) -> None:
    tokenizer, _ = loaded["byte_level"]
    for token in SPECIAL + ORDINARY:
        for cut in range(1, len(token)):
            before, after = tokenizer.guard(token[:cut]), tokenizer.guard(token[cut:])
            id = tokenizer.added_tokens[token]
            assert id not in tokenizer.encode(before + token[cut:])
            assert id not in tokenizer.encode(token[:cut] + after)
            assert id not in tokenizer.encode(before + after)


def test_a_mark_cannot_be_forged(loaded: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]) -> None:
    tokenizer, _ = loaded["byte_level"]
    assert GUARD not in tokenizer.guard(f"a{GUARD}b")
    assert tokenizer.decode(tokenizer.encode(tokenizer.guard("a\ud800b"))) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("a\udcffb")) == "a\ufffdb"


def test_whitespace_and_html_tokens_are_not_guarded(tmp_path: Path) -> None:
    reference = tokenizers.Tokenizer.from_str(byte_level().to_str())
    reference.add_tokens(
        [tokenizers.AddedToken(text, normalized=False) for text in ("\n\n", "<table>", "<eot>")]
    )
    tokenizer = load_tokenizer(write_directory(tmp_path, reference))
    assert tokenizer.guard("a\n\n<table>") == "a\n\n<table>"
    assert tokenizer.guard("<eot>") != "<eot>"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_decode_gives_the_text_back(
    loaded: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]], kind: str, text: str
) -> None:
    tokenizer, _ = loaded[kind]
    if kind != "byte_level" and ("▁" in text or text[:1] == " " or "<0x" in text):
        return  # SentencePiece cannot tell these apart itself
    if kind == "first" and text.lstrip() != text:
        return
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=30), cuts=st.lists(st.integers(1, 4), min_size=1))
def test_any_chunking_of_a_stream_gives_the_same_text(
    loaded: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]], text: str, cuts: list[int]
) -> None:  # C9
    tokenizer, _ = loaded["byte_level"]
    ids = tokenizer.encode(f"{text}<|im_end|>👍🏽<think>{text}")
    stream, pieces, at, turn = tokenizer.new_detokenizer(), [], 0, 0
    while at < len(ids):
        size = cuts[turn % len(cuts)]
        pieces += stream.feed(ids[at : at + size])
        at, turn = at + size, turn + 1
    pieces += stream.flush()
    assert "".join(piece for piece, _ in pieces) == tokenizer.decode(ids)
    assert all(piece for piece, _ in pieces)
    special = {tokenizer.added_tokens[token] for token in SPECIAL}
    assert [piece for piece, is_special in pieces if is_special] == [
        tokenizer.decode([id]) for id in ids if id in special
    ]
    assert not any("\ufffd" in piece for piece, _ in pieces) or "\ufffd" in text


def test_pieces(loaded: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]) -> None:
    tokenizer, _ = loaded["byte_level"]
    stream = tokenizer.new_detokenizer()
    *begun, last = tokenizer.encode("🫠")
    assert len(begun) > 1
    assert [stream.feed([id]) for id in begun] == [[]] * len(begun)
    assert stream.feed([last]) == [("🫠", False)]
    assert stream.feed(tokenizer.encode("the dog<|im_end|>x<think>")) == [
        ("the dog", False),
        ("<|im_end|>", True),
        ("x<think>", False),
    ]
    assert stream.feed([10**6]) == stream.feed([-1]) == stream.feed([2**40]) == stream.feed([]) == []
    assert stream.feed([*begun, tokenizer.added_tokens["<|im_end|>"]]) == [
        ("\ufffd", False),
        ("<|im_end|>", True),
    ]
    assert stream.feed(begun) == []
    assert stream.flush() == [("\ufffd", False)]
    assert stream.flush() == []


def test_the_prefix_of_a_segment_is_no_text(
    loaded: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]],
) -> None:
    tokenizer, _ = loaded["always"]
    assert tokenizer.decode(tokenizer.encode("dog<|im_end|>dog")) == "dog<|im_end|>dog"
    stream = tokenizer.new_detokenizer()
    assert stream.feed(tokenizer.encode("dog")) == [(" dog", False)]


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    folder = write_directory(tmp_path, byte_level())
    tokenizer = load_tokenizer(folder, cache_bytes=2_000)
    texts = [f"<|im_start|>{'dog ' * n}" for n in range(200)]
    ids = [tokenizer.encode(text) for text in texts]
    assert [tokenizer.encode(text) for text in texts] == ids
    assert 0 < tokenizer._encoded.bytes <= 2_000


def test_accelerating_changes_no_id(
    loaded: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(write_directory(tmp_path, byte_level()))
    text = "".join(SPECIAL) + "the lazy dog's 123 ä👍🏽\n\n  \ud800" + "".join(ORDINARY)
    tokenizer.encode(text)
    assert tokenizer._encoded.bytes > 0
    tokenizer.of("owner").accelerate()
    assert tokenizer.encode(text) == loaded["byte_level"][0].encode(text)
    assert tokenizer._encoded.bytes == 0, "a fast encoder needs no cache"


def test_what_a_directory_says(tmp_path: Path) -> None:
    reference = byte_level()
    ids = {token: reference.token_to_id(token) for token in SPECIAL}
    folder = write_directory(
        tmp_path,
        reference,
        tokenizer_config={
            "bos_token": None,
            "eos_token": {"content": "<|im_end|>"},
            "pad_token": "<|endoftext|>",
            "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
            "model_max_length": 10**30,
        },
        generation_config={"eos_token_id": [3, 5]},
        config={"text_config": {"max_position_embeddings": 4096}, "eos_token_id": 7},
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_tokens == frozenset(SPECIAL)
    assert set(tokenizer.added_tokens) == {*SPECIAL, *ORDINARY}
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("", "<|im_end|>")
    assert tokenizer.named_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert tokenizer.stop_token_ids == {3, 5, 7, ids["<|im_end|>"], ids["<|endoftext|>"]}
    assert tokenizer.context_window == 4096
    assert tokenizer.vocabulary_size == reference.get_vocab_size(with_added_tokens=True)
    assert tokenizer.chat_template == "D"
    (folder / "chat_template.jinja").write_text("J", encoding="utf-8")
    assert load_tokenizer(folder).chat_template == "J"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no tokenizer.json"),
        ("{", "cannot be read"),
        ('{"model": {}}', "no vocabulary"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', "decoder"),
        (
            '{"model": {"type": "Strange", "vocab": {"a": 0}}, "decoder": {"type": "ByteLevel"}}',
            "cannot be used",
        ),
    ],
)
def test_a_broken_directory_is_named(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(BadConfiguration, match=says):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_a_real_vocabulary(tmp_path: Path) -> None:
    packed = Path(__file__).resolve().parents[3] / "shared" / "tokenizers" / "gemma4_tokenizer.json.gz"
    if not packed.is_file():
        pytest.skip("the collected tokenizers are not at hand")
    (tmp_path / "tokenizer.json").write_bytes(gzip.decompress(packed.read_bytes()))
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    mixed = Path(__file__).read_text(encoding="utf-8") + "".join(
        f" {token}\n" for token in tokenizer.added_tokens
    )
    assert tokenizer.encode(mixed) == _whole(reference, mixed)
    assert tokenizer.decode(tokenizer.encode(mixed)) == mixed.replace("▁", " ")
    guarded = tokenizer.encode(tokenizer.guard(mixed))
    assert not set(guarded) & {tokenizer.added_tokens[token] for token in tokenizer.special_tokens}
    assert tokenizer.accelerate()
    assert tokenizer.encode(mixed) == _whole(reference, mixed)
