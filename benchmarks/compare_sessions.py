"""The sessions of ``make compare``: what real harnesses are asked, and what their model plays."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.compare_servers import NAMES
from clients import session_script
from clients.harness import CLAUDE, CODEX, OPENCLAW, OPENCODE, PI, QWEN, Events, Harness
from clients.served import Play
from singletree.conversation import Part, Reasoning, Text, ToolCall

COMPACT = "/compact"


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
