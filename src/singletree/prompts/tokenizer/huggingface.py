"""Reads the tokenizer of a checkpoint from a directory in the layout of Hugging Face."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tokenizers

from singletree.errors import BadConfiguration
from singletree.prompts.tokenizer.added_tokens import AddedToken
from singletree.prompts.tokenizer.definition import Pipeline, TokenizerDefinition

DecodedT = TypeVar("DecodedT")

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_WINDOW_KEYS = ("max_position_embeddings", "max_sequence_length", "seq_length", "n_positions")
_NO_LIMIT = 10**8
"""``model_max_length`` is 1e30 where the author of the tokenizer set no limit."""


class _TokenizerFile(msgspec.Struct):
    """``tokenizer.json``. The model is not parsed: it is megabytes of vocabulary that only the backend needs."""

    model: msgspec.Raw
    added_tokens: list[AddedToken] = []
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


class _Vocabulary(msgspec.Struct):
    """The part of the model with the token ids: a mapping, or for Unigram a list."""

    vocab: dict[str, int] | list[Any]


def read_directory(path: Path, vocabulary_size: int | None = None) -> TokenizerDefinition:
    """Read the tokenizer of a Hugging Face directory. Raises BadConfiguration if it is missing or damaged.

    ``vocabulary_size`` is one more than the highest id, if it is known: finding it takes a tenth of a second.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise BadConfiguration(
            f"{path.name}: it has no tokenizer.json; give a directory with tokenizer.json and "
            "tokenizer_config.json (a checkpoint that has only tokenizer.model or tiktoken ranks must be "
            "converted), or a .gguf file"
        )
    tokenizer = _decode(file, _TokenizerFile)
    config, generation, model = (
        _object(path / name) for name in ("tokenizer_config.json", "generation_config.json", "config.json")
    )
    named = _named_tokens(_object(path / "special_tokens_map.json") | config)
    ids = {token.text: token.id for token in tokenizer.added_tokens}
    ends = {id for source in (generation, model) for id in _ids(source.get("eos_token_id"))}
    if named.get("eos_token") in ids:
        ends.add(ids[named["eos_token"]])
    return TokenizerDefinition(
        pipeline=Pipeline(tokenizer.model, tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder),
        added_tokens=tuple(tokenizer.added_tokens),
        vocabulary_size=_vocabulary_size(tokenizer) if vocabulary_size is None else vocabulary_size,
        named_tokens=named,
        stop_token_ids=frozenset(ends),
        chat_template=_chat_template(path, config),
        context_window=_context_window(model, config),
        response_template=config.get("response_template"),
    )


def _decode(file: Path, type: type[DecodedT]) -> DecodedT:
    try:
        return msgspec.json.decode(file.read_bytes(), type=type)
    except msgspec.DecodeError as error:
        raise BadConfiguration(f"{file.parent.name}/{file.name} cannot be read: {error}") from error


def _object(file: Path) -> dict[str, Any]:
    return _decode(file, dict[str, Any]) if file.is_file() else {}


def _vocabulary_size(tokenizer: _TokenizerFile) -> int:
    try:
        vocabulary = msgspec.json.decode(tokenizer.model, type=_Vocabulary).vocab
    except msgspec.DecodeError as error:
        raise BadConfiguration(f"tokenizer.json has no vocabulary: {error}") from error
    highest = max(vocabulary.values(), default=-1) if isinstance(vocabulary, dict) else len(vocabulary) - 1
    return max([highest, *(token.id for token in tokenizer.added_tokens)]) + 1


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[name] = text
    return named


def _ids(value: Any) -> list[int]:
    return [id for id in (value if isinstance(value, list) else [value]) if isinstance(id, int)]


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template, from the places where checkpoints have kept it over the years, newest first."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = _object(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template if isinstance(entry, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None


def _context_window(model: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    text_model = model.get("text_config")
    for source in (model, text_model if isinstance(text_model, dict) else {}):
        for key in _WINDOW_KEYS:
            if isinstance(source.get(key), int):
                return int(source[key])
    longest = config.get("model_max_length")
    return int(longest) if isinstance(longest, int | float) and 0 < longest < _NO_LIMIT else None


_FORMAT = 1
"""Raise it when ``TokenizerFacts`` or how they are found changes: files of another format are not found."""


class TokenizerFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What only a loaded tokenizer shows.

    ``strip_first`` and ``strip_later`` tell whether it puts a space before the first segment of a text, and before
    later ones. ``sample`` is the text of ids from all over the vocabulary (``Tokenizer.sample``).
    """

    vocabulary_size: int
    strip_first: bool
    strip_later: bool
    sample: str


class KnownTokenizerFiles:
    """The facts of each ``tokenizer.json`` that was loaded, by the checksum of its bytes, in files of a folder.

    A server that starts again need not load them first. The checksum covers the version of the library that read it,
    too. A file that cannot be read, or is damaged, counts as none; a folder that cannot be written to stays.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, file: Path) -> tuple[Path | None, TokenizerFacts | None]:
        """Return the path under which the facts of ``file`` are kept (None if unreadable), and the facts if known."""
        checksum = hashlib.sha256(f"{_FORMAT} {tokenizers.__version__} ".encode())
        try:
            checksum.update(file.read_bytes())
        except OSError:
            return None, None
        path = self._folder / f"{checksum.hexdigest()}.json"
        try:
            check, _, text = path.read_bytes().partition(b"\n")
            if check == _check(text):
                return path, msgspec.json.decode(text, type=TokenizerFacts)
        except (OSError, msgspec.DecodeError):
            pass
        return path, None

    def keep(self, path: Path, facts: TokenizerFacts) -> None:
        """Write ``facts`` to ``path``, which ``find`` returned: whole or not at all."""
        text = msgspec.json.encode(facts)
        own = path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            own.write_bytes(_check(text) + b"\n" + text)
            own.replace(path)


def _check(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)
