"""Pictures for vLLM: the same over HTTP and in process."""

from __future__ import annotations

from singletree.pictures import PromptPicture

UNKNOWN_PICTURE = "Cache miss for"
"""How vLLM refuses a picture that it does not have and whose bytes were not sent."""


def picture_uuid(picture: PromptPicture) -> str:
    """Return the id that takes the place of the bytes in the key of vLLM's prefix cache: so it has to be their hash."""
    return f"sha256:{picture.key}"
