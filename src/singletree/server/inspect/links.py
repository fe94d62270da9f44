"""Links into the inspector's page, relative to the server."""

from __future__ import annotations

from singletree.server.inspect.turn_record import InspectedTurn, session_id

PAGE = "/inspect"
INSPECT_HEADER = b"x-singletree-inspect"


def session_link(key: str) -> str:
    """Return the link to the session ``key``."""
    return f"{PAGE}#/sessions/{session_id(key)}"


def turn_link(turn: InspectedTurn) -> str:
    """Return the link to ``turn``."""
    return f"{PAGE}#/sessions/{turn.session}/turns/{turn.id}"
