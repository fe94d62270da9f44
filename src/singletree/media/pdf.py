"""Convert PDF documents: their pages to pictures, or their text."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from typing import Literal

import msgspec

from singletree.media.check import UnusablePicture
from singletree.server.models.chat_format import INSTALL

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
