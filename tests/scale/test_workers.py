"""``--workers``: whichever process answers, it is as if there were one."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from engines.real_vllm import free_port
from scale.databases import Database
from scale.processes import Answer, Group, ask, command, serving
from singletree.server.settings.api_keys import digest_of

pytestmark = pytest.mark.scale

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SESSIONS, MOVES = "/v1/singletree/sessions", "/v1/singletree/moves"

PATIENCE_SECONDS = 120

CALL = (
    '<think>\nI look.\n</think>\n\n<tool_call>\n{"name":   "look", "arguments": {"at":  "it"}}\n</tool_call>'
)
"""A call that the model writes in another way than its template does: only its own tokens continue the prompt."""

TOOL = {
    "name": "look",
    "description": "Look at it.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """A server with two processes."""
    with serving(tmp_path_factory.mktemp("two"), "--workers", "2") as group:
        yield group


def talk(connections: list[HTTPConnection], script: str, **headers: str) -> None:
    """Run a tool loop on Chat Completions, each request on the next connection, without capsules."""
    names = ",".join(script for _ in range(4))
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Look at it. [[script:{names}]]"}]
    for connection in connections:
        body = {"model": "scripted", "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
        answer = ask(connection, CHAT, body, **headers)
        assert answer.status == 200, answer.body
        [choice] = answer.json["choices"]
        call = choice["message"]["tool_calls"][0]
        returned = {"role": "assistant", "content": choice["message"].get("content"), "tool_calls": [call]}
        messages += [returned, {"role": "tool", "tool_call_id": call["id"], "content": "It is there."}]


def continues(group: Group, script: str, count: int) -> None:
    """Check that each of ``count`` prompts begins with all tokens of the one before and of its turn."""
    plays = [play for play in group.plays() if play["script"] == script]
    assert len(plays) == count
    for before, after in itertools.pairwise(plays):
        cached = before["prompt_token_ids"] + before["token_ids"]
        assert after["prompt_token_ids"][: len(cached)] == cached


def test_turns_are_exact_whichever_process_answers(two: Group) -> None:
    two.write_scripts(loop=CALL)
    first, second = two.connect(1), two.connect(2)
    talk([first, second, second, first], "loop", x_singletree_session="loop")
    continues(two, "loop", 4)
    reports = [ask(connection, f"{SESSIONS}/loop").json for connection in (first, second)]
    assert reports[0] == reports[1]
    assert [step["course"] for step in reports[0]["steps"]] == ["first", "appended", "appended", "appended"]
    lists = [ask(connection, SESSIONS).json["data"] for connection in (first, second)]
    assert (
        [each["id"] for each in lists[0]].count("loop")
        == [each["id"] for each in lists[1]].count("loop")
        == 1
    )


def chat(
    connection: HTTPConnection, messages: list[dict[str, Any]], model: str = "scripted", **headers: str
) -> Answer:
    """Ask for the next turn of a session, and add it to ``messages``."""
    answer = ask(connection, CHAT, {"model": model, "messages": messages}, **headers)
    if answer.status == 200:
        messages.append({"role": "assistant", "content": answer.json["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": "And now?"})
    return answer


def test_budgets_hold_whichever_process_answers(tmp_path: Path) -> None:
    budgets = (
        "--session-budget",
        "generated=60",
        "--subagent-budget",
        "generated=30",
        "--key-budget",
        "generated=100",
    )
    with serving(tmp_path, "--workers", "2", *budgets) as group:
        group.write_scripts(words="Twenty bytes of text")
        connections = itertools.cycle([group.connect(1), group.connect(2)])

        def turns(most: int, **headers: str) -> list[int]:
            messages = [{"role": "user", "content": "[[script:" + ",".join(["words"] * most) + "]]"}]
            return [chat(next(connections), messages, **headers).status for _ in range(most)]

        assert turns(3, x_claude_code_session_id="s", x_claude_code_agent_id="a") == [200, 200, 400]
        assert turns(2, x_claude_code_session_id="s") == [200, 400]
        assert turns(4, x_session_id="another") == [200, 200, 400, 400]


KEYS = """
[alice]
sha256 = "{alice}"
requests_per_minute = 3

