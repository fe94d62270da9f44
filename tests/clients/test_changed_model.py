"""Real harnesses finish a task while the model behind them changes after every turn, and changes back."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from clients.conftest import TOKENIZER, Workspace
from clients.harness import CLAUDE, CODEX, OPENCLAW, OPENCODE, PI, QWEN, Harness, Task, run
from clients.relay import relaying
from clients.scenarios import ANSWER, COMMAND, PRINTED
from clients.served import Server, running
from engines import real_vllm
from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.families import get
from singletree.parsing.render_turn import render_turn

TEMPLATE = Path(__file__).parents[1] / "families" / "templates" / "seed_oss.jinja"
FAMILIES = {"alpha": "qwen3", "beta": "seed_oss"}
"""The models of the server, in the order in which they answer, each with its family. Harnesses ask for the first."""
CHANGED = (
    CLAUDE,
    CODEX,
    OPENCLAW,
    OPENCODE._replace(api="chat"),
    *(PI._replace(api=api) for api in ("messages", "chat", "responses")),
    QWEN._replace(api="chat"),
)


class Models(NamedTuple):
    """A server of two scripted models."""

    url: str
    servers: Mapping[str, Server]

    def plays(self, marks: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
        """The main generations of the scripts ``marks``, in their order, each with its model."""
        found = [
            (model, record)
            for model, server in self.servers.items()
            if server.log.exists()
            for record in map(json.loads, server.log.read_text(encoding="utf-8").splitlines())
            if record["script"] in marks and '"type": "function"' in record["prompt"]
        ]
        return sorted(found, key=lambda each: marks.index(each[1]["script"]))

    def move(self, to: str) -> None:
        body = json.dumps({"from": "alpha", "to": to}).encode()
        urllib.request.urlopen(f"{self.url}/v1/singletree/moves", body, timeout=10).close()


@pytest.fixture(scope="module")
def models(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder, port = tmp_path_factory.mktemp("models"), real_vllm.free_port()
    url, tables, servers = f"http://127.0.0.1:{port}", [], {}
    for model in FAMILIES:
        server = Server(url, folder / model, folder / f"{model}.jsonl", folder / "output.txt")
        server.scripts.mkdir()
        servers[model] = server
        table = {
            "model": installed / TOKENIZER,
            "model-name": model,
            "script-dir": server.scripts,
            "script-log": server.log,
            **({"chat-template": TEMPLATE} if model == "beta" else {}),
        }
        tables.append("[[models]]\n" + "".join(f'{key} = "{value}"\n' for key, value in table.items()))
    config = folder / "models.toml"
    config.write_text('engine = "scripted"\n' + "\n".join(tables), encoding="utf-8")
    with running(["--config", str(config)], port, folder / "output.txt"):
        yield Models(url, servers)


@pytest.mark.parametrize("harness", CHANGED, ids=lambda harness: harness.title)
def test_a_task_is_finished_by_two_models_in_turn(
    models: Models, harness: Harness, workspace: Workspace, tmp_path: Path
) -> None:
    def calls(*made: tuple[str, Mapping[str, Any]]) -> list[Part]:
        return [ToolCall(name, json.dumps(values, ensure_ascii=False)) for name, values in made]

    shell, read = harness.shell(COMMAND), harness.read(workspace.notes)
    turns: list[list[Part]] = [
        [Reasoning("I run the command first — naïvely."), *calls(shell)],
        [Reasoning("Now the notes."), Text("I read the notes."), *calls(read)],
        [Reasoning("Both once more."), *calls(shell, read)],
        [Reasoning("And the command."), Text("Again: a < b."), *calls(shell)],
        [Reasoning("The notes."), *calls(read)],
        [Reasoning("I know both."), Text(ANSWER)],
    ]
    marks = [f"{harness.title.replace('.', '-')}-{number}" for number in range(len(turns))]
    for model, family in FAMILIES.items():
        for mark, turn in zip(marks, turns, strict=True):
            text = render_turn(get(family), turn)
            (models.servers[model].scripts / f"{mark}.txt").write_text(text, encoding="utf-8")

    names = list(FAMILIES)
    with relaying(
        models.url, before=lambda: models.move(names[len(models.plays(marks)) % len(names)])
    ) as relay:
        home = tmp_path / "home"
        home.mkdir()
        prompt = f"Run the command, read notes.txt, then answer. [[script:{','.join(marks)}]]"
        outcome = run(harness, Task(relay.url, "alpha", prompt, home, workspace.folder))
    assert outcome.complaints == [], outcome.output
    assert outcome.answer == ANSWER, outcome.output

    plays = models.plays(marks)
    assert [(model, play["script"]) for model, play in plays] == [
        (names[number % len(names)], mark) for number, mark in enumerate(marks)
    ]
    for number, (model, play) in enumerate(plays):
        for turn in turns[:number]:
            for part in (p for p in turn if not isinstance(p, ToolCall)):
                assert render_turn(get(FAMILIES[model]), [part]).strip() in play["prompt"], (number, part)
    assert PRINTED in plays[1][1]["prompt"]
    assert workspace.secret in plays[2][1]["prompt"]
    for model in FAMILIES:
        own = [play for name, play in plays if name == model]
        for before, after in pairwise(own):
            whole = before["prompt_token_ids"] + before["token_ids"]
            if harness.appends:
                assert after["prompt_token_ids"][: len(whole)] == whole, "its own tokens are not in place"
            else:
                generated = "".join(map(chr, before["token_ids"]))
                assert generated in "".join(map(chr, after["prompt_token_ids"]))
