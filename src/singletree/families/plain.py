"""Formats that belong to no vendor."""

from singletree.families.shared import THINK_IN_LINES
from singletree.parsing.family import Family

PLAIN = Family(name="plain", source="no markers at all: every word is text")

BASIC = Family(
    name="basic",
    reasoning_aliases=("holo2",),
    reasoning=THINK_IN_LINES,
    models=("any model that thinks between <think> and </think>",),
    source="https://docs.nvidia.com/dynamo (reasoning parser `basic`)",
)
