"""Compare minijinja with jinja2 on chat templates: whether they print the same bytes, and the time of a prompt.

    python -m benchmarks.template_engines [FOLDER ...] [--steps N] [--show]

``FOLDER`` holds ``*.jinja`` files, also in subfolders; by default it is the folder of our own templates. minijinja is
no dependency: install it first (``pip install minijinja``), or nothing is measured.
"""

from __future__ import annotations

import argparse
import importlib
import math
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from singletree.conversation import Conversation, Part, Reasoning, Text, Tool, ToolCall, ToolResult, Turn
from singletree.errors import SingletreeError
from singletree.prompts.template.chat_template import ChatTemplate, RenderCheckpoint, RenderPrompt
from singletree.prompts.template.incremental_render import Rendering, RenderRecord
from singletree.prompts.template.placeholders import DELIMITER
from singletree.prompts.template.source_json import tojson

OWN = Path(__file__).parents[1] / "tests" / "families" / "templates"
NOW = datetime(2026, 11, 22)
REPEATS = 5
_PATH = {"type": "object", "properties": {"path": {"type": "string"}, "deep": {"type": "boolean"}}}
TOOLS = tuple(Tool(f"tool_{number}", "Reads <files> & folders", _PATH) for number in range(8))

_MARK = re.compile(r"(\{%-?)\s*(generation|endgeneration)\s*(-?%\})")
_CONDITIONS = {"generation": "if true", "endgeneration": "endif"}

