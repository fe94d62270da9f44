"""The pictures and documents of requests, which are made ready behind a door (``media``): most requests have none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import chain, compress, repeat
from operator import attrgetter, is_
from typing import Protocol

from singletree.conversation import Document, Image, Request, ToolResult, Turn
from singletree.server.doors import open_door_in_thread
from singletree.server.models.chat_format import ChatFormat
from singletree.server.settings.config import Config


class MediaPreparer(Protocol):
    """Makes the pictures and documents of requests ready for a model."""

    def of(self, owner: str) -> MediaPreparer:
        """Return what reads the requests of one owner: what was fetched for others is not found by its URL."""

    async def read(self, request: Request, chat_format: ChatFormat) -> Request:
        """Return ``request`` with its pictures checked; itself where it has neither pictures nor documents.

        Raises:
            InvalidRequest: a picture in a user's message cannot be used, or there are too many.
        """


OpenMedia = Callable[[Config], MediaPreparer]


class RequestMedia:
    """Reads nothing where a request has no pictures or documents; else what ``MediaPreparer`` promises."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._whole: RequestMedia | None = None
        self._owner = ""
        self._opened: MediaPreparer | None = None

    def of(self, owner: str) -> MediaPreparer:
        """Return what reads the requests of one owner; see ``MediaPreparer``."""
        part = copy.copy(self)
        part._whole, part._owner, part._opened = self, owner, None
        return part

    async def read(self, request: Request, chat_format: ChatFormat) -> Request:
        """Return ``request`` with its pictures checked; see ``MediaPreparer``."""
        if not _may_hold_media(request.conversation.turns):
            return request
        return await (await self._open()).read(request, chat_format)

    async def _open(self) -> MediaPreparer:
        # Asked again after each wait: another request may have opened it meanwhile.
        if self._whole is None:
            open_media: OpenMedia = await open_door_in_thread("media")
            if self._opened is None:
                self._opened = open_media(self._config)
        else:
            whole = await self._whole._open()
            if self._opened is None:
                self._opened = whole.of(self._owner)
        return self._opened


def _may_hold_media(turns: Iterable[Turn]) -> bool:
    """Return whether the conversation has parts other than text and calls: without Python code for each turn."""
    parts = list(chain.from_iterable(map(attrgetter("parts"), turns)))
    kinds = list(map(type, parts))
    results = compress(parts, map(is_, kinds, repeat(ToolResult)))
    inner = map(type, chain.from_iterable(map(attrgetter("parts"), results)))
    return any(issubclass(kind, Image | Document) for kind in {*kinds, *inner})
