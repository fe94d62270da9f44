"""Convert the parts of a conversation to text, for templates that accept nothing else."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from singletree.conversation import (
    Document,
    Image,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolReference,
    ToolResult,
)
from singletree.prompts.template.capabilities import MessageDict

NO_IMAGES = "[image: this model cannot see images]"


def parts_of(content: Any) -> list[MessageDict]:
    """Return ``content`` as a list of content parts."""
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def with_error(result: ToolResult) -> tuple[Part, ...]:
    """Return the parts of a result, after "Error: " if it is an error whose first words do not show that."""
    text = "".join(part_text(part) for part in result.parts)
    if not result.is_error or "error" in text[:40].lower():
        return result.parts
    return (Text("Error: "), *result.parts)


def part_text(part: Part) -> str:
    """Return ``part`` as text; for a picture or a document that is not text, a note about what it is."""
    if isinstance(part, Text | Reasoning):
        return part.text
    if isinstance(part, Image):
        return NO_IMAGES
    if isinstance(part, Document):
        return _document_words(part)
    if isinstance(part, ToolReference):
        return f"[tool: {part.name}]"
    if isinstance(part, ToolCall):
        return part.arguments
    return "".join(part_text(inner) for inner in part.parts)


def _document_words(document: Document) -> str:
    """Return the text of a text document; for another, a note about what it is."""
    name = f" {document.title}" if document.title else ""
    kind = document.media_type or document.url or "unknown type"
    if document.media_type.startswith("text/") and document.data:
        try:
            text = base64.b64decode("".join(document.data.split()), validate=True).decode("utf-8", "replace")
        except (binascii.Error, ValueError):
            return f"[document{name}: unreadable base64]"
        return f"[document{name}]\n{text}\n[end of document{name}]"
    return f"[document{name}: this model cannot read {kind}]"