[operator]
sha256 = "{operator}"
rights = ["inference", "sessions", "admin"]
"""


def test_keys_count_whichever_process_answers(tmp_path: Path) -> None:
    """A name asks three times a minute, not six times, and each process lists what its turns have cost in both."""
    keys = tmp_path / "keys.toml"
    digests = {name: digest_of(name).hex() for name in ("alice", "operator")}
    keys.write_text(KEYS.format(**digests), encoding="utf-8")
    with serving(tmp_path, "--workers", "2", "--key-file", str(keys)) as group:
        connections = [group.connect(number) for number in (1, 2)]

        def statuses(key: str, times: int) -> list[int]:
            asked: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
            used = itertools.islice(itertools.cycle(connections), times)
            return [chat(each, asked.copy(), x_api_key=key).status for each in used]

        assert statuses("alice", 5) == [200, 200, 200, 429, 429]
        assert statuses("operator", 4) == [200] * 4
        listed = [ask(each, SESSIONS, x_api_key="operator").json["keys"] for each in connections]
        assert [{owner: cost["turns"] for owner, cost in each.items()} for each in listed] == [
            {"": 4, "alice": 3},
            {"": 4, "alice": 3},
        ]
        [own] = ask(connections[0], SESSIONS, x_api_key="alice").json["keys"].items()
        assert own == ("alice", listed[0]["alice"])


MODELS = """
[[models]]
model-name = ["alpha"]
chat-template = "{templates}/qwen3.jinja"
script-log = "{folder}/alpha.jsonl"

[[models]]
model-name = ["beta"]
chat-template = "{templates}/seed_oss.jinja"
script-log = "{folder}/beta.jsonl"
"""


def test_a_session_changes_its_model_whichever_process_answers(tmp_path: Path) -> None:
    """Named by the client, moved by the operator, and forked; back on the first model its own tokens are in place."""
    templates = Path(__file__).parents[1] / "families" / "templates"
    (tmp_path / "models.toml").write_text(
        MODELS.format(templates=templates, folder=tmp_path), encoding="utf-8"
    )
    with serving(tmp_path, "--workers", "2", "--config", str(tmp_path / "models.toml")) as group:
        group.write_scripts(
            **{
                f"s{number}": f"<think>\nThought {number}.\n</think>\n\nWords {number}."
                for number in range(6)
            }
        )
        first, second = group.connect(1), group.connect(2)
        messages = [{"role": "user", "content": "[[script:s0,s1,s2,s3,s4,s5]] go"}]
        task = {"x_singletree_session": "task"}

        def plays(model: str) -> list[dict[str, Any]]:
            return [
                json.loads(line) for line in (tmp_path / f"{model}.jsonl").read_text("utf-8").splitlines()
            ]

        for connection, model in ((first, "alpha"), (second, "beta"), (first, "alpha"), (second, "beta")):
            assert chat(connection, messages, model, **task).status == 200
        assert "Thought 2." in plays("beta")[-1]["prompt"], (
            "what the client left out, and the other process wrote"
        )
        assert ask(first, MOVES, {"session": "task", "to": "alpha"}).status == 200
        assert chat(second, messages, "beta", **task).json["model"] == "beta"
        assert len(plays("alpha")) == 3
        for model in ("alpha", "beta"):
            for before, after in itertools.pairwise(plays(model)):
                whole = before["prompt_token_ids"] + before["token_ids"]
                assert after["prompt_token_ids"][: len(whole)] == whole
        assert len(ask(first, MOVES).json["data"]) == 1
        for connection in (first, second):
            turns = ask(connection, f"{SESSIONS}/task/turns").json
            words = [turn["text"].strip().splitlines()[-1] for turn in turns["data"]]
            assert words == [f"Words {number}." for number in range(5)]
            fork = ask(connection, f"{SESSIONS}/task/fork", {"model": "beta", "at": 2})
            assert fork.json["choices"][0]["message"]["content"].endswith("Words 1.")


def wait_for(holds: Callable[[], bool]) -> None:
    """Wait for real processes. Fails when ``holds`` does not become true."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def metrics(connection: HTTPConnection) -> dict[str, float]:
    lines = ask(connection, "/metrics").body.decode().splitlines()
    found = (re.fullmatch(r"(singletree_\S+) (\S+)", line) for line in lines)
    return {each[1]: float(each[2]) for each in found if each}


