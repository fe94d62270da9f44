"""``singletree parse``, ``render`` and ``families``: show what the server would do, and draft families, without one."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import App, Parameter

from singletree import families
from singletree.cli.flag_values import AsJson
from singletree.conversation import Part, Reasoning, Text, Tool, ToolCall
from singletree.errors import BadConfiguration, InvalidRequest
from singletree.events import Event, fold
from singletree.parsing.family import Family
from singletree.parsing.parser import Parser
from singletree.parsing.render_turn import render_turn
from singletree.protocols import wire

if TYPE_CHECKING:
    from singletree.drafting.template_turns import Trial
    from singletree.server.settings.config import Config

Protocol = Literal["messages", "chat", "responses"]
File = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""The type of a path that may be ``-``, for standard input."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """What replaces the chat template and the family that a model comes with."""

    chat_template: Annotated[Path | None, Parameter(name=["--chat-template", "--custom-jinja-template"])] = (
        None
    )
    """Jinja file to use instead of the model's own chat template."""

    tool_call_parser: Annotated[
        str | None, Parameter(name=["--tool-call-parser", "--dyn-tool-call-parser"])
    ] = None
    """Family of the model's tool calls."""

    reasoning_parser: Annotated[
        str | None, Parameter(name=["--reasoning-parser", "--dyn-reasoning-parser"])
    ] = None
    """Family of the model's reasoning."""

    def config(self, model: str | None, **others: Any) -> Config:
        """Return the configuration for ``model`` (None for the default one), with further fields ``others``."""
        from singletree.server.settings.config import Config
        from singletree.testing import byte_model

        scripted = model == byte_model.NAME
        return Config(
            model=None if scripted else model,
            engine="scripted" if scripted else "llamacpp",
            chat_template=self.chat_template,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            **others,
        )


def parse(
    file: File = "-",
    *,
    family: str | None = None,
    reasoning: Annotated[str | None, Parameter(name=["--reasoning", "--reasoning-parser"])] = None,
    tools: Annotated[str | None, Parameter(name=["--tools", "--tool-call-parser"])] = None,
    chunk: int = 0,
    prompt_tail: str = "",
    schemas: Path | None = None,
    json: AsJson = False,
) -> None:
    """Parse raw model output into parts and events.

    Parameters
    ----------
    file
        File with the text; - for standard input.
    family
        Model family of the text, such as qwen3; `singletree families` lists them.
    reasoning
        Family of the reasoning half, instead of --family.
    tools
        Family of the tool-call half, instead of --family.
    chunk
        Feed the parser this many characters at a time; 0 for the whole text at once.
    prompt_tail
        End of the prompt, needed where the prompt has already opened the reasoning.
    schemas
        JSON file with the request's tools: the types of arguments that models write as tags.
    """
    if chunk < 0:
        raise BadConfiguration(f"--chunk is {chunk}; give 0 for all at once, or more")
    text = read_text(file)
    parser = Parser(_family(family, reasoning, tools), _tools(schemas), prompt_tail)
    pieces = [text] if not chunk else [text[at : at + chunk] for at in range(0, len(text), chunk)]
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.close()
    turn = fold(events)
    (_print_json if json else _print_plain)(turn.parts, events)


