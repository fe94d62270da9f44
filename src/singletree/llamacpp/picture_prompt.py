"""Writes a prompt with pictures for llama.cpp, which takes pictures only with text: a marker stands for each picture.

llama.cpp tokenizes that text itself, with special tokens recognised. So the text of the prompt's token ids is sent, and
two things are checked, section by section, a section being what one token that ends a turn closes:

- **Is it read as the same tokens?** Nearly always. A model can generate tokens that its tokenizer would not choose for
  their text; llama.cpp then reads other ones, and its prefix cache ends at that turn, once.
- **Does text become a special token?** The prompt's token ids tell a special token from its text in a user's message,
  the text alone does not. Where they differ, U+2060 (WORD JOINER, which is not displayed) is put into such text. A
  section in which llama.cpp would still read another special token is refused.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import secrets
import struct
import zlib
from array import array
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct, json

from singletree.engines.engine import GenerationJob
from singletree.errors import EngineFailed, InvalidRequest, SingletreeError
from singletree.llamacpp import wire
from singletree.lru import LruCache
from singletree.pictures import PromptPicture
from singletree.prompts.tokenizer.added_tokens import GUARD, NEUTRAL
from singletree.prompts.tokenizer.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_CACHE_BYTES = 32 * 2**20
_COUNT_BYTES = 2**20

_COUNT_PATH = "/v1/messages/count_tokens"

NO_PROJECTOR = "llama.cpp has no vision projector for this model; name its file with --mmproj"
"""Why a model gets no pictures."""


class _TokenIds(Struct):
    tokens: list[int]


class _Evaluated(Struct):
    tokens_evaluated: int


class _TokenCount(Struct):
    input_tokens: int


TokenizeText = Callable[[str], Awaitable[Sequence[int]]]
"""llama.cpp's tokenizer, with special tokens recognised and none added."""


