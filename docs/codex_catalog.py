"""Measure what the catalog changes in Codex: ``python docs/codex_catalog.py`` runs Codex and rewrites its page.

One scripted task, twice: with the metadata that Codex falls back to for a model it does not know, and with the catalog
that singletree serves. The page is ``codex-catalog.md``. The harnesses come from ``python tests/clients/install.py``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import page_parts  # noqa: E402
from clients import install  # noqa: E402
from clients.codex import Codex, Ran  # noqa: E402
from clients.conftest import TOKENIZER, Workspace  # noqa: E402
from clients.scripts import HERMES, think  # noqa: E402
from clients.served import serving  # noqa: E402

DOCUMENT = Path(__file__).with_name("codex-catalog.md")
LINES = 20_000
PATCH = "*** Begin Patch\n*** Update File: calc.py\n@@\n-    return a + b\n+    return b + a\n*** End Patch\n"
TURNS = (
    think("I change the file first.") + HERMES.call("apply_patch", {"input": PATCH}),
    think("Now the long output.") + HERMES.call("exec_command", {"cmd": f"seq 1 {LINES}"}),
    think("Both are done.") + "I have changed the file and looked at the numbers.",
)
CARD = "tool_output_tokens = 2000\n"
PLAIN = 'name="plain", base_url="{url}/v1", env_key="SINGLETREE_API_KEY", wire_api="responses"'
FALLBACK = ("-c", f"model_providers.plain={{{PLAIN}}}", "-c", "model_provider=plain")


class Case(NamedTuple):
    """One run of Codex, and whether it changed the file."""

    ran: Ran
    changed: bool


def run(*options: str) -> Case:
    """Run the task in a repository, a home and on a server of its own; ``options`` go to Codex."""
    with tempfile.TemporaryDirectory() as folder:
        home, repository, served = (Path(folder) / name for name in ("home", "repository", "served"))
        for each in (home, repository, served):
            each.mkdir()
        card = Path(folder) / "card.toml"
        card.write_text(CARD, encoding="utf-8")
        calc = repository / "calc.py"
        calc.write_text("def add(a, b):\n    return a + b\n", encoding="utf-8")
        subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
        with serving(install.folder() / TOKENIZER, served, ("--model-card", str(card))) as server:
            codex = Codex(server, Workspace(repository, calc, ""), home)
            prompt = "Turn the sum in calc.py round, then count. " + codex.script(*TURNS)
            ran = codex.run(prompt, *options)
        return Case(ran, "b + a" in calc.read_text(encoding="utf-8"))


def _tools(case: Case) -> str:
    tools = case.ran.requests[0]["tools"]
    return ", ".join(f"`{tool.get('name', tool['type'])}`" for tool in tools)


def _fields(case: Case, kind: str, field: str) -> list[Any]:
    return [item[field] for item in case.ran.requests[-1]["input"] if item.get("type") == kind]


def _patched(case: Case) -> str:
    if outputs := _fields(case, "custom_tool_call_output", "output"):
        return f"`custom_tool_call`, answered with {_quoted(outputs[0])}"
    return f"`function_call`, answered with {_quoted(_fields(case, 'function_call_output', 'output')[0])}"


def _quoted(text: Any) -> str:
    words = " ".join(str(text).split())
    return f"“{words[:90]}{'…' if len(words) > 90 else ''}”"


def _printed(case: Case) -> str:
    output = str(_fields(case, "function_call_output", "output")[-1])
    marker = re.search(r"…[^…]*truncated…", output)
    return f"{len(output):,} characters, “{marker[0] if marker else 'nothing left out'}”"


def _remarks(case: Case) -> str:
    remarks = [json.loads(complaint) for complaint in case.ran.outcome.complaints]
    return _quoted(remarks[0].get("message")) if remarks else "nothing"


ROWS: tuple[tuple[str, Callable[[Case], str]], ...] = (
    ("Codex's remarks", _remarks),
    ("Questions for the catalog", lambda case: str(sum("client_version" in s.path for s in case.ran.sent))),
    ("Tools offered", _tools),
    (
        "Base instructions",
        lambda case: f"{len(case.ran.requests[0]['input'][0]['content'][0]['text']):,} characters",
    ),
    ("First prompt", lambda case: f"{len(case.ran.plays[0].prompt_token_ids):,} tokens"),
    ("`include`", lambda case: f"`{json.dumps(case.ran.requests[0].get('include'))}`"),
    ("The patch", _patched),
    ("`calc.py` afterwards", lambda case: "changed" if case.changed else "unchanged"),
    (f"What is kept of `seq 1 {LINES}`", _printed),
    ("Last prompt", lambda case: f"{len(case.ran.plays[-1].prompt_token_ids):,} tokens"),
)


def table(fallback: Case, catalog: Case) -> str:
    """Return a table with both runs side by side."""
    rows = [f"| {name} | {of(fallback)} | {of(catalog)} |" for name, of in ROWS]
    return "\n".join(["| | fallback metadata | singletree's catalog |", "|---|---|---|", *rows])


def main() -> None:
    """Run both and put the table into the document."""
    shown = table(run(*FALLBACK), run())
    DOCUMENT.write_text(page_parts.with_parts(DOCUMENT, {"runs": shown}), encoding="utf-8")
    print(shown)


if __name__ == "__main__":
    main()
