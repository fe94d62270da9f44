"""``singletree doctor``: what is known of a model, and what will not work, before it is served."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from singletree.cli.looking import print_value, read_text
from singletree.server import bytes_model

if TYPE_CHECKING:
    from singletree.server.catalog import Speech
    from singletree.server.config import Config
    from singletree.server.examination import Finding

_TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")


def doctor(
    model: str,
    *,
    chat_template: Annotated[
        Path | None, Parameter(name=["--chat-template", "--custom-jinja-template"])
    ] = None,
    tool_call_parser: Annotated[
        str | None, Parameter(name=["--tool-call-parser", "--dyn-tool-call-parser"])
    ] = None,
    reasoning_parser: Annotated[
        str | None, Parameter(name=["--reasoning-parser", "--dyn-reasoning-parser"])
    ] = None,
    stability_off: Annotated[
        tuple[str, ...], Parameter(name="--stability-off", consume_multiple=True, negative="")
    ] = (),
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Say what is known of a model, and what will not work. Loads no weights.

    Exits with 1 when something that a harness relies on cannot work.

    Parameters
    ----------
    model
        A name, GGUF file, folder or Hugging Face id, as for `serve`; or a chat template (.jinja).
    chat_template
        Jinja file to use instead of the model's own chat template.
    tool_call_parser
        Family of the model's tool calls.
    reasoning_parser
        Family of the model's reasoning.
    stability_off
        Names of prompt stability rules to switch off.
    json
        Print JSON.
    """
    from singletree.server.config import Config
    from singletree.server.examination import examine

    only_template = model.endswith(_TEMPLATE_SUFFIXES)
    if only_template:
        chat_template = Path(model)
    scripted = model == bytes_model.NAME or only_template
    config = Config(
        model=None if scripted else model,
        engine="scripted" if scripted else "llamacpp",
        chat_template=chat_template,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        stability_off=stability_off,
    )
    name, speech = (model, _speech_of_template(config)) if only_template else _speech(config)
    findings = examine(speech, tokenizer=not only_template)
    wrong = any(finding.level == "wrong" for finding in findings)
    if json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        print_value({"model": name, "works": not wrong, "findings": listed})
    else:
        _print(name, findings)
    if wrong:
        sys.exit(1)


def _speech(config: Config) -> tuple[str, Speech]:
    from singletree.engines.progress import TerminalProgress
    from singletree.server import origin
    from singletree.server.catalog import speech_of

    with TerminalProgress() as progress:
        name, tokenizer = origin.tokenizer_of(config, progress)
    return name, speech_of(config, tokenizer)


def _speech_of_template(config: Config) -> Speech:
    """How a model with that template is spoken to, whatever its vocabulary."""
    from singletree.prompts.template import ChatTemplate
    from singletree.server import catalog

    source = read_text(str(config.chat_template))
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    family, why = catalog.choose_family(config, template)
    return catalog.Speech(
        tokenizer=bytes_model.bytes_tokenizer(),
        template=template,
        family=family,
        why=why,
        stability_off=catalog.rules_off(config),
    )


_MARKS = {"good": "", "note": "[yellow]note[/]", "wrong": "[red bold]wrong[/]"}


def _print(name: str, findings: list[Finding]) -> None:
    """A table of what was found, and below it what will not work and what to do about it."""
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
    troubles = sorted((f for f in findings if f.matter), key=lambda finding: finding.level != "wrong")
    if not troubles:
        console.print("\nNothing stands in the way.")
    for finding in troubles:
        console.print(f"\n{_MARKS[finding.level]}  {finding.topic}: {escape(finding.matter)}")
        console.print(f"      → {escape(finding.cure)}")
