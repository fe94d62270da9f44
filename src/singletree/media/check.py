"""Check the bytes of a picture before an engine decodes them: format, size in bytes, size in pixels, damage."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from typing import TYPE_CHECKING

from singletree.pictures import Picture

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}
"""The formats that harnesses send, by Pillow's names, with their media types."""

UNUSUAL = "image/x-unusual"
"""Media type of a picture with an uncommon colour model (CMYK, 16 bits): no engine declares it, so it is converted."""

MAX_PIXELS = 2**26
"""The most pixels of a picture: 8192 by 8192. A file of a few kilobytes can hold more (a decompression bomb)."""

MAX_RATIO = 200
"""The largest ratio of a picture's sides: the processors of Qwen's models fail from there on."""

_COMMON_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA"})
_WHITE_SPACE = re.compile(r"\s+")


class UnusablePicture(Exception):
    """A picture or document cannot be used; the text says why, and what to send instead."""


def decode_base64(data: str, limit: int) -> bytes:
    """Return the bytes of ``data``. Raises UnusablePicture if it is not base64, or more than ``limit`` bytes."""
    if len(data) * 3 // 4 > limit + 2:
        data = _WHITE_SPACE.sub("", data)
    if len(data) * 3 // 4 > limit + 2:
        raise UnusablePicture(f"it has more than {limit} bytes; send a smaller one, or raise --picture-limit")
    try:
        try:
            decoded = binascii.a2b_base64(data, strict_mode=True)
        except binascii.Error:
            compact = _WHITE_SPACE.sub("", data)
            decoded = base64.b64decode(
                compact + "=" * (-len(compact) % 4), altchars=_altchars(compact), validate=True
            )
    except ValueError:  # also for characters that are not ASCII
        raise UnusablePicture("its data is not base64") from None
    if len(decoded) > limit:
        raise UnusablePicture(f"it has more than {limit} bytes; send a smaller one, or raise --picture-limit")
    return decoded


def _altchars(data: str) -> bytes | None:
    return b"-_" if "-" in data or "_" in data else None


def picture_key(data: bytes) -> str:
    """Return the key of a picture: the SHA-256 hash of its bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def check_picture(data: bytes, key: str) -> Picture:
    """Return the picture with ``data`` and its ``picture_key``, once it was decoded.

    Raises:
        UnusablePicture: it has another format, too many pixels, or is damaged.
    """
    with opened(data) as image:
        try:
            image.load()
        except Exception as error:  # a decoder of foreign data, which fails in many ways
            raise UnusablePicture(f"its {image.format} data is damaged ({_reason(error)})") from None
        media_type = FORMATS[str(image.format)] if image.mode in _COMMON_MODES else UNUSUAL
        return Picture(key, media_type, data)


def convert_picture(picture: Picture) -> Picture:
    """Return ``picture`` as PNG, under the key of the bytes that the client sent. Raises UnusablePicture."""
    with opened(picture.data) as image:
        target = io.BytesIO()
        try:
            image.convert("RGBA" if "A" in image.getbands() else "RGB").save(target, "PNG", compress_level=1)
        except Exception as error:
            raise UnusablePicture(f"its {image.format} data is damaged ({_reason(error)})") from None
    return Picture(picture.key, "image/png", target.getvalue())


def opened(data: bytes) -> PillowImage:
    """Read the header of a picture. Raises UnusablePicture for another format and for too many pixels."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=tuple(FORMATS))
    except UnidentifiedImageError:
        raise UnusablePicture("it is neither PNG, JPEG, GIF nor WebP; send one of these") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UnusablePicture(_too_large("more")) from None
    except Exception as error:
        raise UnusablePicture(f"its header is damaged ({_reason(error)})") from None
    width, height = image.size
    if width * height > MAX_PIXELS or width < 1 or height < 1:
        raise UnusablePicture(_too_large(f"{width} x {height}"))
    if max(width, height) > MAX_RATIO * min(width, height):
        raise UnusablePicture(f"one of its sides is more than {MAX_RATIO} times as long as the other; cut it")
    return image


def _too_large(size: str) -> str:
    return f"it has {size} pixels, of which at most {MAX_PIXELS} are accepted; send a smaller one"


def _reason(error: Exception) -> str:
    return str(error)[:80] or type(error).__name__