Render = Callable[[dict[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of processor time for the prompt of the last step of a session.

    Attributes:
        jinja: by jinja2 in the environment of Hugging Face's chat templates.
        minijinja: by minijinja, of the same messages; None where it prints other bytes.
        step: by jinja2 with the loops of the step before, as ``incremental_render`` enters them.
        full: by ``ChatTemplate`` without an earlier prompt; this includes making the messages.
        grown: by ``ChatTemplate`` with the prompt of the step before.
    """

    jinja: float
    minijinja: float | None
    step: float
    full: float
    grown: float


def conversation(steps: int) -> Conversation:
    """Return a session of a coding agent: a question, then ``steps`` calls with thought, text and result."""
    turns = [
        Turn("system", (Text("You work in a repository.\nBe brief."),)),
        Turn("user", (Text("What do the tests <cover>? é 👍"),)),
    ]
    for number in range(steps):
        call = ToolCall(
            f"tool_{number % 8}", f'{{"path": "src/é{number}.py", "deep": true}}', f"call{number:05d}"
        )
        thought = Reasoning(f"File {number} is next.\nIt may be long.")
        turns.append(Turn("assistant", (thought, Text(f"Reading file {number}."), call)))
        lines = "\n".join(f"{line}: if a < {number}: return 'x & y'" for line in range(40))
        turns.append(Turn("tool", (ToolResult(call.id, (Text(lines),)),)))
        if number % 10 == 9:
            turns.append(Turn("assistant", (Text("Done so far."),)))
            turns.append(Turn("user", (Text("Go on."),)))
    return Conversation(tuple(turns), TOOLS)


def render_parts(parts: tuple[Part, ...]) -> str:
    """Return an assistant's parts for templates that have no field for them."""
    return "".join(p.name + p.arguments if isinstance(p, ToolCall) else getattr(p, "text", "") for p in parts)


def in_jinja(source: str) -> Render:
    """Return a function that renders with jinja2, set up as Hugging Face does it."""
    kind = SandboxedEnvironment if ".append(" in source else ImmutableSandboxedEnvironment
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals.update(_functions())
    template = environment.from_string(_without_generation(source))
    return lambda variables: str(template.render(variables))


def in_minijinja(source: str, minijinja: Any) -> Render:
    """Return the same for minijinja, with the methods of Python's strings and dictionaries switched on."""
    environment = minijinja.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        pycompat=True,
        auto_escape_callback=lambda name: False,
        templates={"chat": _without_generation(source)},
    )
    environment.add_filter("tojson", tojson)
    for name, function in _functions().items():
        environment.add_global(name, function)
    return lambda variables: str(environment.render_template("chat", **variables))


def _functions() -> dict[str, Callable[[str], str]]:
    def refuse(message: str) -> str:
        raise TemplateError(message)

    return {"raise_exception": refuse, "strftime_now": lambda form: NOW.strftime(form)}


def _without_generation(source: str) -> str:
    """Return ``source`` with a condition that always holds for the marks of text to train on: no part of Jinja."""
    return _MARK.sub(lambda found: f"{found[1]} {_CONDITIONS[found[2]]} {found[3]}", source)


def variables_of(template: ChatTemplate, given: Conversation) -> dict[str, Any]:
    """Return the variables with which ``template`` would render ``given`` in full."""
    seen: list[dict[str, Any]] = []
    render = template.render_messages

    def recorded(messages: list[Any], **context: Any) -> str:
        seen.append({**template._variables(context), "messages": messages})
        return render(messages, **context)

    template.is_tracked, tracked = False, template.is_tracked
    template.render_messages = recorded  # type: ignore[method-assign]
    try:
        template.render(given, render_parts=render_parts)
    finally:
        template.is_tracked = tracked
        del template.render_messages
    return seen[-1]


def _representable(value: Any) -> Any:
    """Replace what a string of Rust cannot hold: half of a surrogate pair, with which placeholders are marked."""
    if type(value) is dict:
        return {key: _representable(each) for key, each in value.items()}
    if type(value) is list:
        return [_representable(each) for each in value]
    return value.replace(DELIMITER, "\ue000") if isinstance(value, str) else value


def milliseconds(work: Callable[[], object]) -> float:
    """Return the median processor time of ``work``."""
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        times.append((time.process_time() - began) * 1e3)
    return statistics.median(times)


def milliseconds_in_jinja(template: ChatTemplate, before: RenderCheckpoint, given: Conversation) -> float:
    """Return the median processor time that jinja2 takes of a prompt that continues ``before``."""
    times: list[float] = []

    def timed(self: Rendering, *arguments: Any) -> RenderRecord:
        began = time.process_time()
        record = render(self, *arguments)
        times.append((time.process_time() - began) * 1e3)
        return record

    render = Rendering.render
    Rendering.render = timed  # type: ignore[assignment, method-assign]
    try:
        for _ in range(REPEATS):
            RenderPrompt(template, render_parts).run(given, before)
    finally:
        Rendering.render = render  # type: ignore[method-assign]
    return statistics.median(times) if times else math.nan


def compare(source: str, steps: int, minijinja: Any) -> tuple[str, Cost | None]:
    """Return how minijinja's prompt compares with jinja2's, in a word, and the times."""
    given, shorter = conversation(steps), conversation(steps - 1)
    try:
        template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", now=lambda: NOW)
        _, before = RenderPrompt(template, render_parts).run(shorter, None)
        variables = {name: _representable(value) for name, value in variables_of(template, given).items()}
        ours = in_jinja(source)
        text = ours(variables)
    except (SingletreeError, TemplateError, TypeError) as error:
        return f"not rendered by jinja2: {type(error).__name__}: {str(error)[:100]}", None
    theirs: float | None = None
    try:
        other = in_minijinja(source, minijinja)
        if other(variables) == text:
            verdict, theirs = "same bytes", milliseconds(lambda: other(variables))
        else:
            verdict = "other bytes"
    except Exception as error:  # whatever minijinja raises is a template that it does not render
        verdict = f"refused by minijinja: {str(error).splitlines()[0][:100]}"
    cost = Cost(
        milliseconds(lambda: ours(variables)),
        theirs,
        milliseconds_in_jinja(template, before, given),
        milliseconds(lambda: template.render(given, render_parts=render_parts)),
        milliseconds(lambda: RenderPrompt(template, render_parts).run(given, before)),
    )
    return verdict, cost


def report(results: Iterable[tuple[str, Cost | None]]) -> list[str]:
    """Return the lines of the report for one folder."""
    verdicts, costs = [], []
    for verdict, cost in results:
        verdicts.append(verdict.partition(":")[0])
        costs += [cost] if cost else []
    counted = Counter(verdicts)
    rendered = sum(number for verdict, number in counted.items() if not verdict.startswith("not"))
    lines = [f"  {verdict}: {number}" for verdict, number in sorted(counted.items())]
    lines.append(f"  share of the same bytes: {counted['same bytes'] / max(rendered, 1):.1%} of {rendered}")
    both = [cost for cost in costs if cost.minijinja is not None]
    for name, times in (
        ("jinja2", [c.jinja for c in both]),
        ("minijinja", [c.minijinja or 0.0 for c in both]),
        ("jinja2, one step on", [c.step for c in both if not math.isnan(c.step)]),
        ("ChatTemplate, in full", [c.full for c in both]),
        ("ChatTemplate, one step on", [c.grown for c in both]),
    ):
        median = f"{statistics.median(times):.2f} ms, {len(times)} templates" if times else "no prompt"
        lines.append(f"  {name}: {median}")
    return lines


def main() -> None:
    """Measure each folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.template_engines", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, default=[OWN], metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=50, help="calls in the session")
    parser.add_argument("--show", action="store_true", help="name every template that differs")
    options = parser.parse_args()
    try:
        minijinja = importlib.import_module("minijinja")
    except ImportError:
        print("skipped: minijinja is not installed (pip install minijinja)")
        sys.exit(0)
    for folder in options.folders:
        results = []
        for path in sorted(folder.rglob("*.jinja")):
            result = compare(path.read_text(encoding="utf-8"), options.steps, minijinja)
            results.append(result)
            if options.show and result[0] != "same bytes":
                print(f"  {path.relative_to(folder)}: {result[0]}")
        print(
            f"{folder.name}: {len(results)} templates, a session of {options.steps} calls, median CPU ms of a prompt"
        )
        print("\n".join(report(results)))


if __name__ == "__main__":
    main()
