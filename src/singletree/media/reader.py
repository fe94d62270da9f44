"""Make the pictures and documents of a request ready for a model: the one place where their bytes are judged.

Afterwards each picture of the conversation is its key alone, and its bytes are in ``Request.pictures``: the turn
memory, the prompt cache and the sessions hold no bytes, and compare pictures by their keys. What the model cannot see
becomes a note in its place, which is the same in every request, so that the prompt stays stable.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import importlib.util
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from singletree import request_limits
from singletree.conversation import Document, Image, Part, Request, Text, ToolResult, Turn
from singletree.errors import InvalidRequest
from singletree.lru import LruCache
from singletree.media.check import (
    UnusablePicture,
    check_picture,
    convert_picture,
    decode_base64,
    download,
    picture_key,
)
from singletree.pictures import Picture
from singletree.prompts.template.content import part_text
from singletree.server.models.chat_format import INSTALL, ChatFormat
from singletree.server.settings.config import Config, PdfForm

PDF = "application/pdf"
Media = Image | Document
MediaFetcher = Callable[[str, int], Awaitable[bytes]]
"""Fetches a URL: (URL, most bytes) -> the bytes. Raises UnusablePicture."""

_CACHE_BYTES = 64 * 2**20
_CHECKED_AT_ONCE = 4  # a large picture takes 256 MiB while it is decoded
_PDF_AT_ONCE = 2
_FETCHED_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What a server accepts.

    Attributes:
        size: the most bytes of one picture or document.
        pdf: how PDF documents are read: their pages as pictures, or their text; None for pages where the model gets
            pictures, else for their text.
        fetch: fetches URLs; None where they are not fetched.
    """

    size: int = 20 * 2**20
    pdf: PdfForm | None = None
    fetch: MediaFetcher | None = None


def media_limits(config: Config) -> MediaLimits:
    """Return what the server accepts, by its flags."""
    if not config.allow_image_urls:
        return MediaLimits(config.picture_limit, config.pdf)
    return MediaLimits(config.picture_limit, config.pdf, download)


def open_media(config: Config) -> MediaReader:
    """Return what reads the pictures and documents of a server with these flags."""
    return MediaReader(media_limits(config))


@dataclass(frozen=True, slots=True)
class _Found:
    """A picture or document in a conversation, with its place for messages, and whether a tool returned it."""

    part: Media
    place: str
    is_result: bool


