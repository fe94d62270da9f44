"""The shortcuts of the sandbox answer as the sandbox does."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from jinja2 import Template, Undefined
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from singletree.prompts.template.jinja_environment import compile_template
from singletree.prompts.template.source_json import read_object

MESSAGE = {
    "role": "user",
    "content": "a {0.__class__}",
    "items": "shadowed",
    "__class__": "forged",
    "_own": 1,
}
OBJECTS: dict[str, Any] = {
    "message": MESSAGE,
    "written": read_object('{"b": 1.50, "written": 2, "keys": 3}', str),
    "list": [1],
    "text": "a {0.__class__}",
    "nothing": None,
}
NAMES = sorted(
    {
        *("role", "content", "absent", "items", "keys", "get", "update", "clear", "append", "b", "written"),
        *("pinned", "strip", "format", "format_map", "_own", "__class__", "__init__", "mro", "index"),
    }
)


def _answer(environment: SandboxedEnvironment, thing: Any, name: str) -> Any:
    found = environment.getattr(thing, name)
    if isinstance(found, Undefined):
        return found._undefined_message
    return found() if name in ("items", "keys") and callable(found) else type(found).__name__, str(found)[:20]


@pytest.mark.parametrize("thing", OBJECTS)
@pytest.mark.parametrize("name", NAMES)
def test_attributes(thing: str, name: str) -> None:
    template, *_ = compile_template("", datetime.now)
    plain = ImmutableSandboxedEnvironment()
    assert isinstance(template.environment, ImmutableSandboxedEnvironment)
    ours, theirs = (_answer(each, OBJECTS[thing], name) for each in (template.environment, plain))
    assert str(ours) == str(theirs)


def _outcome(template: Template) -> str:
    try:
        return template.render(m=MESSAGE)
    except SecurityError as error:
        return f"refused: {error}"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for x in [1, 2] %}{{ loop.index }}{{ loop.last }}{{ loop.absent }}{% endfor %}", "1False2True"),
        ("{% set ns = namespace(a=1) %}{{ ns.a }}{{ ns.b }}{% set ns.b = 2 %}{{ ns.b }}", "12"),
        ("{{ m.absent is defined }}{{ m.content.startswith('a') }}", "FalseTrue"),
        ("{% for x in ['b,c'] %}{{ x.split(',', maxsplit=1)[1].upper() }}{% endfor %}", "C"),
        ("{{ m.__class__ }}", ""),
        ("{{ m.content.__class__.mro() }}", "refused"),
        ("{{ 'a {0.mro}'.format(m) }}", "a "),
        ("{{ m.content.format([]) }}", "a "),
        ("{% set ns = namespace(f='{0.__class__}'.format) %}{{ ns.f([]) }}", ""),
        ("{% for x in [1] %}{{ loop.__class__.mro() }}{% endfor %}", "refused"),
    ],
)
def test_templates(source: str, text: str) -> None:
    template, *_ = compile_template(source, datetime.now)
    outcome = _outcome(template)
    assert outcome == _outcome(ImmutableSandboxedEnvironment().from_string(source))
    assert outcome.startswith(text)