def test_a_scrape_has_the_metrics_of_all_processes(two: Group) -> None:
    two.write_scripts(counted="Yes.")
    count = 'singletree_requests_total{route="/v1/messages",status="200"}'
    connections = [two.connect(1), two.connect(2)]
    before = [metrics(connection).get(count, 0.0) for connection in connections]
    body = {
        "model": "scripted",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "[[script:counted]]"}],
    }
    for connection in (*connections, connections[1]):
        assert ask(connection, MESSAGES, body).status == 200
    # A request is counted when it has been answered: a scrape of the other process may come before.
    wait_for(lambda: [metrics(connection)[count] for connection in connections] == [before[0] + 3] * 2)
    assert before[0] == before[1]
    histograms = [
        {name: value for name, value in metrics(each).items() if "request_prompt_tokens" in name}
        for each in connections
    ]
    assert histograms[0] == histograms[1], "each process answers for all"
    counted = 'singletree_request_prompt_tokens_count{model="scripted"}'
    assert histograms[0][counted] >= 3
    tokens = 'singletree_tokens_total{kind="prompt",model="scripted"}'
    assert histograms[0][counted.replace("_count", "_sum")] == metrics(connections[0])[tokens]
    assert metrics(connections[0])["singletree_generations_in_flight"] == 0


def test_a_response_is_continued_by_another_process(two: Group) -> None:
    two.write_scripts(stored=CALL)
    connections = [two.connect(1), two.connect(2)]
    previous: dict[str, Any] = {}
    given: Any = "Look at it. [[script:stored,stored,stored,stored]]"
    tool = {"type": "function", **TOOL}
    for turn in range(4):
        body = {"model": "scripted", "input": given, "tools": [tool], **previous}
        answer = ask(connections[turn % 2], RESPONSES, body)
        assert answer.status == 200, answer.body
        call = answer.json["output"][-1]
        given = [{"type": "function_call_output", "call_id": call["call_id"], "output": "It is there."}]
        previous = {"previous_response_id": answer.json["id"]}
    continues(two, "stored", 4)
    again = ask(connections[0], f"{RESPONSES}/{previous['previous_response_id']}")
    assert again.json["id"] == previous["previous_response_id"]


def background(connection: HTTPConnection, prompt: str, **more: Any) -> Any:
    body = {"model": "scripted", "input": prompt, "background": True, **more}
    answer = ask(connection, RESPONSES, body)
    assert answer.status == 200, answer.body
    return answer


def test_a_background_response_is_read_and_cancelled_from_another_process(two: Group) -> None:
    first, second = two.connect(1), two.connect(2)
    made = background(first, "[[gen:5000:1:0.05]]").json
    running = ask(second, f"{RESPONSES}/{made['id']}")
    assert running.json["status"] in ("queued", "in_progress")
    cancelled = ask(second, f"{RESPONSES}/{made['id']}/cancel", {})
    assert cancelled.json["status"] == "cancelled"
    assert ask(first, f"{RESPONSES}/{made['id']}").json["status"] == "cancelled"
    assert metrics(second)["singletree_generations_in_flight"] == 0


def test_the_events_of_a_background_response_come_from_another_process(two: Group) -> None:
    first, second = two.connect(1), two.connect(2)
    whole = background(first, "[[gen:20:1:0.01]]", stream=True).body
    id = re.findall(rb'"id":"(resp_\w+)"', whole)[0].decode()
    assert ask(second, f"{RESPONSES}/{id}?stream=true").body == whole
    rest = ask(second, f"{RESPONSES}/{id}?stream=true&starting_after=3").body
    assert rest in whole
    assert b'"sequence_number":4' in rest
    assert b'"sequence_number":3,' not in rest
    gone = ask(second, f"{RESPONSES}/{id}", method="DELETE")
    assert gone.json["deleted"]
    assert ask(first, f"{RESPONSES}/{id}").status == 404


