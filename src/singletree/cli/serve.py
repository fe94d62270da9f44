"""``singletree serve``: load a model and serve it over HTTP."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Annotated, Any

from cyclopts import App, Parameter

from singletree.cli.flags import read_settings, with_each_model
from singletree.server.settings.config import Config

app = App(name="serve", config=read_settings, help="Serve a model to agent harnesses.")


@app.default
def serve(
    *engine_arguments: Annotated[str, Parameter(allow_leading_hyphen=False, show=False, env_var=())],
    config: Config = Config(),  # noqa: B008 (frozen)
) -> None:
    """Serve a model to agent harnesses.

    Flags come first, then environment variables (SINGLETREE_…), then the file given with --config. What follows --
    are arguments for vLLM or SGLang.
    """
    if engine_arguments:
        config = replace(config, engine_arguments=(*config.engine_arguments, *engine_arguments))
    config = with_each_model(config)
    gc.disable()  # Imports make a hundred thousand objects and no garbage.
    try:
        from singletree.cli.progress_bar import TerminalProgress
        from singletree.server.http import run
    finally:
        gc.enable()

    if config.workers > 1:
        from singletree.processes import worker_processes

        if asyncio.run(worker_processes.run_workers(config, _print_line)):
            raise KeyboardInterrupt
        return
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    with TerminalProgress() as progress:
        interrupted = _event_loop_runner()(run.run_server(config, _print_line, progress))
    if interrupted:
        raise KeyboardInterrupt


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _event_loop_runner() -> Callable[[Coroutine[Any, Any, bool]], bool]:
    """Return uvloop's ``run`` where uvloop is installed (not on Windows), else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run
