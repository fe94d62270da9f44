"""The certified table: each harness, on each API that it speaks, does a task with a model of each family.

The model writes what its family writes, with words that are scripted; ``make certify`` makes a page of what came of it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from clients.conftest import TOKENIZER, Workspace
from clients.harness import HARNESSES, Call, Harness
from clients.ran import packed, perform, script_names
from clients.scenarios import ANSWER, COMMAND, PRINTED
from clients.scripts import Style
from clients.served import Play, Server, serving, serving_scripted_vllm
from clients.served_engines import (
    serving_before_llama_server,
    serving_before_sglang,
    serving_before_vllm,
    serving_scripted_llamacpp,
    serving_scripted_sglang,
)
from clients.turns import Stage, Turn
from engines import real_sglang, real_vllm, scripted_llama
from engines.cache_rule import VLLM_BLOCK
from singletree import families
from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.parsing.family import Family
from singletree.parsing.render_turn import render_turn

pytestmark = pytest.mark.certify

SECONDS = 600.0
"""A machine that does other work, too, makes no cell fail."""
TEMPLATES = Path(__file__).parent.parent / "families" / "templates"
ON_ENGINES = ("qwen3_coder", "gpt_oss")
"""Families whose models play on real engines, too, whose samplers write the scripts."""
FAMILIES = [family for family in families.table() if (TEMPLATES / f"{family.name}.jinja").exists()]


class Played(NamedTuple):
    """An engine.

    Attributes:
        name: with its version.
        serve: starts a server on it.
        block: how many tokens a block of its prefix cache has; 0 where the scripted engine stands for one.
    """

    name: str
    serve: Callable[[Path, Path, Sequence[str]], AbstractContextManager[Server]]
    block: int = 0


SCRIPTED = Played("", serving)
ENGINES = {
    "llama.cpp": Played(f"llama.cpp {scripted_llama.VERSION}", serving_scripted_llamacpp, 1),
    "llama.cpp server": Played(f"llama.cpp {scripted_llama.VERSION}", serving_before_llama_server, 1),
    "sglang": Played(f"SGLang {real_sglang.SGLANG}", serving_before_sglang, real_sglang.PAGE),
    "sglang inside": Played(f"SGLang {real_sglang.SGLANG}", serving_scripted_sglang, real_sglang.PAGE),
    "vllm": Played(f"vLLM {real_vllm.VLLM}", serving_scripted_vllm, VLLM_BLOCK),
    "vllm server": Played(f"vLLM {real_vllm.VLLM}", serving_before_vllm, VLLM_BLOCK),
}


class Row(NamedTuple):
    """A row of the table: the family of the model, and the engine that it is on."""

    title: str
    family: Family
    engine: Played


ROWS = [
    *(Row(family.name, family, SCRIPTED) for family in FAMILIES),
    *(
        Row(f"{name} on {engine}", families.get(name), played)
        for engine, played in ENGINES.items()
        for name in ON_ENGINES
    ),
]


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: row.title)
def row(request: pytest.FixtureRequest) -> Row:
    found: Row = request.param
    return found


@pytest.fixture(scope="module")
def of_row(row: Row, installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model of the family; its chat template alone says which one that is."""
    template = ("--chat-template", str(TEMPLATES / f"{row.family.name}.jinja"))
    with row.engine.serve(
        installed / TOKENIZER, tmp_path_factory.mktemp(row.family.name), template
    ) as server:
        yield server