def test_a_repeated_request_cancels_the_first_one_in_another_process(two: Group) -> None:
    first, second = two.connect(1), two.connect(2)
    body = {"model": "scripted", "messages": [{"role": "user", "content": "[[gen:400:1:0.01]]"}]}
    answers: list[Answer] = []
    slow = threading.Thread(target=lambda: answers.append(ask(first, CHAT, body, idempotency_key="k1")))
    slow.start()
    watching = two.connect()
    wait_for(lambda: metrics(watching)["singletree_generations_in_flight"] == 1)
    assert ask(second, CHAT, body, idempotency_key="k1").status == 200
    slow.join()
    assert [answer.status for answer in answers] == [409]


def test_a_process_that_dies_is_started_again(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "2") as group:
        group.write_scripts(loop=CALL)
        talk([group.connect(1), group.connect(2)], "loop")
        key = f'singletree_requests_total{{route="{CHAT}",status="200"}}'
        assert metrics(group.connect(2))[key] == 2
        victim = group.children()[0]
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: "serves again" in group.output)
        talk([group.connect(2), group.connect(1)], "loop")
        assert victim not in group.children()
        for number in (1, 2):
            counted = metrics(group.connect(number))
            assert counted[key] == 4, "what a process counted before it died stays"
            assert counted["singletree_generations_in_flight"] == 0


def test_a_signal_lets_running_answers_end(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "2", "--drain-seconds", "60") as group:
        connections = [group.connect(1), group.connect(2)]
        body = {"model": "scripted", "messages": [{"role": "user", "content": "[[gen:150:1:0.01]]"}]}
        answers: list[Answer] = []
        running = [
            threading.Thread(target=lambda each=each: answers.append(ask(each, CHAT, body)))
            for each in connections
        ]
        watching = group.connect()
        for each in running:
            each.start()
        wait_for(lambda: metrics(watching)["singletree_generations_in_flight"] == 2)
        assert group.stop(signal.SIGTERM) == 0
        for each in running:
            each.join()
        assert [answer.status for answer in answers] == [200, 200]
        assert all(answer.json["usage"]["completion_tokens"] >= 150 for answer in answers)


@pytest.mark.parametrize("kill", [signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(tmp_path: Path, kill: signal.Signals) -> None:
    with serving(tmp_path, "--workers", "2") as group:
        children = group.children()
        group.stop(kill)
        # Each of them notices by itself.
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


def test_a_start_that_fails_is_reported_once(tmp_path: Path) -> None:
    line = command(tmp_path, free_port(), "--workers", "2", "--chat-template", str(tmp_path / "none.jinja"))
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.count("none.jinja") == 1


def test_two_servers_share_turns_in_redis(tmp_path: Path, redis: Database) -> None:
    flags = ("--turn-memory-url", redis.url, "--capsule-key", "a passphrase of ours")
    with serving(tmp_path / "a", *flags) as here, serving(tmp_path / "b", *flags) as there:
        for group in (here, there):
            group.write_scripts(shared=CALL)
        talk([here.connect(), there.connect(), there.connect(), here.connect()], "shared")
        plays = sorted([*here.plays(), *there.plays()], key=lambda play: len(play["prompt_token_ids"]))
        for before, after in itertools.pairwise(plays):
            cached = before["prompt_token_ids"] + before["token_ids"]
            assert after["prompt_token_ids"][: len(cached)] == cached
        redis.freeze()
        try:
            # A store that takes connections and answers nothing stops no turn.
            talk([here.connect(), here.connect()], "shared")
        finally:
            redis.thaw()
        failed = [value for name, value in metrics(here.connect()).items() if "turn_store_failures" in name]
        assert sum(failed) > 0
        assert here.output.count("the store of the turn memory cannot be used") >= 1


def test_two_servers_share_responses_in_postgres(tmp_path: Path, postgres: Database) -> None:
    flags = ("--store-url", postgres.url)
    with serving(tmp_path / "a", *flags) as here, serving(tmp_path / "b", *flags) as there:
        made = ask(here.connect(), RESPONSES, {"model": "scripted", "input": "Hi. [[echo:One.]]"}).json
        body = {"model": "scripted", "input": "And? [[echo:Two.]]", "previous_response_id": made["id"]}
        again = ask(there.connect(), RESPONSES, body)
        assert again.status == 200, again.body
        items = ask(here.connect(), f"{RESPONSES}/{again.json['id']}/input_items?order=asc").json["data"]
        assert [item["role"] for item in items] == ["user", "assistant", "user"]
