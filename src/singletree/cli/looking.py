"""``singletree parse``, ``render`` and ``families``: what the server would do, without one."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from singletree import families
from singletree.cli import families_table
from singletree.conversation import Part, Tool
from singletree.errors import BadConfiguration
from singletree.events import Event, fold
from singletree.parsing.family import Family
from singletree.parsing.parser import Parser

Protocol = Literal["messages", "chat", "responses"]


def parse(
    file: str = "-",
    *,
    family: str | None = None,
    reasoning: Annotated[str | None, Parameter(name=["--reasoning", "--reasoning-parser"])] = None,
    tools: Annotated[str | None, Parameter(name=["--tools", "--tool-call-parser"])] = None,
    chunk: int = 0,
    prompt_tail: str = "",
    schemas: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Read raw model text as parts and events.

    Parameters
    ----------
    file
        The text; - for standard input.
    family
        Family that wrote it, such as qwen3; `singletree families` lists them.
    reasoning
        Family of the reasoning half, instead of --family.
    tools
        Family of the tool-call half, instead of --family.
    chunk
        Characters to feed at once; 0 for all.
    prompt_tail
        End of the prompt, where it has opened the reasoning already.
    schemas
        JSON file with the request's tools, for the types of arguments that are written as tags.
    json
        Print JSON.
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
    file: str = "-",
    *,
    protocol: Protocol = "chat",
    model: Annotated[str | None, Parameter(name=["--model", "--model-path"])] = None,
    chat_template: Annotated[
        Path | None, Parameter(name=["--chat-template", "--custom-jinja-template"])
    ] = None,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    ids: bool = True,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Print the prompt of a request, as text and token ids.

    Parameters
    ----------
    file
        The request's JSON body; - for standard input.
    protocol
        The API that it is written for.
    model
        A name, GGUF file, folder or Hugging Face id; "scripted" for the stand-in that needs no files.
    chat_template
        Jinja file to use instead of the model's own chat template.
    tool_call_parser
        Family of the model's tool calls.
    reasoning_parser
        Family of the model's reasoning.
    ids
        Print the token ids.
    json
        Print JSON.
    """
    from singletree.engines.progress import TerminalProgress
    from singletree.prompts.added_tokens import strip_guards
    from singletree.server import bytes_model, origin, pipeline
    from singletree.server.catalog import speech_of
    from singletree.server.config import Config
    from singletree.server.protocol import CHAT, MESSAGES, RESPONSES

    decode = {"messages": MESSAGES, "chat": CHAT, "responses": RESPONSES}[protocol].decode
    request = decode(read_text(file).encode())
    scripted = model == bytes_model.NAME
    config = Config(
        model=None if scripted else model,
        engine="scripted" if scripted else "llamacpp",
        chat_template=chat_template,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )
    with TerminalProgress() as progress:
        _, tokenizer = origin.tokenizer_of(config, progress)
    prompt = pipeline.write_prompt(speech_of(config, tokenizer), request)
    text = strip_guards(prompt.text)
    if json:
        print_value({"prompt": text, "token_ids": prompt.token_ids.tolist(), "rules": prompt.rules})
        return
    print(text)
    if ids:
        print(f"\n{len(prompt.token_ids)} tokens: {' '.join(map(str, prompt.token_ids))}")


def list_families(*, markdown: Annotated[bool, Parameter(negative="")] = False) -> None:
    """List the model families.

    Parameters
    ----------
    markdown
        Print a Markdown table.
    """
    if markdown:
        print(families_table.markdown())
    else:
        families_table.show()


def read_text(file: str) -> str:
    """A file's text, line ends as they are."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode()
    except OSError as error:
        raise BadConfiguration(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadConfiguration(f"{file}: not UTF-8 at byte {error.start}") from None


def _family(family: str | None, reasoning: str | None, tools: str | None) -> Family:
    if family is not None and (reasoning is not None or tools is not None):
        raise BadConfiguration("--family goes without --reasoning and --tools; give the one or the others")
    if family is not None:
        return families.get(family)
    if reasoning is None and tools is None:
        raise BadConfiguration("which family wrote it? Give --family, or --reasoning and --tools")
    return families.pair(reasoning=reasoning, tools=tools)


def _tools(schemas: Path | None) -> list[Tool]:
    """Tools of a request's JSON, in OpenAI's or Anthropic's shape."""
    if schemas is None:
        return []
    try:
        given = json.loads(read_text(str(schemas)))
        functions = [tool.get("function", tool) for tool in given]
        return [Tool(f["name"], None, f.get("parameters", f.get("input_schema"))) for f in functions]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise BadConfiguration(f"{schemas}: give a JSON list of tools, as in a request") from None


def _print_json(parts: tuple[Part, ...], events: list[Event]) -> None:
    print_value({"parts": [_named(part) for part in parts], "events": [_named(event) for event in events]})


def _print_plain(parts: tuple[Part, ...], events: list[Event]) -> None:
    for title, things in (("parts", parts), ("events", events)):
        print(f"{title}:")
        for thing in things:
            named = _named(thing)
            said = " ".join(f"{key}={value!r}" for key, value in named.items() if key != "type")
            print(f"  {named['type']:<16} {said}")


def _named(thing: Part | Event) -> dict[str, Any]:
    fields = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing)}
    return {"type": type(thing).__name__, **{n: v for n, v in fields.items() if v is not None}}


def print_value(value: Any) -> None:
    """Prints JSON."""
    # Half a surrogate pair that the model wrote leaves as its escape (``cli.main``), which JSON has, too.
    print(json.dumps(value, ensure_ascii=sys.stdout.encoding.lower() != "utf-8", indent=2))
