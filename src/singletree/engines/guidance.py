"""Grammars for llguidance, which llama.cpp has built in and which follows a turn that goes on on another engine."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from singletree.engines.abilities import ABILITIES
from singletree.engines.engine import Constraint, ConstraintKind
from singletree.errors import InvalidRequest

CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = tuple(ABILITIES["llamacpp"].constraints)

_GUIDANCE = "%llguidance"
# JSON allows any amount of white space between two tokens, and small models generate it without end.
_WHITE_SPACE = {"whitespace_pattern": r"[ \n]{0,32}"}


def encode_grammar(constraint: Constraint) -> str:
    """Convert the constraint to a grammar for llama.cpp: GBNF, or Lark for the llguidance that is built into it.

    Raises InvalidRequest for a kind that llama.cpp does not support and for a text that llguidance rejects.
    """
    kind, value = constraint.kind, constraint.value
    if kind == "gbnf":
        grammar = str(value)
    elif kind == "lark":
        text = str(value)
        grammar = text if text.lstrip().startswith(_GUIDANCE) else f"{_GUIDANCE} {{}}\n{text}"
    elif kind == "regex":
        pattern = re.sub(r"(?<!\\)/", r"\/", str(value)).replace("\n", r"\n")
        grammar = f"{_GUIDANCE} {{}}\nstart: /{pattern}/"
    elif kind == "json_schema":
        grammar = f"{_GUIDANCE} {{}}\nstart: %json {json.dumps(_with_bounded_white_space(value))}"
    else:
        kinds = ", ".join(CONSTRAINT_KINDS)
        raise InvalidRequest(f"llama.cpp does not support constraints of kind {kind!r}; it supports {kinds}")
    if grammar.lstrip().startswith(_GUIDANCE):
        _validate(grammar)
    return grammar


def _with_bounded_white_space(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    return {"x-guidance": _WHITE_SPACE, **schema}


def _validate(grammar: str) -> None:
    """Ask llguidance first: when it rejects a grammar, llama.cpp generates without any constraint."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise InvalidRequest(
            "constraints need the package llguidance in addition to llama.cpp: pip install llguidance"
        ) from error
    if problem := LLMatcher.validate_grammar(grammar, None):
        raise InvalidRequest(
            f"llguidance rejects the constraint: {_summary(problem)}; simplify the schema or grammar"
        )


def _summary(problem: str) -> str:
    """Return llguidance's error message on one line, without its excerpt of the grammar."""
    lines = [line.strip() for line in problem.splitlines()]
    words = " ".join(itertools.takewhile(lambda line: " | " not in line, lines))
    return words.partition(": ")[2] or words
