"""What a broken prompt lacks of the earlier one: tokens, messages, tools."""

from __future__ import annotations

from singletree.server.inspect.turn_record import LostPart
from singletree.server.sessions.divergence import ToolList
from singletree.server.sessions.sessions import Opened


def lost_part(opened: Opened, *, keeps_texts: bool) -> LostPart | None:
    """Return what a broken prompt lacks of the one that it was compared with; None where there is none."""
    record = opened.compared
    if record is None:
        return None
    tokens = record.tokens_between(opened.step.matched, record.expected) if keeps_texts else None
    rest = record.messages[opened.same_messages :]
    return LostPart(tokens, rest, *_tool_changes(record.tools, opened.tools))


def _tool_changes(
    old: ToolList, new: ToolList
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], bool]:
    """Return the names of the tools that were added, removed and changed, and whether their order changed."""
    if old.encoded == new.encoded:
        return (), (), (), False
    was, now = ({tool.name: tool for tool in tools.tools} for tools in (old, new))
    changed = tuple(name for name in now if name in was and not _is_same_tool(was[name], now[name]))
    common = [name for name in was if name in now], [name for name in now if name in was]
    added, removed = tuple(name for name in now if name not in was), tuple(n for n in was if n not in now)
    return added, removed, changed, common[0] != common[1]


def _is_same_tool(one: object, other: object) -> bool:
    fields = ("description", "parameters", "kind")
    return all(getattr(one, name) == getattr(other, name) for name in fields)
