"""The Jinja that chat templates are written for: Hugging Face's environment, sandboxed.

https://github.com/huggingface/transformers, utils/chat_template_utils.py
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from jinja2.utils import Namespace

from singletree.errors import BadConfiguration
from singletree.prompts.template_loop import (
    ENTER,
    LOOP_CONTEXT,
    WatchedLoop,
    enter_loop,
    loop_context,
    watch_loops,
)
from singletree.prompts.written import WrittenObject, tojson

_MUTATORS = frozenset(
    {"append", "extend", "insert", "pop", "remove", "update", "setdefault", "clear", "sort", "reverse"}
)


_PLAIN = {kind: frozenset(dir(kind)) for kind in (dict, WrittenObject)}
"""Mappings that keep no attribute of their own beside those of their type: every other name is a key."""

_LOOPS = (LoopContext, WatchedLoop)
_LOOP = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))
_STRING = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))
"""The sandbox asks about ``format`` and ``format_map`` alone."""


class Refusal(TemplateError):
    """What a template's own ``raise_exception`` says."""


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}`` marks what to train on; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class has it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Shortcuts(SandboxedEnvironment):
    """Answers what templates ask for most without the sandbox's questions, where its answer is known beforehand.

    A key of a mapping costs the sandbox an exception each time, and a long conversation has thousands.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox does it."""
        kind = type(obj)
        own = _PLAIN.get(kind)
        if own is not None and attribute not in own:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if (kind is str and attribute in _STRING) or (kind in _LOOPS and attribute in _LOOP):
            return getattr(obj, attribute)
        if kind is Namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As the sandbox does it: it allows the methods of strings, which take no context."""
        if (
            type(function) is BuiltinMethodType
            and type(function.__self__) is str
            and function.__name__ in _STRING
        ):
            # Compiled templates hand these to functions of a context.
            for hidden in ("_block_vars", "_loop_vars"):
                kwargs.pop(hidden, None)
            return function(*args, **kwargs)
        return super().call(context, function, *args, **kwargs)


class _Immutable(_Shortcuts, ImmutableSandboxedEnvironment):
    pass


def compile_template(source: str, now: Callable[[], datetime]) -> tuple[Template, nodes.Template, bool]:
    """The template, its syntax tree, and whether its loops are watched (``template_loop``).

    Raises BadConfiguration when ``source`` is no template.

    Templates that change lists in place (Kimi K2) need the sandbox that allows it; the others get the strict
    one.
    """
    try:
        environment = _environment(_Immutable, now)
        tree = environment.parse(source)
        if _mutates(tree):
            environment = _environment(_Shortcuts, now)
            tree = environment.parse(source)
        watched = [] if _mutates(tree) else watch_loops(tree)
        # Parsed once: half of what it takes to load a template.
        code = environment.compile(tree)
        template = environment.template_class.from_code(environment, code, environment.make_globals(None))
        template.root_render_func.__globals__[LOOP_CONTEXT] = loop_context
        for loop, iterable in watched:
            loop.iter = iterable
        return template, tree, bool(watched)
    except TemplateError as error:
        raise BadConfiguration(
            f"the chat template is no valid Jinja: {error}; give another with --custom-jinja-template"
        ) from error


def _environment(kind: type[SandboxedEnvironment], now: Callable[[], datetime]) -> Environment:
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals[ENTER] = enter_loop
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment


def _raise_exception(message: Any) -> NoReturn:
    raise Refusal(str(message))


def _mutates(tree: nodes.Template) -> bool:
    return any(
        isinstance(call.node, nodes.Getattr) and call.node.attr in _MUTATORS
        for call in tree.find_all(nodes.Call)
    )
