"""Pictures of a conversation, checked and placed in a prompt. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Picture", "PromptPicture"]


@dataclass(frozen=True, slots=True)
class Picture:
    """The checked bytes of an image.

    Attributes:
        key: the SHA-256 hash of ``data`` in hexadecimal, computed by the server: never taken from a client.
        media_type: the format that the bytes have, whatever the client declared.
        data: the encoded picture.
    """

    key: str
    media_type: str
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class PromptPicture:
    """A picture and its place in a prompt.

    Attributes:
        position: the index of its placeholder in the token ids of the prompt.
        placeholder_id: the token there. The engine expands it to as many tokens as the picture takes.
        key: the SHA-256 hash of the bytes that the client sent, in hexadecimal. An engine may use it as the picture's
            identity in its prefix cache: no client can choose it.
        media_type: the format of ``data``.
        data: the encoded picture, in a format that the engine decodes.
    """

    position: int
    placeholder_id: int
    key: str
    media_type: str
    data: bytes = field(repr=False)
