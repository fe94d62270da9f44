"""The real harnesses: installed and run by what the tests of ``tests/clients`` run them with."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from clients import install
from clients.harness import CLAUDE, CODEX, OPENCODE, Harness, Task, run

__all__ = ["CLAUDE", "CODEX", "OPENCODE", "Harness", "Task", "install", "run"]
