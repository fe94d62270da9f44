"""Create files that only their owner may read: prompts, answers and keys may be in them.

A file that exists keeps its permissions: who runs the server may have chosen them.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_MODE = 0o700
"""Permissions of a folder for such files."""


def open_private(path: str | Path, flags: int) -> int:
    """Return the descriptor of a file, which is made for its owner only; an ``opener`` of ``open``. Raises OSError."""
    return os.open(path, flags, 0o600)


def create_private(path: Path) -> None:
    """Create an empty file for its owner only, unless there is one that can be read and written. Raises OSError."""
    os.close(open_private(path, os.O_CREAT | os.O_RDWR))