def render(
    file: File = "-",
    *,
    protocol: Protocol = "chat",
    model: Annotated[str | None, Parameter(name=["--model", "--model-path"])] = None,
    flags: ModelFlags = ModelFlags(),
    ids: bool = True,
    json: AsJson = False,
) -> None:
    """Print the prompt of a request as text and token ids.

    Parameters
    ----------
    file
        File with the request's JSON body, in which the model may be missing; - for standard input.
    protocol
        API of the request.
    model
        Name, GGUF file, folder or Hugging Face id; "scripted" for a test model that needs no files.
    ids
        Print the token ids.
    """
    from singletree.cli.progress_bar import TerminalProgress
    from singletree.engines.checkpoint import DEFAULT_MODEL
    from singletree.prompts.tokenizer.added_tokens import strip_guards
    from singletree.protocols import chat, messages, responses
    from singletree.server.models import model_source
    from singletree.server.models.chat_format import load_chat_format
    from singletree.server.turn.prompt import write_prompt

    decode = {"messages": messages.decode_count, "chat": chat.decode, "responses": responses.decode}[protocol]
    try:
        request = decode(_with_model(read_text(file).encode(), model or DEFAULT_MODEL))
    except InvalidRequest as error:
        at = "standard input" if file == "-" else file
        raise InvalidRequest(f"{at}: {error.message} (read as {protocol})", param=error.param) from None
    config = flags.config(model)
    with TerminalProgress() as progress:
        _, tokenizer = model_source.find_tokenizer(config, progress)
    prompt = write_prompt(load_chat_format(config, tokenizer), request)
    text = strip_guards(prompt.text)
    if json:
        print_value({"prompt": text, "token_ids": prompt.token_ids.tolist(), "rules": prompt.rules})
        return
    print(text)
    if ids:
        print(f"\n{len(prompt.token_ids)} tokens: {' '.join(map(str, prompt.token_ids))}")


def _with_model(body: bytes, name: str) -> bytes:
    """Add a model name to a request that has none, which rendering does not need. All other bytes stay the same.

    Raises InvalidRequest when ``body`` is not a JSON object.
    """
    fields = wire.decode_body(body, dict[str, msgspec.Raw])
    if "model" in fields:
        return body
    before, _, rest = body.partition(b"{")
    return before + b'{"model":' + msgspec.json.encode(name) + (b"," if fields else b"") + rest


def read_text(file: str) -> str:
    """Return the text of ``file`` (- for standard input) with its line endings unchanged.

    Raises:
        OSError: the file cannot be read.
        BadConfiguration: it is not UTF-8.
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadConfiguration(f"{file}: not valid UTF-8 at byte {error.start}") from None


def _family(family: str | None, reasoning: str | None, tools: str | None) -> Family:
    if family is not None and (reasoning is not None or tools is not None):
        raise BadConfiguration(
            "--family cannot be combined with --reasoning or --tools; leave out --family or those"
        )
    if family is not None:
        return families.get(family)
    if reasoning is None and tools is None:
        raise BadConfiguration("no model family given; give --family, or --reasoning and --tools")
    return families.pair(reasoning=reasoning, tools=tools)


def _tools(schemas: Path | None) -> list[Tool]:
    """Read the tools of a request from a JSON file, in OpenAI's or Anthropic's format."""
    if schemas is None:
        return []
    try:
        given = json.loads(read_text(str(schemas)))
        functions = [tool.get("function", tool) for tool in given]
        return [Tool(f["name"], None, f.get("parameters", f.get("input_schema"))) for f in functions]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise BadConfiguration(f"{schemas} is not a JSON list of tools; write them as in a request") from None


def _print_json(parts: tuple[Part, ...], events: list[Event]) -> None:
    print_value({"parts": [_named(part) for part in parts], "events": [_named(event) for event in events]})


def _print_plain(parts: tuple[Part, ...], events: list[Event]) -> None:
    for title, things in (("parts", parts), ("events", events)):
        print(f"{title}:")
        for thing in things:
            named = _named(thing)
            values = " ".join(f"{key}={value!r}" for key, value in named.items() if key != "type")
            print(f"  {named['type']:<16} {values}")


def _named(thing: Part | Event) -> dict[str, Any]:
    fields = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing)}
    return {"type": type(thing).__name__, **{n: v for n, v in fields.items() if v is not None}}


def print_value(value: Any) -> None:
    """Print ``value`` as JSON."""
    # A lone surrogate from the model is printed as its escape (``cli.main``), which is valid JSON too.
    print(json.dumps(value, ensure_ascii=sys.stdout.encoding.lower() != "utf-8", indent=2))


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
