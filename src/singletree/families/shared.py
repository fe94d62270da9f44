"""Pieces of formats that several vendors share."""

from singletree.parsing.family import Form

THINK = ("<think>", "</think>")
"""Reasoning between bare tags."""

THINK_IN_LINES = ("<think>\n", "\n</think>\n\n")
"""Reasoning between tags in lines of their own, with an empty line behind them."""

JSON_CALL = '{"name": "{name}", "arguments": {args}}'
"""A call as one JSON object."""


def json_list(opener: str, closer: str, *, joiner: str = ", ") -> Form:
    """Return the form of calls as JSON objects with ``joiner`` between them, all inside one pair of texts."""
    return Form(call=JSON_CALL, calls=(opener, closer), joiner=joiner)


def json_each(opener: str, closer: str, *, joiner: str = "") -> Form:
    """Return the form of calls as JSON objects, each inside its own pair of texts."""
    return Form(call=JSON_CALL, calls=(opener, closer), wrap_each=True, joiner=joiner)
