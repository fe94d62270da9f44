"""The certified table: each harness, on each API that it speaks, does a task with a model of each family.

The model writes what its family writes, with words that are scripted; ``make certify`` makes a page of what came of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path
from typing import NamedTuple

import pytest

from clients.conftest import TOKENIZER, Workspace
from clients.harness import HARNESSES, Call, Harness
from clients.ran import packed, perform, script_names
from clients.scenarios import ANSWER, COMMAND, PRINTED
from clients.scripts import Style
from clients.served import Play, Server, serving, serving_scripted_vllm
from clients.turns import Stage, Turn
from singletree import families
from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.parsing.family import Family
from singletree.parsing.render_turn import render_turn

pytestmark = pytest.mark.certify

TEMPLATES = Path(__file__).parent.parent / "families" / "templates"
ON_VLLM = ("qwen3_coder", "gpt_oss")
"""Families whose models play on a real vLLM, whose sampler writes the scripts, as well as on the scripted engine."""
FAMILIES = [family for family in families.table() if (TEMPLATES / f"{family.name}.jinja").exists()]


class Row(NamedTuple):
    """A row of the table: the family of the model, and how a server of it is started."""

    title: str
    family: Family
    serve: Callable[[Path, Path, Sequence[str]], AbstractContextManager[Server]]


ROWS = [
    *(Row(family.name, family, serving) for family in FAMILIES),
    *(Row(f"{name} on vllm", families.get(name), serving_scripted_vllm) for name in ON_VLLM),
]


@pytest.fixture(
    scope="module",
    params=[pytest.param(row, id=row.title, marks=pytest.mark.xdist_group(row.title)) for row in ROWS],
)
def row(request: pytest.FixtureRequest) -> Row:
    found: Row = request.param
    return found


@pytest.fixture(scope="module")
def of_row(row: Row, installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model of the family; its chat template alone says which one that is."""
    template = ("--chat-template", str(TEMPLATES / f"{row.family.name}.jinja"))
    with row.serve(installed / TOKENIZER, tmp_path_factory.mktemp(row.family.name), template) as server:
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
    parts += [ToolCall(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
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
    before = of_row.dispatched()
    ran = perform(of_row, stage, turns, home, tokens, names=names)
    (logs / f"{row.title}-{harness.title}.txt").write_text(ran.outcome.output, encoding="utf-8")
    count, seconds = (now - then for now, then in zip(of_row.dispatched(), before, strict=True))
    generated, kept, again = _replayed(ran.plays)
    record_property("family", row.title)
    record_property("harness", harness.title)
    record_property("finished", ran.outcome.answer == ANSWER)
    record_property("retries", len(ran.plays) - len(turns) + sum(ran.refused.values()))
    record_property("generated", generated)
    record_property("kept", kept)
    record_property("again", again)
    record_property("dispatched", int(count))
    record_property("dispatch_ms", round(1000 * seconds / max(count, 1), 3))
    ran.went_well(ANSWER, generations=3)
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
