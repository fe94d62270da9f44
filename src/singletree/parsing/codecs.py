"""Which codec reads the arguments of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from singletree.parsing.arguments import Codec, JsonArguments, TagParameters
from singletree.parsing.grammar import CallPatterns
from singletree.parsing.literals import LiteralArguments


def codec_for(form: CallPatterns, parameters: Mapping[str, Any] | None) -> Codec:
    """A fresh codec for one call of ``form``; ``parameters`` is the tool's schema."""
    if form.parameters:
        return TagParameters(form.parameters, parameters)
    if form.form.literals:
        return LiteralArguments(form.form.literals, form.quote, form.end)
    return JsonArguments()
