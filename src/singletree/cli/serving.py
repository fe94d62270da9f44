"""``singletree serve``."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from cyclopts import App

from singletree.server.config import Config, settings

app = App(name="serve", config=settings, help="Serve a model to harnesses.")


@app.default
def serve(config: Config = Config()) -> None:  # noqa: B008 (frozen)
    """Serve a model to harnesses.

    Settings come from flags, then from SINGLETREE_… in the environment, then from the file of --config.
    """
    from singletree.engines.progress import TerminalProgress
    from singletree.server import run

    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    with TerminalProgress() as progress:
        _loop()(run.serve(config, _say, progress))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _loop() -> Callable[[Coroutine[Any, Any, None]], None]:
    """uvloop where there is one: not on Windows."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run
