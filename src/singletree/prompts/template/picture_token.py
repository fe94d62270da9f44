"""Find the token that a chat template prints for a picture."""

from __future__ import annotations

from collections import Counter

from singletree.conversation import Conversation, Image, Text, Turn
from singletree.errors import InvalidRequest
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.prompts.tokenizer.tokenizer import Tokenizer

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
    """Return the id of the token that ``template`` prints exactly once for a picture and that engines expand.

    None if the template accepts no picture, or prints no such token, or several that are not in ``PICTURE_TOKENS``.
    """
    if template.capabilities.image is None:
        return None
    printed = [_added_tokens(template, tokenizer, vision=vision) for vision in (True, False)]
    added = printed[0] - printed[1]
    known = [text for text in PICTURE_TOKENS if added[text]] or [text for text in added if added[text]]
    if not known or added[known[0]] != 1 or (known[0] not in PICTURE_TOKENS and len(known) > 1):
        return None
    return tokenizer.added_tokens[known[0]]


def _added_tokens(template: ChatTemplate, tokenizer: Tokenizer, *, vision: bool) -> Counter[str]:
    """Return the added tokens in the prompt of a message with a picture, counted."""
    conversation = Conversation((Turn("user", (Image(), Text("question"))),))
    try:
        text = template.render(conversation, render_parts=str, guard=tokenizer.guard, vision=vision)
    except InvalidRequest:
        return Counter()
    texts = {id: text for text, id in tokenizer.added_tokens.items()}
    return Counter(texts[id] for id in tokenizer.encode(text) if id in texts)