class MediaReader:
    """Checks the pictures and documents of requests, and remembers by their keys which ones were checked."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        # By key: the media type, and why the picture cannot be used; not the error, whose traceback holds the bytes.
        self._checked: LruCache[str, tuple[str, str]] = LruCache(2**20)
        self._converted: LruCache[str, Picture] = LruCache(_CACHE_BYTES)
        self._pdfs: LruCache[tuple[str, PdfForm], tuple[bytes, ...]] = LruCache(_CACHE_BYTES)
        self._fetched: LruCache[str, bytes] = LruCache(_CACHE_BYTES)
        self._checking = asyncio.Semaphore(_CHECKED_AT_ONCE)
        self._reading = asyncio.Semaphore(_PDF_AT_ONCE)
        self._fetching = asyncio.Semaphore(_FETCHED_AT_ONCE)

    def of(self, owner: str) -> MediaReader:
        """Return the reader of one owner: what was fetched for others is not found by its URL."""
        part = copy.copy(self)
        part._fetched = self._fetched.part(owner)
        return part

    async def read(self, request: Request, chat_format: ChatFormat) -> Request:
        """Return ``request`` with its pictures checked; itself where it has neither pictures nor documents.

        Raises:
            InvalidRequest: a picture in a user's message cannot be used. One in a tool's result becomes a note: the
                model chose the file, and an error would end the session, since the result comes with every request.
                Or there are too many.
        """
        found = list(_media(request.conversation.turns))
        if not found:
            return request
        pdfs = sum(
            isinstance(each.part, Document) and (_is_pdf_document(each.part) or bool(each.part.url))
            for each in found
        )
        field = request.options.conversation_field
        request_limits.check("pictures", len(found), what="pictures and documents", param=field)
        request_limits.check("pdf_documents", pdfs, what="PDF documents", param=field)
        sees = chat_format.eyes is not None
        pictures: dict[str, Picture] = {}
        notes: dict[str, None] = {}
        replaced: list[tuple[Part, ...]] = []
        for each in found:
            try:
                replaced.append(await self._ready(each, chat_format, pictures))
            except UnusablePicture as error:
                if sees and not each.is_result and isinstance(each.part, Image) and not each.part.url:
                    raise _refusal(field, each.place, error) from None
                notes[f"pictures: {each.place} was replaced by a note: {error}"] = None
                replaced.append((_note(each.part, error),))
        if not sees and (blind := sum(isinstance(each.part, Image) for each in found)):
            notes[f"pictures: {blind} replaced by a note, since {chat_format.blindness or _NO_ENGINE}"] = None
        conversation = request.conversation
        turns = tuple(_with_parts(conversation.turns, iter(replaced)))
        return replace(
            request,
            conversation=replace(conversation, turns=turns),
            pictures=pictures,
            warnings=(*request.warnings, *notes),
        )

    async def _ready(
        self, found: _Found, chat_format: ChatFormat, pictures: dict[str, Picture]
    ) -> tuple[Part, ...]:
        part = found.part
        if isinstance(part, Document):
            return await self._document(part, chat_format, pictures)
        if chat_format.eyes is None:
            return (part,)
        data = await self._bytes(part)
        return (await self._picture(data, part, chat_format, pictures),)

    async def _document(
        self, document: Document, chat_format: ChatFormat, pictures: dict[str, Picture]
    ) -> tuple[Part, ...]:
        if not _is_pdf_document(document) and not document.url:
            return (document,)
        form: PdfForm = self._limits.pdf or ("pages" if chat_format.eyes is not None else "text")
        if form == "pages" and chat_format.eyes is None:
            raise UnusablePicture(
                f"its pages are not shown as pictures, since {chat_format.blindness or _NO_ENGINE}"
            )
        data = await self._bytes(document)
        if not data.lstrip()[:5] == b"%PDF-":
            raise UnusablePicture("it is not a PDF")
        key = picture_key(data), form
        pages = self._pdfs.get(key)
        if pages is None:
            async with self._reading:
                pages = tuple(await convert_pdf(data, form))
            self._pdfs.put(key, pages, sum(map(len, pages)))
        name = f" {document.title}" if document.title else ""
        parts: list[Part] = [Text(f"[document{name}: {len(pages)} pages]\n")]
        for number, page in enumerate(pages, 1):
            parts.append(Text(f"[page {number}]\n"))
            if form == "text":
                parts.append(Text(page.decode().replace("\r\n", "\n").strip() + "\n"))
            else:
                parts.append(await self._picture(page, Image("image/png"), chat_format, pictures))
                parts.append(Text("\n"))
        return (*parts, Text(f"[end of document{name}]"))

    async def _picture(
        self, data: bytes, image: Image, chat_format: ChatFormat, pictures: dict[str, Picture]
    ) -> Image:
        assert chat_format.eyes is not None
        accepted = chat_format.eyes.media_types
        async with self._checking:
            picture = await asyncio.to_thread(self._check, data, accepted)
        pictures[picture.key] = picture
        return Image(picture.media_type, key=picture.key, extra=image.extra)

    def _check(self, data: bytes, accepted: frozenset[str]) -> Picture:
        key = picture_key(data)
        media_type, reason = self._checked.get(key) or ("", "")
        if reason:
            raise UnusablePicture(reason)
        if not media_type:
            try:
                media_type = check_picture(data, key).media_type
            except UnusablePicture as error:
                self._checked.put(key, ("", str(error)), len(key) + len(str(error)))
                raise
            self._checked.put(key, (media_type, ""), len(key))
        picture = Picture(key, media_type, data)
        if picture.media_type in accepted:
            return picture
        converted = self._converted.get(key)
        if converted is None:
            converted = convert_picture(picture)
            self._converted.put(key, converted, len(converted.data))
        return converted

    async def _bytes(self, part: Media) -> bytes:
        if not part.url:
            return await asyncio.to_thread(decode_base64, part.data, self._limits.size)
        if part.url[:5].lower() == "data:":
            raise UnusablePicture("its data: URL is not base64")
        if self._limits.fetch is None:
            raise UnusablePicture(
                "this server does not fetch URLs; send the data, or start the server with --allow-image-urls"
            )
        # Kept, so that a conversation does not fetch it with every turn, and gets the same bytes each time.
        data = self._fetched.get(part.url)
        if data is None:
            async with self._fetching:
                data = await self._limits.fetch(part.url, self._limits.size)
            self._fetched.put(part.url, data, len(part.url) + len(data))
        return data


_NO_ENGINE = "there is no engine"


def _media(turns: Iterable[Turn]) -> Iterator[_Found]:
    for number, turn in enumerate(turns, 1):
        for part in turn.parts:
            # Most parts are text, which a comparison of types tells faster than a check of instances.
            if type(part) is Text:
                continue
            if type(part) is ToolResult:
                for inner in part.parts:
                    if type(inner) is not Text and isinstance(inner, Media):
                        yield _Found(inner, f"the {_kind(inner)} in message {number}", True)
            elif isinstance(part, Media):
                yield _Found(part, f"the {_kind(part)} in message {number}", turn.role == "tool")


def _with_parts(turns: Sequence[Turn], replaced: Iterator[tuple[Part, ...]]) -> Iterator[Turn]:
    for turn in turns:
        if any(isinstance(part, Media | ToolResult) for part in turn.parts):
            parts = tuple(_flat(turn.parts, replaced))
            yield turn if parts == turn.parts else replace(turn, parts=parts)
        else:
            yield turn


def _flat(parts: Iterable[Part], replaced: Iterator[tuple[Part, ...]]) -> Iterator[Part]:
    for part in parts:
        if isinstance(part, Media):
            yield from next(replaced)
        elif isinstance(part, ToolResult):
            inner = tuple(_flat(part.parts, replaced))
            yield part if inner == part.parts else replace(part, parts=inner)  # type: ignore[arg-type]
        else:
            yield part


def _note(part: Media, error: UnusablePicture) -> Text:
    if isinstance(part, Image):
        return Text(f"[image: it cannot be shown: {error}]")
    return Text(part_text(part))


def _refusal(field: str, place: str, error: UnusablePicture) -> InvalidRequest:
    # Harnesses recognise these words, and leave the picture out of the next request (Codex, Claude Code).
    return InvalidRequest(
        f"Could not process image: The image data you provided does not represent a valid image: {place}: {error}",
        param=field,
    )


def _kind(part: Media) -> str:
    return "picture" if isinstance(part, Image) else "document"


def _is_pdf_document(document: Document) -> bool:
    # %PDF- in base64
    return document.media_type == PDF or (not document.media_type and document.data[:6] == "JVBERi")


MAX_PAGES = 100
"""The most pages of a document, as on Anthropic's API."""

