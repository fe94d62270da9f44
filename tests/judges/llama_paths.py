"""A plugin for llama.cpp's server tests: their ``/chat/completions`` is ``/v1/chat/completions`` here.

llama-server has both. Without this, a third of its tests would judge one path and nothing else.
"""

from __future__ import annotations

import sys
from typing import Any


def pytest_collection_finish() -> None:
    """Prepend ``/v1`` to the path, in each request of the tests."""
    process = sys.modules["utils"].ServerProcess  # a module of the tests
    for name in ("make_request", "make_stream_request", "make_any_request"):
        original = getattr(process, name, None)
        if original is not None:
            setattr(process, name, _with_version(original))


def _with_version(original: Any) -> Any:
    def make(self: Any, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        if path.startswith("/chat/completions"):
            path = f"/v1{path}"
        return original(self, method, path, *arguments, **options)

    return make
