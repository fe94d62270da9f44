"""``singletree families``: list the model families, or draft the declaration of a new one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from singletree import families
from singletree.cli.inspect import read_text
from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.errors import BadConfiguration
from singletree.parsing.family import Family
from singletree.parsing.render_turn import render_turn

if TYPE_CHECKING:
    from singletree.drafting.template_turns import Trial


HEADS = ("name", "reads", "also called", "models", "begins", "sample")
"""Titles of the columns of ``family_cells``."""


def family_cells(family: Family) -> Sequence[str]:
    """Return what the table of families says of one."""
    halves = [(n, "tools") for n in family.tool_aliases] + [
        (n, "reasoning") for n in family.reasoning_aliases
    ]
    aliases = [*sorted(family.aliases), *(f"{name} ({half} only)" for name, half in sorted(halves))]
    begins = "in reasoning" if family.starts_open else ""
    last: Part = ToolCall("get_weather", '{"city": "Paris"}', "abcdefghi") if family.forms else Text("Hi")
    parts: list[Part] = [Reasoning("plan"), last] if family.reasoning else [last]
    sample = render_turn(family, parts).replace("\n", "⏎")
    return family.name, family.kind, ", ".join(aliases), ", ".join(family.models), begins, sample


app = App(name="families", help="List the model families, or draft a new one.")


@app.default
def list_families() -> None:
    """List the model families."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text as Plain

    table = Table(box=None, pad_edge=False)
    for head in HEADS:
        table.add_column(head, overflow="fold")
    for family in families.table():
        table.add_row(*map(Plain, family_cells(family)))
    Console().print(table)


@app.command
def draft(
    template: Path, *, name: str = "", samples: Annotated[bool, Parameter(negative="")] = False
) -> None:
    """Propose a declaration for the family that a chat template belongs to.

    The template renders turns with known parts. The declaration is taken from the text between the parts, and is
    tested on the same turns. Exits with 1, and prints the differences, when it does not parse all of them correctly.

    Parameters
    ----------
    template
        Jinja file.
    name
        Name of the family; the file's name by default.
    samples
        Print sample turns as TOML as well, for tests/families/samples.
    """
    import sys

    from singletree.drafting.draft import sample_of, source_of
    from singletree.drafting.template_turns import draft_from_template, try_family
    from singletree.errors import BadFamily
    from singletree.server.models.chat_format import template_alone

    chat_template = template_alone(read_text(str(template)))
    family_name = name or re.sub(r"\W+", "_", template.name.partition(".jinja")[0]).strip("_").lower()
    try:
        family = draft_from_template(chat_template, family_name)
    except BadFamily as error:
        raise BadConfiguration(f"{template}: no family can be drafted: {error.message}") from None
    trials = try_family(family, chat_template)
    print(source_of(family))
    prints_calls = chat_template.capabilities.calls
    for line in _report(trials, prints_calls=prints_calls, has_calls=bool(family.forms)):
        print(f"# {line}")
    if samples:
        for trial in trials:
            print()
            written = trial.rendered
            print(sample_of(written.case, written.text, written.tail, written.parts))
    if not all(trial.agrees for trial in trials) or (prints_calls and not family.forms):
        sys.exit(1)


def _report(trials: list[Trial], *, prints_calls: bool, has_calls: bool) -> list[str]:
    good = [trial.rendered.case for trial in trials if trial.agrees]
    lines = [
        f"Parses {len(good)} of {len(trials)} turns that the template rendered: {', '.join(good) or 'none'}."
    ]
    if not prints_calls:
        lines.append("The template prints no tool calls, so none could be drafted.")
    elif not has_calls:
        lines.append("The template prints tool calls, but in a way that no declaration can express.")
    for trial in trials:
        if not trial.agrees:
            lines += [
                f"{trial.rendered.case}: the template rendered {trial.rendered.text!r},",
                f"  expected  {_short(trial.rendered.parts)}",
                f"  parsed as {_short(trial.read)}.",
            ]
    return lines


def _short(parts: tuple[object, ...]) -> str:
    return ", ".join(map(repr, parts)) or "nothing"