class MarkupDecoder:
    """Decodes for an engine that reads text, which makes a special token of every text of one.

    Attributes:
        section_ends: tokens that end a turn: text before and behind them is tokenized independently.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.added_ids = frozenset(tokenizer.added_tokens.values())
        self.special_ids = frozenset(tokenizer.added_tokens[text] for text in tokenizer.special_tokens)
        self.section_ends = tokenizer.stop_token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def decode_neutral(self, token_ids: Sequence[int]) -> str:
        """Return the same, where ordinary text that reads like an added token is broken by ``NEUTRAL``."""
        stream = self._tokenizer.new_detokenizer()
        pieces: list[str] = []
        run: list[str] = []
        for id in token_ids:
            text = "".join(piece for piece, _ in stream.feed((id,)))
            if id in self.added_ids:
                pieces += [self._broken("".join(run)), text]
                run = []
            else:
                run.append(text)
        run += [piece for piece, _ in stream.flush()]
        return "".join([*pieces, self._broken("".join(run))])

    def _broken(self, text: str) -> str:
        return self._tokenizer.guard(text).replace(GUARD, NEUTRAL)


@dataclass(frozen=True, slots=True)
class _Section:
    """A part of a prompt as it is sent: its text, and how many of its tokens llama.cpp reads as others."""

    text: str
    changed: int = 0
    neutralized: bool = False


class PicturePrompts:
    """Writes the prompts of one model.

    Attributes:
        changed_tokens: how many tokens so far were read as others.
        neutralized_sections: how many sections so far had text that reads like an added token.

    Args:
        marker: stands for a picture in the text; nobody else may know it.
    """

    def __init__(self, decoder: MarkupDecoder, tokenize: TokenizeText, marker: str) -> None:
        self._decoder = decoder
        self._tokenize = tokenize
        self._marker = marker
        self._sections: LruCache[bytes, _Section] = LruCache(_CACHE_BYTES)
        self.changed_tokens = 0
        self.neutralized_sections = 0

    async def write(self, job: GenerationJob, first_ids: Sequence[int]) -> dict[str, Any]:
        """Return the field ``prompt`` of a request.

        Args:
            first_ids: the tokens that llama.cpp puts before every prompt by itself.

        Raises:
            InvalidRequest: text of the prompt would become a special token, or the prompt ends with a picture.
        """
        ids = job.prompt_token_ids
        begin = len(first_ids) if first_ids and list(ids[: len(first_ids)]) == list(first_ids) else 0
        pieces: list[str] = []
        for picture in job.pictures:
            pieces += [await self._text(job.request_id, ids[begin : picture.position]), self._marker]
            begin = picture.position + 1
        last = await self._text(job.request_id, ids[begin:])
        if not last:
            # It would end llama.cpp's process: GGML_ASSERT(batch.size() > 0) in server-context.cpp.
            raise InvalidRequest("the prompt ends with a picture; send text behind it", param="messages")
        return {
            "prompt_string": "".join([*pieces, last]),
            "multimodal_data": [base64.b64encode(picture.data).decode() for picture in job.pictures],
        }

    async def _text(self, request_id: str, token_ids: Sequence[int]) -> str:
        return "".join(
            [
                await self._section(request_id, section)
                for section in _split(token_ids, self._decoder.section_ends)
            ]
        )

    async def _section(self, request_id: str, token_ids: Sequence[int]) -> str:
        """Return the text of one section; each is checked once."""
        key = hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=16).digest()
        section = self._sections.get(key)
        if section is None:
            section = await self._checked(list(token_ids))
            self._sections.put(key, section, 4 * len(section.text))
            self._record(request_id, section)
        return section.text

    async def _checked(self, token_ids: list[int]) -> _Section:
        text = self._decoder.decode(token_ids)
        read = list(await self._tokenize(text))
        neutralized = False
        added = self._decoder.added_ids
        if read != token_ids and _only(read, added) != _only(token_ids, added):
            neutralized, text = True, self._decoder.decode_neutral(token_ids)
            read = list(await self._tokenize(text))
            special = self._decoder.special_ids
            if _only(read, special) != _only(token_ids, special):
                raise InvalidRequest(
                    "text in this conversation would become a special token of the model, since this engine takes "
                    "pictures only with text; leave out the pictures, or the text that reads like a special token",
                    param="messages",
                )
        if self._marker in text:
            raise InvalidRequest("a message contains the engine's marker for pictures", param="messages")
        same = next((i for i, (a, b) in enumerate(zip(read, token_ids, strict=False)) if a != b), None)
        if same is None:
            same = min(len(read), len(token_ids))
        return _Section(text, len(token_ids) - same, neutralized)

    def _record(self, request_id: str, section: _Section) -> None:
        self.changed_tokens += section.changed
        self.neutralized_sections += section.neutralized
        if section.neutralized:
            _LOG.info(
                "id=%s a message has text that reads like a special token; beside pictures it gets U+2060 inside",
                request_id,
            )
        elif section.changed:
            _LOG.info(
                "id=%s llama.cpp reads %d tokens of a turn as others, since it takes pictures only with text; its "
                "prefix cache ends there once",
                request_id,
                section.changed,
            )


def _only(token_ids: Sequence[int], wanted: Collection[int]) -> list[int]:
    return [id for id in token_ids if id in wanted]


def _grey_png(side: int) -> bytes:

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\x80" * side) * side
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


_GREY = _grey_png(64)


def _split(token_ids: Sequence[int], ends: Collection[int]) -> Iterator[Sequence[int]]:
    begin = 0
    for at, id in enumerate(token_ids, 1):
        if id in ends:
            yield token_ids[begin:at]
            begin = at
    if begin < len(token_ids):
        yield token_ids[begin:]


class PictureSession:
    """The pictures of one model in llama.cpp: prompts that hold them, and their length in tokens.

    Attributes:
        marker: stands for a picture in the text of a prompt. It is secret: a client that knew it could write it.

    Args:
        post: sends a body to a path of llama.cpp's server, and returns the status and the answer.
    """

    def __init__(
        self, decoder: MarkupDecoder, post: Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
    ) -> None:
        self._post = post
        self.marker = f"<__media_{secrets.token_hex(16)}__>"
        self.prompts = PicturePrompts(decoder, self._tokenize, self.marker)
        self._first: list[int] = []
        self._around = 0
        self._counts: LruCache[str, int] = LruCache(_COUNT_BYTES)

    async def calibrate(self) -> None:
        """Read a picture once, before any generation: the projector works, and ``count`` knows what is around one.

        Raises EngineFailed if the projector does not fit the model.
        """
        self._first = await self._tokenize("", adds_first=True)
        behind = "\n"
        prompt = {
            "prompt_string": self.marker + behind,
            "multimodal_data": [base64.b64encode(_GREY).decode()],
        }
        body = {
            "prompt": prompt,
            "n_predict": 0,
            "cache_prompt": False,
            "response_fields": ["tokens_evaluated"],
        }
        status, answer = await self._post("/completion", json.encode(body))
        try:
            read = wire.decode_answer(answer, _Evaluated, "/completion", status).tokens_evaluated
            counted = await self._count("image/png", _GREY)
        except SingletreeError as error:
            raise EngineFailed(f"the vision projector does not read a picture: {error.message}") from error
        text = await self._tokenize(behind)
        self._around = counted - (read - len(self._first) - len(text))

    async def write(self, job: GenerationJob) -> dict[str, Any]:
        """Return the field ``prompt`` of a request. Raises what ``PicturePrompts.write`` raises."""
        return await self.prompts.write(job, self._first)

    async def count(self, picture: PromptPicture) -> int:
        """Return the length of the picture in tokens. It is not encoded for that."""
        count = self._counts.get(picture.key)
        if count is None:
            count = await self._count(picture.media_type, picture.data) - self._around
            self._counts.put(picture.key, count, len(picture.key))
        return count

    async def _count(self, media_type: str, data: bytes) -> int:
        source = {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}
        content = [{"type": "image", "source": source}]
        body = {"model": "", "messages": [{"role": "user", "content": content}]}
        status, answer = await self._post(_COUNT_PATH, json.encode(body))
        return wire.decode_answer(answer, _TokenCount, _COUNT_PATH, status).input_tokens

    async def _tokenize(self, text: str, *, adds_first: bool = False) -> list[int]:
        body = wire.encode_prompt_tokenize_request(text, adds_first=adds_first)
        status, answer = await self._post("/tokenize", body)
        return wire.decode_answer(answer, _TokenIds, "/tokenize", status).tokens
