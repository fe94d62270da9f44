"""The real harnesses: installed and run by what the tests of ``tests/clients`` run them with."""

from __future__ import annotations

from clients import install
from clients.harness import CLAUDE, CODEX, OPENCODE, Harness, Task, run

__all__ = ["CLAUDE", "CODEX", "OPENCODE", "Harness", "Task", "install", "run"]
