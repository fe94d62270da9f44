"""Fixtures for all tests: golden files."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from singletree import request_limits

# No test measures time: a machine under load is no reason to fail. The examples are the same in each run, so that a
# change is judged by what it changes; SINGLETREE_EXAMPLES asks for a number of new ones.
settings.register_profile("untimed", deadline=None, derandomize="SINGLETREE_EXAMPLES" not in os.environ)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", action="store_true", help="rewrite golden files instead of comparing")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the garbage collector, which then never looks at these 600,000 objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, bytes], None]:
    """``golden("sub/name.sse", data)`` compares with ``golden/sub/name.sse`` beside the test, or rewrites it."""
    folder = Path(request.path).parent / "golden"
    rewrite = request.config.getoption("--golden")

    def check(name: str, data: bytes) -> None:
        path = folder / name
        if rewrite:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            return
        assert path.exists(), f"{path.name} is missing: make it with `make golden` and review it"
        assert data.decode() == path.read_text(encoding="utf-8")

    return check


@pytest.fixture
def set_limits() -> Iterator[Callable[..., None]]:
    """``set_limits(stop_strings=2)`` changes limits of a request for the test; the others have their defaults."""
    yield lambda **limits: request_limits.configure(request_limits.RequestLimits(**limits))
    request_limits.configure(request_limits.RequestLimits())