PAGE_SIDE = 1568
"""Length of the longer side of a page in pixels, to which vendors scale pictures."""

_WORKER = Path(__file__).with_name("pdf_worker.py")
_SECONDS = 60.0
_MEMORY = 4 * 2**30


class _Answer(msgspec.Struct):
    pages: list[str] = []
    error: str = ""


async def convert_pdf(data: bytes, form: Literal["pages", "text"]) -> list[bytes]:
    """Return the pages of a PDF: each as PNG, or its text as UTF-8.

    Raises:
        UnusablePicture: it cannot be read, has too many pages, takes too long, or the library is not installed.
    """
    needed = ("pypdfium2", "PIL") if form == "pages" else ("pypdfium2",)
    if any(importlib.util.find_spec(name) is None for name in needed):
        raise UnusablePicture(f"the server reads no PDF: {INSTALL} there")
    answer = await _run(data, form)
    if answer.error:
        raise UnusablePicture(f"the PDF cannot be read: {answer.error}")
    if form == "text":
        return [page.encode("utf-8", "replace") for page in answer.pages]
    return [base64.b64decode(page) for page in answer.pages]


async def _run(data: bytes, form: str) -> _Answer:
    process = await asyncio.create_subprocess_exec(
        # -P: the folder of the worker must not shadow other modules.
        *(sys.executable, "-P", str(_WORKER), form, str(MAX_PAGES), str(PAGE_SIDE), str(_MEMORY)),
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_SECONDS):
            output, _ = await process.communicate(data)
    except TimeoutError:
        raise UnusablePicture(f"the PDF was not read within {_SECONDS:g} seconds; send fewer pages") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        return msgspec.json.decode(output, type=_Answer)
    except msgspec.DecodeError:
        raise UnusablePicture("the PDF cannot be read: its reader ended without a result") from None
