"""Codex on a server of the tests: what it is told beyond ``singletree launch``, and what it sent."""

from __future__ import annotations

import base64
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clients import install
from clients.conftest import Workspace
from clients.harness import CODEX, Outcome, Task, run
from clients.recording import Sent, sent_through
from clients.relay import relaying
from clients.served import MODEL, Play, Server

OPTIONS = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
WEBSOCKETS = ("-c", "model_providers.singletree.supports_websockets=true")


class Ran(NamedTuple):
    """One run.

    Attributes:
        sent: what Codex sent, oldest first on each connection.
        plays: what the engine generated for it.
    """

    outcome: Outcome
    sent: list[Sent]
    plays: list[Play]

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The bodies of its requests for a turn, over HTTP or a WebSocket, those that only warm up left out."""
        asked = [s.json for s in self.sent if s.method in ("POST", "WS") and s.path == "/v1/responses"]
        return [body for body in asked if body.get("generate") is not False]

    def paths(self, method: str) -> list[str]:
        """Where it sent requests of ``method`` to, without their queries."""
        return [sent.path.partition("?")[0] for sent in self.sent if sent.method == method]

    def outputs(self, kind: str = "function_call_output") -> list[Any]:
        """What the tools gave, as the last request has it."""
        return [item["output"] for item in self.requests[-1]["input"] if item.get("type") == kind]

    def went_well(self, answer: str) -> None:
        """It complained of nothing, and its last word is ``answer``."""
        assert self.outcome.complaints == [], self.outcome.output
        assert self.outcome.answer == answer, self.outcome.output

    def came_back(self) -> None:
        """Each prompt begins with the one before and the very tokens that were generated on it."""
        for before, after in zip(self.plays, self.plays[1:], strict=False):
            cached = before.prompt_token_ids + before.token_ids
            assert after.prompt_token_ids[: len(cached)] == cached


class Codex:
    """Codex in one home and one workspace, so that sessions can be gone on with."""

    def __init__(self, server: Server, workspace: Workspace, home: Path) -> None:
        self.server = server
        self.workspace = workspace
        self.home = home

    @property
    def environment(self) -> dict[str, str]:
        """In which Codex is found."""
        return {**os.environ, "PATH": os.pathsep.join((install.path(), os.environ["PATH"]))}

    def script(self, *turns: str) -> str:
        """A marker for a prompt, by which the model says ``turns``, one a request."""
        names = [f"{secrets.token_hex(4)}-{number}" for number in range(len(turns))]
        for name, text in zip(names, turns, strict=True):
            (self.server.scripts / f"{name}.txt").write_text(text, encoding="utf-8")
        return f"[[script:{','.join(names)}]]"

    def run(self, prompt: str, *options: str, command: Sequence[str] = ("exec",), model: str = MODEL) -> Ran:
        """One run to its end; ``options`` are Codex's own. A URL in them that is to be the relay's is ``{url}``."""
        played = len(self._plays())
        with relaying(self.server.url) as relay:
            filled = [option.replace("{url}", relay.url) for option in options]
            harness = CODEX._replace(arguments=lambda text: [*command, *OPTIONS, *filled, text])
            outcome = run(harness, Task(relay.url, model, prompt, self.home, self.workspace.folder))
            return Ran(outcome, sent_through(relay), self._plays()[played:])

    def _plays(self) -> list[Play]:
        return self.server.plays(None)


def sign_in(home: Path) -> tuple[str, ...]:
    """Signs Codex in to ChatGPT, with tokens that nobody gave, and returns the options by which it uses the server as
    OpenAI's own.
    """
    folder = home / "cache" / "codex"
    folder.mkdir(parents=True)
    account = {"chatgpt_plan_type": "pro", "chatgpt_user_id": "u", "chatgpt_account_id": "a"}
    claims = {
        "email": "t@example.invalid",
        "exp": int(time.time()) + 86400,
        "https://api.openai.com/auth": account,
    }
    token = ".".join(_encoded(part) for part in ({"alg": "none", "typ": "JWT"}, claims, {}))
    tokens = {"id_token": token, "access_token": token, "refresh_token": "r", "account_id": "a"}
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    token_ids = {"auth_mode": "chatgpt", "OPENAI_API_KEY": None, "tokens": tokens, "last_refresh": now}
    (folder / "auth.json").write_text(json.dumps(token_ids), encoding="utf-8")
    settings = {
        "model_provider": "openai",
        "openai_base_url": "{url}/v1",
        "chatgpt_base_url": "{url}/backend-api",
    }
    return tuple(word for name, value in settings.items() for word in ("-c", f'{name}="{value}"'))


def _encoded(value: Mapping[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()
