"""Compile chat templates in the Jinja environment that they are written for: Hugging Face's, sandboxed.

https://github.com/huggingface/transformers, utils/chat_template_utils.py
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from jinja2.utils import Namespace

from singletree.errors import BadConfiguration
from singletree.prompts.template.incremental_render import (
    ENTER,
    LOOP_CONTEXT,
    TrackedLoopContext,
    enter_loop,
    make_loop_context,
    track_loops,
)
from singletree.prompts.template.source_json import SourceObject, tojson
from singletree.prompts.template.template_loops import SearchLoopContext, method_calls, nodes_below

_MUTATORS = frozenset(
    {"append", "extend", "insert", "pop", "remove", "update", "setdefault", "clear", "sort", "reverse"}
)


_PLAIN = {kind: frozenset(dir(kind)) for kind in (dict, SourceObject)}
"""Mappings without attributes except those of their type: every other name is a key."""

_LOOPS = (LoopContext, TrackedLoopContext, SearchLoopContext)
_LOOP = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))
_STRING = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))
"""The methods of strings that the sandbox allows without a check: all but ``format`` and ``format_map``."""


class Refusal(TemplateError):
    """Raised when a template calls ``raise_exception``, with its message."""


class _Generation(Extension):
    """Replace ``{% generation %} … {% endgeneration %}``, which marks text to train on, by its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class has it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Generator(CodeGenerator):
    """Notes the variables that the template reads and does not set: jinja2's own search generates the code again."""

    def enter_frame(self, frame: Frame) -> None:
        super().enter_frame(frame)
        for action, name in frame.symbols.loads.values():
            if action == "resolve" and name not in self.environment.globals:
                self.environment.variables.add(name)  # type: ignore[attr-defined]


class _Shortcuts(SandboxedEnvironment):
    """Skips checks whose result is known: a key of a mapping costs the sandbox an exception each time.

    Attributes:
        variables: the names that the compiled template looks up.
    """

    code_generator_class = _Generator

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.variables: set[str] = set()

    def getattr(self, obj: Any, attribute: str) -> Any:
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
        """Call ``function`` as the sandbox does, which allows the methods of strings; they take no context."""
        if function is enter_loop:
            return enter_loop(context, *args)
        if function is Namespace or (
            type(function) is BuiltinMethodType
            and type(function.__self__) is str
            and function.__name__ in _STRING
        ):
            # Compiled templates pass these to every function; only functions that take a context use them.
            kwargs.pop("_block_vars", None)
            kwargs.pop("_loop_vars", None)
            return function(*args, **kwargs)
        return super().call(context, function, *args, **kwargs)


class _Immutable(_Shortcuts, ImmutableSandboxedEnvironment):
    pass


class CompiledTemplate(NamedTuple):
    """A template with its syntax tree, whether its loops are tracked (``incremental_render``), and its variables."""

    template: Template
    tree: nodes.Template
    is_tracked: bool
    variables: frozenset[str]


def compile_template(source: str, now: Callable[[], datetime]) -> CompiledTemplate:
    """Compile ``source``.

    Templates that change lists in place (Kimi K2) need the sandbox that allows it; the others get the strict one.
    Raises BadConfiguration if ``source`` is not a template.
    """
    try:
        environment = _environment(_Immutable, now)
        tree = environment.parse(source)
        if _mutates(tree):
            environment = _environment(_Shortcuts, now)
            tree = environment.parse(source)
        tracked = [] if _mutates(tree) else track_loops(tree)
        # Parsed once: half of what it takes to load a template.
        code = environment.compile(tree)
        # A plain dictionary: jinja2's own, a ``ChainMap``, is copied by Python code for each prompt.
        template = environment.template_class.from_code(environment, code, {**environment.globals})
        if tracked:
            template.root_render_func.__globals__[LOOP_CONTEXT] = make_loop_context
        for loop, iterable in tracked:
            loop.iter = iterable
        return CompiledTemplate(template, tree, bool(tracked), frozenset(environment.variables))
    except (TemplateError, RecursionError) as error:  # nested too deeply for the parser
        raise BadConfiguration(
            f"the chat template is not valid Jinja: {error}; give another with --chat-template"
        ) from error


def _environment(kind: type[_Shortcuts], now: Callable[[], datetime]) -> _Shortcuts:
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals[ENTER] = enter_loop
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment


def _raise_exception(message: Any) -> NoReturn:
    raise Refusal(str(message))


def _mutates(tree: nodes.Template) -> bool:
    return any(method in _MUTATORS for method, _ in method_calls(nodes_below(tree)))
