"""The request records of the server replicas on Ray: each replica has a file of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WRITING_SECONDS = 10


def records_of(folder: Path, session: str, count: int) -> list[Mapping[str, Any]]:
    """Return the records of the session's ``count`` requests, the oldest first; wait until they have been written.

    Each has the name of its file as ``file``.
    """
    end = time.monotonic() + WRITING_SECONDS
    while (
        len(found := [each for each in _records(folder) if each["singletree"]["session"] == session]) < count
    ):
        assert time.monotonic() < end, f"{len(found)} of {count} records of {session}"
        time.sleep(0.1)
    return found


def _records(folder: Path) -> list[Mapping[str, Any]]:
    found = []
    for path in folder.glob("trace-*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["event_type"] == "request_end":
                found.append({**record["request"], "file": path.name})
    return sorted(found, key=lambda each: each["request_received_ms"])
