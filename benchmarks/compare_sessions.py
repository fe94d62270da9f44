"""The sessions of ``make compare``: what real harnesses are asked, what their model plays, and their requests again."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.compare_servers import NAMES
from clients import session_script
from clients.harness import CLAUDE, CODEX, OPENCLAW, OPENCODE, PI, QWEN, Events, Harness
from clients.recording import Sent, sent_through
from clients.relay import Relay
from clients.served import TURNS, Play
from singletree.conversation import Part, Reasoning, Text, ToolCall

COMPACT = "/compact"
SECONDS = 900.0
"""The limit of one run of a harness, and of one request."""


@dataclass(frozen=True, slots=True)
class Session:
    """A harness at work.

    Attributes:
        model: the name that it knows the model by.
        runs: further arguments of each run; a run goes on with what the one before it did.
        kind: ``delegates``, a sub-agent does a part of the work, and its turns count after the conversation's;
            ``compacts``, the second run only asks for a summary of the first, which counts, too.
        edits: how it edits files, in ``session_script.EDITS``, where that is not by its name.
    """

    title: str
    harness: Harness
    model: str = NAMES[0]
    runs: Sequence[Sequence[str]] = ((),)
    kind: Literal["", "delegates", "compacts"] = ""
    edits: str = ""

    def started(self, number: int, url: str) -> Harness:
        """Return the harness for a run on the server at ``url``."""
        more = [word.replace("{url}", url) for word in self.runs[number]]

        def arguments(prompt: str) -> list[str]:
            given = self.harness.arguments(prompt)
            # It asks nobody there: a plan has no use for the flag, and the flag ends it.
            return [*more, *(word for word in given if word != _SKIP or _PLAN not in more)]

        return self.harness._replace(arguments=arguments)


_SKIP, _PLAN = "--dangerously-skip-permissions", "plan"
# Other servers have no catalog of models for Codex, without which it has no tool with a grammar; behind all of them it
# is told of none, of which it complains.
_PROVIDER = '{name="x", base_url="{url}/v1", env_key="SINGLETREE_API_KEY", wire_api="responses"}'
_NO_CATALOG = ("-c", f"model_providers.x={_PROVIDER}", "-c", "model_provider=x")


def _codex_complaints(events: Events) -> list[str]:
    return [each for each in CODEX.complaints(events) if "Model metadata" not in each]


SESSIONS: Mapping[str, Session] = {
    "claude": Session("Claude Code, under the model's own name", CLAUDE),
    "claude-as-opus": Session("Claude Code, under the name claude-opus-4-8", CLAUDE, NAMES[1]),
    "claude-plan": Session(
        "Claude Code, three prompts, the second in plan mode",
        CLAUDE,
        runs=((), ("-c", "--permission-mode", _PLAN), ("-c",)),
    ),
    "claude-agent": Session("Claude Code, with a sub-agent", CLAUDE, kind="delegates"),
    "claude-compact": Session(
        "Claude Code, with a compaction", CLAUDE, runs=((), ("-c",), ("-c",)), kind="compacts"
    ),
    "codex": Session(
        "Codex, without a catalog of models",
        CODEX._replace(complaints=_codex_complaints),
        runs=(_NO_CATALOG,),
        edits="codex-shell",
    ),
    "opencode": Session("OpenCode", OPENCODE._replace(api="chat")),
    "pi": Session("pi", PI._replace(api="chat")),
    "qwen": Session("qwen-code", QWEN),
    "openclaw": Session("OpenClaw", OPENCLAW._replace(api="chat")),
}


class Asked(NamedTuple):
    """What a harness is asked, run by run, and the names of what its model plays in the conversation, in order."""

    prompts: list[str]
    scripts: list[str]


def asked(name: str, workspace: Path, count: int, write: Callable[[str, Sequence[Part]], None]) -> Asked:
    """Write what the model plays in a session, by name, with ``write``.

    Args:
        count: turns of the session that call tools.
    """
    session = SESSIONS[name]
    hands = session.harness._replace(name=session.edits or session.harness.name)
    *turns, last = session_script.turns(hands, workspace, count)
    runs = len(session.runs) - (session.kind == "compacts")
    size = -(-count // runs)
    found = Asked([], [])
    for number in range(runs):
        parts = [*turns[number * size : (number + 1) * size], last]
        own, others = (_delegated if session.kind == "delegates" else _alone)(name, len(found.scripts), parts)
        for script, written in {**own, **others}.items():
            write(script, written)
        found.scripts.extend(own)
        found.prompts.append(f"Look after the modules here, one after another. {_marker(own)}")
    if session.kind == "compacts":
        found.prompts.insert(1, COMPACT)
    return found


Scripts = dict[str, Sequence[Part]]


def _alone(name: str, first: int, turns: Sequence[Sequence[Part]]) -> tuple[Scripts, Scripts]:
    return {f"{name}-{first + number}": parts for number, parts in enumerate(turns)}, {}


def _delegated(name: str, first: int, turns: Sequence[Sequence[Part]]) -> tuple[Scripts, Scripts]:
    """Return the turns of the conversation, and those of a sub-agent that does its middle third.

    The last marker in a prompt decides what is played: the call of the agent has that of the agent's turns, and its
    report, which is the result of the call, that of the turns that follow.
    """
    third = len(turns) // 3
    begun, _ = _alone(name, first, turns[:third])
    ended, _ = _alone(name, first + third + 1, turns[2 * third :])
    given, _ = _alone(f"{name}-sub", 0, turns[third : 2 * third])
    report = f"{name}-sub-{third}"
    given[report] = (Reasoning("These are done."), Text(f"All is sound here. {_marker(ended)}"))
    task = {
        "description": "look after modules",
        "prompt": f"Look after the next modules. {_marker(given)}",
        "subagent_type": "general-purpose",
        "run_in_background": False,
    }
    call = ToolCall("Agent", json.dumps(task), "functions.Agent:0")
    delegating = {f"{name}-{first + third}": (Reasoning("An agent can do the next ones."), call)}
    return begun | delegating | ended, given


def _marker(scripts: Scripts) -> str:
    return f"[[script:{','.join(scripts)}]]"


def conversation(plays: Sequence[Play], scripts: Sequence[str]) -> list[Play]:
    """Return the plays of the one conversation in which the model wrote ``scripts``, in order.

    A side request may quote the prompt and so play a script as well: of several that did, the one with which the
    next prompt begins is the conversation's. Raises ValueError when a script was never played.
    """
    following: Play | None = None
    found: list[Play] = []
    for script in reversed(scripts):
        candidates = [play for play in plays if play.script == script]
        if not candidates:
            raise ValueError(f"the session never came to {script}")
        following = max(candidates, key=lambda play: _kinship(play, following))
        found.append(following)
    return found[::-1]


def same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _kinship(play: Play, following: Play | None) -> tuple[int, int]:
    size = len(play.prompt_token_ids)
    return (0 if following is None else same(play.prompt_token_ids, following.prompt_token_ids), size)


@contextmanager
def recording(url: str) -> Iterator[tuple[str, list[Sent]]]:
    """Yield a URL that passes on to ``url``, and a list that has the requests for turns at the end."""
    relay, sent = Relay(url), list[Sent]()
    threading.Thread(target=relay.listen, daemon=True).start()
    try:
        yield relay.url, sent
    finally:
        relay.close()
    sent += [
        each for each in sent_through(relay) if each.method == "POST" and each.path.split("?")[0] in TURNS
    ]


def leave_out(body: Any, field: Sequence[str]) -> bool:
    """Take a field, or the blocks of a type, out of a request's body; return whether there were any."""
    name, *inner = field
    if isinstance(body, list):
        kept = body if inner else [each for each in body if each.get("type") != name]
        found = [len(kept) < len(body), *(leave_out(each, field) for each in kept)]
        body[:] = kept
        return any(found)
    if not isinstance(body, dict) or name not in body:
        return False
    return leave_out(body[name], inner) if inner else bool([body.pop(name)])


