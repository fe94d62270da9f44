"""The places of pictures in a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

from singletree.conversation import Image, Part, ToolResult, Turn
from singletree.pictures import Picture, PromptPicture

_WIDTH = array("I").itemsize


def positions_of(token_ids: array[int], token_id: int) -> list[int]:
    """Return the positions of ``token_id``. They are found as bytes: no Python loop runs over the tokens."""
    data, wanted = token_ids.tobytes(), array("I", (token_id,)).tobytes()
    found: list[int] = []
    at = data.find(wanted)
    while at >= 0:
        if at % _WIDTH == 0:
            found.append(at // _WIDTH)
        at = data.find(wanted, at + 1)
    return found


def shown_pictures(turns: Iterable[Turn], *, in_text: bool) -> list[Image]:
    """Return the pictures that the messages of ``turns`` show, in their order.

    Args:
        in_text: whether a mark in the text stands for a picture: then system messages show them too.
    """
    roles = ("user", "tool", "system", "developer") if in_text else ("user", "tool")
    return [image for turn in turns if turn.role in roles for image in _images(turn.parts)]


def _images(parts: Iterable[Part]) -> Iterable[Image]:
    for part in parts:
        if isinstance(part, Image):
            yield part
        elif isinstance(part, ToolResult):
            yield from _images(part.parts)


def place_pictures(
    placeholder_id: int, token_ids: array[int], shown: Sequence[Image], pictures: Mapping[str, Picture]
) -> tuple[PromptPicture, ...] | None:
    """Return the pictures of a prompt with their places.

    None where the prompt has more or fewer placeholders than the messages have pictures: the template left some out.
    Engines hang, fail or read other pictures then, so none may be sent.

    Args:
        placeholder_id: the token that stands for a picture.
        token_ids: the tokens of the prompt.
        shown: the pictures of its messages, in order.
        pictures: their bytes, by key.
    """
    if not shown:
        return ()
    places = positions_of(token_ids, placeholder_id)
    found = [pictures.get(image.key) for image in shown]
    if len(places) != len(found) or None in found:
        return None
    return tuple(
        PromptPicture(
            place,
            placeholder_id,
            picture.key,
            picture.media_type,
            picture.data,
            tuple(token_ids[max(0, place - 1) : place]),
            tuple(token_ids[place + 1 : place + 2]),
        )
        for place, picture in zip(places, found, strict=True)
        if picture is not None
    )