@pytest.fixture(scope="module")
def logs() -> Path:
    """What harnesses print stays here."""
    folder = Path("build", "certified")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _says(family: Family, thought: str, words: str = "", *calls: Call) -> Turn:
    """A turn as the models of the family write it."""
    parts: list[Part] = [Reasoning(thought)] if family.reasoning else []
    parts += [Text(words)] if words else []
    # Where the format has an id that the model makes up (Solar Open), no call is without one.
    parts += [
        ToolCall(name, json.dumps(arguments, ensure_ascii=False), id=secrets.token_hex(5))
        for name, arguments in calls
    ]
    text = render_turn(family, parts)
    # Where the template prints what opens the reasoning, it is in the prompt.
    opened = family.reasoning[0] if family.starts_open and family.reasoning else ""
    return (lambda stage: text.removeprefix(opened),)


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.title)
def test_cell(
    row: Row,
    harness: Harness,
    of_row: Server,
    workspace: Workspace,
    tokens: Callable[[str], int],
    tmp_path: Path,
    logs: Path,
    record_property: Callable[[str, object], None],
) -> None:
    family = row.family
    calls = harness.shell(f"{COMMAND}; cat next.txt"), harness.read(workspace.notes)
    turns = (
        _says(family, "I run the command first.", "", calls[0]),
        _says(family, "Now the notes.", "I read the notes.", calls[1]),
        _says(family, "I know both.", ANSWER),
    )
    # Each result says what the model writes then: templates differ in what begins a turn, so turns cannot be counted.
    names = script_names(len(turns))
    (workspace.folder / "next.txt").write_text(f"[[script:{names[1]}]]\n", encoding="utf-8")
    with workspace.notes.open("a", encoding="utf-8") as notes:
        notes.write(f"[[script:{names[2]}]]\n")
    home = tmp_path / "home"
    home.mkdir()
    stage = Stage(Style(family.name, (), lambda name, arguments: "", ""), harness, workspace.notes)
    before, sessions = of_row.dispatched(), {*of_row.sessions()}
    ran = perform(of_row, stage, turns, home, tokens, names=names, seconds=SECONDS)
    (logs / f"{row.title}-{harness.title}.txt").write_text(ran.outcome.output, encoding="utf-8")
    count, seconds = (now - then for now, then in zip(of_row.dispatched(), before, strict=True))
    generated, kept, again = _replayed(ran.plays)
    if row.engine.block:
        steps = [step for each in {*of_row.sessions()} - sessions for step in of_row.session(each)]
        again = _read_again(ran.plays, steps, row.engine.block)
    record_property("family", row.title)
    record_property("engine", row.engine.name)
    record_property("harness", harness.title)
    record_property("finished", ran.outcome.answer == ANSWER)
    record_property("retries", len(ran.plays) - len(turns) + sum(ran.refused.values()))
    record_property("generated", generated)
    record_property("kept", kept)
    record_property("again", again)
    record_property("dispatched", int(count))
    record_property("dispatch_ms", round(1000 * seconds / max(count, 1), 3))
    ran.went_well(ANSWER, generations=3)
    assert ran.refused == {}
    assert PRINTED in ran.added(1)
    assert workspace.secret in ran.added(2)
    assert kept == generated
    assert again == 0 or not harness.appends


def _replayed(plays: Sequence[Play]) -> tuple[int, int, int]:
    """Return how many tokens were generated before the last turn, how many of them stand in the next prompt, and how
    many of a prompt and its answer the engine had to read again.

    The token that ends a turn is that of the tokenizer, not of the family, and is not counted.
    """
    generated = kept = again = 0
    for before, after in pairwise(plays):
        written = before.token_ids[:-1]
        whole = before.prompt_token_ids + written
        same = len(commonprefix((whole, after.prompt_token_ids)))  # noqa: RUF071 (token by token is what is meant)
        stands = packed(written) in packed(after.prompt_token_ids)
        generated += len(written)
        kept += len(written) if stands else max(0, same - len(before.prompt_token_ids))
        again += len(whole) - same
    return generated, kept, again


def _read_again(plays: Sequence[Play], steps: Sequence[Mapping[str, Any]], block: int) -> int:
    """Return how many tokens of prompts and their answers, in whole blocks, the engine did not find in its cache when
    the next prompt came: by its own count, which is in the steps of the sessions.
    """
    again = 0
    for before, after in pairwise(plays):
        length = len(after.prompt_token_ids)
        found = [step["cached_tokens"] for step in steps if step["prompt_tokens"] == length]
        could = min(len(before.prompt_token_ids) + len(before.token_ids) - 1, length - 1) // block * block
        again += max(0, could - max(each or 0 for each in found))
    return again