def limited(sent: Sent, tokens: int) -> Sent:
    """Return a request for an answer of ``tokens`` tokens."""
    limit = "max_output_tokens" if sent.path.startswith("/v1/responses") else "max_tokens"
    return sent._replace(body=json.dumps({**sent.json, limit: tokens}).encode())


_WORDS = (b'"content_block_delta"', b'"delta":{"content":"', b'"delta":{"reasoning')
"""What a line of a stream has that brings words of the model."""


def send(url: str, sent: Sent) -> tuple[str, float]:
    """Send a request and read its answer to the end.

    Returns:
        What went wrong, if anything, and the ms until the first words of the answer; 0 if none came.
    """
    headers = {
        name: value
        for name, value in sent.headers.items()
        if name not in ("host", "content-length", "content-encoding", "connection", "accept-encoding")
    }
    try:
        request = urllib.request.Request(f"{url}{sent.path}", sent.body, headers, method="POST")
        began, first_ms = time.perf_counter(), 0.0
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            for line in answer:
                if not first_ms and any(words in line for words in _WORDS):
                    first_ms = round((time.perf_counter() - began) * 1e3, 1)
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read(300).decode(errors='replace')}", 0.0
    time.sleep(0.3)  # vLLM publishes its counters once a step of the engine.
    return "", first_ms
