"""Pictures of a conversation, checked and placed in a prompt. Standard library only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
        before: the token before the placeholder, and ``behind`` the one behind it; empty at the end of a prompt. Some
            engines recognise a placeholder only between the tokens that the chat template prints around it.
    """

    position: int
    placeholder_id: int
    key: str
    media_type: str
    data: bytes = field(repr=False)
    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()

    def alone(self) -> tuple[list[int], PromptPicture]:
        """Return a prompt of this picture alone, with what is around it, and the picture as it is placed there."""
        prompt = [*self.before, self.placeholder_id, *self.behind]
        return prompt, replace(self, position=len(self.before))


FIRST_PICTURE_NUMBER = 1 << 31
"""The least of the numbers that ``comparable_tokens`` writes for pictures."""


def comparable_tokens(token_ids: Sequence[int], pictures: Sequence[PromptPicture]) -> array[int]:
    """Return the prompt for a comparison with other prompts: each placeholder becomes a number made from its picture.

    Two prompts that differ in a picture alone then differ there, as they do in the engine's prefix cache. No token id
    is as large as such a number.
    """
    tokens = token_ids if isinstance(token_ids, array) else array("I", token_ids)
    if not pictures:
        return tokens
    tokens = tokens[:]
    for picture in pictures:
        tokens[picture.position] = int(picture.key[:8], 16) | FIRST_PICTURE_NUMBER
    return tokens
