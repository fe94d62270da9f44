"""The names of what belongs to one of several owners, where those of all owners stand in one place."""

from __future__ import annotations

OWNER_END = "/"
"""Ends the owner in an ``owned_id``."""


def owned_id(owner: str, id: str) -> str:
    """Return ``id`` as it is called among the ids of all owners; itself for an empty owner."""
    return f"{owner}{OWNER_END}{id}" if owner else id
