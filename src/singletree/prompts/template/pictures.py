"""Pictures in a prompt: the token that a template prints for one, and where they are."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from singletree.conversation import Conversation, Image, Part, Text, ToolResult, Turn
from singletree.errors import InvalidRequest
from singletree.pictures import Picture, PromptPicture
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.prompts.tokenizer.tokenizer import Tokenizer

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
    """Return the pictures that the messages show, in order; those of system messages only if marks stand for them."""
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
    """Return the pictures of a prompt with their places; ``pictures`` has their bytes, by key.

    None where the prompt has more or fewer placeholders than the messages have pictures: the template left some out.
    Engines hang, fail or read other pictures then, so none may be sent.
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


PICTURE_TOKENS = (
    "<|image_pad|>",  # Qwen 2 to 3 VL
    "<|media_pad|>",  # Kimi VL, Kimi K2.5
    "<start_of_image>",  # Gemma 3
    "<image_soft_token>",  # Gemma 3n
    "<|image|>",  # GLM 4.5V, Llama 4, Gemma 4
    "[IMG]",  # Pixtral, Mistral 3
    "<IMG_CONTEXT>",  # InternVL
    "<|IMG_PATCH|>",  # Command A Vision
    "<image>",  # LLaVA, SmolVLM, LFM 2 VL
)
"""Tokens that engines expand to a picture, of those that templates print for one. Others only surround it."""


def find_picture_token(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that ``template`` prints exactly once for a picture; None without, or if several."""
    if template.capabilities.image is None:
        return None
    printed = [_added_tokens(template, tokenizer, vision=vision) for vision in (True, False)]
    added = printed[0] - printed[1]
    known = [text for text in PICTURE_TOKENS if added[text]] or [text for text in added if added[text]]
    if not known or added[known[0]] != 1 or (known[0] not in PICTURE_TOKENS and len(known) > 1):
        return None
    return tokenizer.added_tokens[known[0]]


def _added_tokens(template: ChatTemplate, tokenizer: Tokenizer, *, vision: bool) -> Counter[str]:
    conversation = Conversation((Turn("user", (Image(), Text("question"))),))
    try:
        text = template.render(conversation, render_parts=str, guard=tokenizer.guard, vision=vision)
    except InvalidRequest:
        return Counter()
    texts = {id: text for text, id in tokenizer.added_tokens.items()}
    return Counter(texts[id] for id in tokenizer.encode(text) if id in texts)
