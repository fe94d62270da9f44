"""What the tests of constraints ask for, said once for all ways of writing them."""

from __future__ import annotations

from singletree import families
from singletree.conversation import Tool, ToolCall
from singletree.parsing.family import Family

WITH_CALLS = [f for f in families.table() if f.forms]
WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    strict=True,
)
TIME = Tool("get_time")
PARIS = ToolCall("get_weather", '{"city": "Paris", "days": 3}', "abcdefghi")
NOON = ToolCall("get_time", "{}", "123456789")
BREAKING = ['{"days": 3}', '{"city": "x", "days": "soon"}', '{"city": "x", "unit": "k"}']
"""Arguments that the schema of ``WEATHER`` refuses."""


def a_call(family: Family, arguments: str = PARIS.arguments, name: str = "get_weather") -> ToolCall:
    """A call with these arguments, under an id that the family can spell."""
    assert family.forms
    return ToolCall(name, arguments, "abcdefghi")


PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Update File: " filename LF change_line+
filename: /(.+)/
change_line: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""
GOOD_PATCH = '*** Begin Patch\n*** Update File: a.py\n-x = "1" / 2\n+y = </parameter>\n*** End Patch'
BAD_PATCH = GOOD_PATCH.replace("Update", "Improve")
"""A grammar such as that of Codex's ``apply_patch``, a text that it takes, and one that it refuses."""
