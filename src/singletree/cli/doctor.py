"""``singletree doctor``: check a model before it is served."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from singletree.cli.inspect import ModelFlags, print_value, read_text
from singletree.errors import BadConfiguration
from singletree.testing import byte_model

if TYPE_CHECKING:
    from singletree.drafting.diagnosis import Finding
    from singletree.server.models.chat_format import ChatFormat
    from singletree.server.settings.config import Config

_TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")


def doctor(
    model: str | None = None,
    *,
    flags: ModelFlags = ModelFlags(),  # noqa: B008 (frozen)
    machine: Annotated[bool, Parameter(negative="")] = False,
    stability_off: Annotated[
        tuple[str, ...], Parameter(name="--stability-off", consume_multiple=True, negative="")
    ] = (),
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Check a model: what was detected, and what will not work. Loads no weights. Or show what this machine can run.

    Exits with 1 when something that harnesses need does not work.

    Parameters
    ----------
    model
        Name, GGUF file, folder or Hugging Face id, as for `serve`; or a chat template (.jinja).
    machine
        Show memory, devices and installed engines, and which models fit.
    stability_off
        Names of prompt stability rules to switch off.
    json
        Print JSON.
    """
    from singletree.drafting.diagnosis import diagnose

    if machine:
        from singletree.cli.machine import print_machine

        print_machine(json=json)
        return
    if model is None:
        raise BadConfiguration("doctor: name a model or a chat template, or give --machine")
    only_template = model.endswith(_TEMPLATE_SUFFIXES)
    if only_template:
        flags = dataclasses.replace(flags, chat_template=Path(model))
    config = flags.config(byte_model.NAME if only_template else model, stability_off=stability_off)
    name, chat_format = (model, _format_of_template(config)) if only_template else _format_of_model(config)
    findings = diagnose(chat_format, tokenizer=not only_template)
    wrong = any(finding.level == "wrong" for finding in findings)
    if json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        print_value({"model": name, "works": not wrong, "findings": listed})
    else:
        _print(name, findings)
    if wrong:
        sys.exit(1)


def _format_of_model(config: Config) -> tuple[str, ChatFormat]:
    from singletree.cli.progress_bar import TerminalProgress
    from singletree.server.models import model_source
    from singletree.server.models.chat_format import load_chat_format

    with TerminalProgress() as progress:
        name, tokenizer = model_source.find_tokenizer(config, progress)
    return name, load_chat_format(config, tokenizer)


def _format_of_template(config: Config) -> ChatFormat:
    """Return the chat format of a template alone, with a tokenizer of bytes in place of the model's."""
    from singletree.server.models.chat_format import ChatFormat, choose_family, disabled_rules, template_alone

    template = template_alone(read_text(str(config.chat_template)))
    family, why = choose_family(config, template)
    return ChatFormat(
        tokenizer=byte_model.byte_tokenizer(),
        template=template,
        family=family,
        why=why,
        stability_off=disabled_rules(config),
    )


_MARKS = {"good": "", "note": "[yellow]note[/]", "wrong": "[red bold]wrong[/]"}


def _print(name: str, findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"[bold]{escape(name)}[/]\n")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    for finding in findings:
        table.add_row(finding.topic, escape(finding.found), _MARKS[finding.level])
    console.print(table)
    problems = sorted((f for f in findings if f.matter), key=lambda finding: finding.level != "wrong")
    if not problems:
        console.print("\nNo problems found.")
    for finding in problems:
        console.print(f"\n{_MARKS[finding.level]}  {finding.topic}: {escape(finding.matter)}")
        console.print(f"      → {escape(finding.cure)}")
