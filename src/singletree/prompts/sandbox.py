"""The Jinja that chat templates are written for: Hugging Face's environment, sandboxed.

https://github.com/huggingface/transformers, utils/chat_template_utils.py
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from singletree.errors import BadConfiguration
from singletree.prompts.written import tojson

_MUTATORS = frozenset(
    {"append", "extend", "insert", "pop", "remove", "update", "setdefault", "clear", "sort", "reverse"}
)


class Refusal(TemplateError):
    """What a template's own ``raise_exception`` says."""


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}`` marks what to train on; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class has it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str, now: Callable[[], datetime]) -> tuple[Template, nodes.Template]:
    """The template and its syntax tree. Raises BadConfiguration when ``source`` is no template.

    Templates that change lists in place (Kimi K2) need the sandbox that allows it; the others get the strict
    one.
    """
    try:
        environment = _environment(ImmutableSandboxedEnvironment, now)
        tree = environment.parse(source)
        if _mutates(tree):
            environment = _environment(SandboxedEnvironment, now)
            tree = environment.parse(source)
        # Parsed once: half of what it takes to load a template.
        code = environment.compile(tree)
        return environment.template_class.from_code(environment, code, environment.make_globals(None)), tree
    except TemplateError as error:
        raise BadConfiguration(
            f"the chat template is no valid Jinja: {error}; give another with --custom-jinja-template"
        ) from error


def _environment(kind: type[SandboxedEnvironment], now: Callable[[], datetime]) -> Environment:
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment


def _raise_exception(message: Any) -> NoReturn:
    raise Refusal(str(message))


def _mutates(tree: nodes.Template) -> bool:
    return any(
        isinstance(call.node, nodes.Getattr) and call.node.attr in _MUTATORS
        for call in tree.find_all(nodes.Call)
    )
