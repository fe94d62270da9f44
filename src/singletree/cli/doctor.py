"""``singletree doctor``: check a model before it is served, or show what this machine has and which models fit."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    from singletree.engines.weights.progress import TerminalProgress
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
    """Print a table of the findings, then each problem with its cure."""
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


_PLACES = {"memory": "llama.cpp", "gpu": "vLLM, SGLang"}
_GIB = 2**30


def print_machine(*, json: bool) -> None:
    """Print memory, devices, installed engines, and which models fit.

    Args:
        json: print JSON instead of tables.
    """
    report = machine_report()
    if json:
        print_value(report)
    else:
        _print_machine(report)


def machine_report() -> dict[str, Any]:
    """Return what ``singletree doctor --machine`` prints, as JSON values; memory is in bytes."""
    from singletree.engines.devices import (
        ENGINE_PACKAGES,
        find_gpus,
        installed_version,
        processor_name,
        usable_cores,
        usable_memory,
    )
    from singletree.server.models.model_sizes import find_fits

    gpus, memory = find_gpus(), usable_memory()
    return {
        "processor": processor_name(),
        "cores": usable_cores(),
        "memory": memory,
        "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
        "engines": {title: installed_version(names) for title, _, names in ENGINE_PACKAGES.values()},
        "models": [dataclasses.asdict(fit) for fit in find_fits(memory, gpus)],
    }


def _print_machine(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from singletree.engines.devices import ENGINE_PACKAGES
    from singletree.server.models.model_sizes import AGENT_WINDOW

    console = Console(highlight=False)
    machine = Table(box=None, pad_edge=False, show_header=False)
    machine.add_row("processor", escape(f"{report['processor']}, {report['cores']} cores to use"))
    machine.add_row("memory", f"{report['memory'] / _GIB:.1f} GiB")
    for gpu in report["gpus"]:
        free = "" if gpu["free"] is None else f", {gpu['free'] / _GIB:.1f} free"
        machine.add_row("GPU", escape(f"{gpu['name']}, {gpu['memory'] / _GIB:.1f} GiB{free}"))
    if not report["gpus"]:
        machine.add_row("GPU", "none")
    for extra, (title, version) in zip(ENGINE_PACKAGES, report["engines"].items(), strict=True):
        machine.add_row(title, escape(version or f"not installed: pip install 'singletree[{extra}]'"))
    console.print(machine)
    models = Table(box=None, pad_edge=False, title_justify="left")
    for column in ("model", "engine", "weights", "window", "streams"):
        models.add_column(column, justify="left" if column in ("model", "engine") else "right", no_wrap=True)
    for fit in report["models"]:
        fits = (f"{fit['window']:,}", str(fit["streams"])) if fit["window"] else ("does not fit", "")
        models.add_row(fit["model"], _PLACES[fit["where"]], f"{fit['weights_bytes'] / 10**9:.1f} GB", *fits)
    console.print()
    console.print(models)
    console.print(
        f"\nstreams: sessions of {AGENT_WINDOW:,} tokens, or of the window if that is shorter, in the KV cache at "
        "once. GGUF files have about 4 bits a weight, the others the checkpoint's own."
    )
