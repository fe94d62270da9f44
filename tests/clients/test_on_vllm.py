"""Real harnesses on a real vLLM whose sampler plays the scripts: ``make engines``.

vLLM's scheduler, its batches and its prefix cache are in the path; its model is two layers of made-up weights. How many
tokens of a prompt were in vLLM's cache has to be what ``singletree explain`` makes one expect.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.conftest import TOKENIZER, Flags, Perform, Workspace
from clients.harness import CLAUDE, CODEX, PI, Harness
from clients.scenarios import ANSWER, COMMAND, PRINTED
from clients.scripts import HERMES, Style
from clients.served import MODEL, Server, serving_scripted_vllm
from clients.turns import read, shell, text_for_user, thought
from engines.cache_rule import VLLM_BLOCK, cached_as_predicted

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def on_vllm(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_scripted_vllm(installed / TOKENIZER, tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture(scope="module")
def server(on_vllm: Server) -> Callable[[Style, Flags], Server]:
    """In the place of the scripted engine's servers, so that ``ran`` plays on vLLM."""
    return lambda style, flags: on_vllm


@pytest.mark.parametrize(
    "harness", [CLAUDE, CODEX, PI, PI._replace(api="chat")], ids=lambda harness: harness.title
)
def test_a_task_turn_by_turn(ran: Perform, on_vllm: Server, harness: Harness, workspace: Workspace) -> None:
    before = {*on_vllm.sessions()}
    turns = (
        (thought("I run the command first."), shell(COMMAND)),
        (
            thought("Now the notes."),
            text_for_user("I read the notes."),
            read(),
            thought("And again."),
            shell(COMMAND),
        ),
        (thought("Once more."), shell("cat notes.txt")),
        (thought("I know both."), text_for_user(ANSWER)),
    )
    done = ran(harness, HERMES, turns)
    done.went_well(ANSWER, generations=4)
    done.came_back(harness)
    assert PRINTED in done.added(1)
    assert workspace.secret in done.added(2)
    sessions = [on_vllm.explain(each) for each in {*on_vllm.sessions()} - before]
    lengths = [len(play.prompt_token_ids) for play in done.plays]
    [steps] = [steps for steps in sessions if {*lengths} <= {step["prompt_tokens"] for step in steps}]
    main = [step for step in steps if step["prompt_tokens"] in lengths]
    assert [step["prompt_tokens"] for step in main] == lengths
    assert [step["course"] for step in main[1:]] == ["appended"] * 3
    cached_as_predicted(steps, VLLM_BLOCK)
    reused = [step["cached_tokens"] for step in main]
    assert reused == sorted(reused)
    assert reused[-1] > lengths[0] - VLLM_BLOCK > 0, "more than the preamble"


class Chat:
    """A conversation on Chat Completions."""

    def __init__(self, server: Server, session: str) -> None:
        self._server = server
        self._session = session
        self.messages: list[dict[str, Any]] = []

    def ask(self, text: str, answer: str) -> str:
        """Ask, with the answer to be sampled, and return the answer."""
        self.messages.append({"role": "user", "content": f"{text} [[echo:{answer}]]"})
        body = {"model": MODEL, "messages": self.messages, "max_tokens": 4096}
        request = urllib.request.Request(
            f"{self._server.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "x-singletree-session": self._session},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            message = json.loads(reply.read())["choices"][0]["message"]
        self.messages.append(message)
        return str(message["content"])


def test_every_length_of_question_and_answer(on_vllm: Server) -> None:
    """Prompts and turns that end anywhere in a block of the cache, at its first token and at its last one."""
    chat = Chat(on_vllm, "every-length")
    for number in range(40):
        answer = "x " * (1 + 7 * number % 50)
        assert chat.ask(f"{number} " + "y " * (5 * number % 60), answer).strip() == answer.strip()
    steps = on_vllm.explain("every-length")
    cached_as_predicted(steps, VLLM_BLOCK)
    ends = {(step["matched_tokens"] - 1) % VLLM_BLOCK for step in steps[1:]}
    assert len(ends) > 20
    assert {step["course"] for step in steps[1:]} == {"appended"}


def test_an_edit_and_a_fork(on_vllm: Server) -> None:
    """A prompt that breaks reuses the blocks before the break; one that goes back, those of the turns before."""
    chat = Chat(on_vllm, "edit-and-fork")
    for number in range(4):
        chat.ask(f"{number} " + "words and words " * 60, "It is well.")
    known = list(chat.messages)
    chat.messages = known[:4]
    chat.ask("Another way. " + "words and words " * 60, "It is another.")
    chat.messages = [*known[:2], known[2] | {"content": "edited " + known[2]["content"]}, *known[3:]]
    chat.ask("And on.", "It is edited.")
    steps = on_vllm.explain("edit-and-fork")
    assert [step["course"] for step in steps[-2:]] == ["back", "broken"], steps
    cached_as_predicted(steps, VLLM_BLOCK)
