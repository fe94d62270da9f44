"""A model that is not loaded: its first request loads it (``--load lazy``), or it did not start."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from singletree.engines.weights import resolve
from singletree.errors import Overloaded, SingletreeError
from singletree.protocols.models import ModelInfo
from singletree.server.models import byte_model
from singletree.server.models.model_card import Card, read_card, read_profiles

if TYPE_CHECKING:
    from singletree.server.models.catalog import Model

    # Imported for its type alone: it brings in the command-line library.
    from singletree.server.models.config import Config

_LOG = logging.getLogger(__name__)

ANY_NAME = "*"
"""Among the names of a model, it lets clients use any name."""

RETRY_SECONDS = 30.0
"""How long a model that did not start is left alone, before a request makes it try again."""

_LOADING_SECONDS = 5.0
"""When a client should ask again for a model that is being loaded."""

_PATH = re.compile(r"(?<![\w:/.~])(?:~|\.{1,2})?/(?:[^\s'\",;:]*/)?([^\s'\",;:/]+)")
"""A path of this machine in a message, and its last part: clients do not see more of it."""


class PendingModel:
    """A model that is not loaded.

    Args:
        config: its settings.
        load: loads it; raises SingletreeError if it cannot be loaded.

    Attributes:
        names: the names by which requests ask for it; lists show the first.
        aliases: further names, as those of a model.
        failure: why it did not start; empty before the first try.
        loaded: is given this value and the model, once that is loaded.
    """

    def __init__(self, config: Config, load: Callable[[], Awaitable[Model]]) -> None:
        self.names = expected_names(config)
        self.aliases = config.model_alias
        self.failure = ""
        self.loaded: Callable[[PendingModel, Model], None] | None = None
        self._config = config
        self._load = load
        self._card = Card()
        self._profiles: Mapping[str, Mapping[str, Any]] = {}
        self._created = int(time.time())
        self._retry_at = 0.0
        self._loading: asyncio.Task[Model | None] | None = None

    @property
    def name(self) -> str:
        """The name that lists show."""
        return self.names[0]

    def describe(self) -> None:
        """Read what lists show of it. Raises BadConfiguration for a wrong model card or profile."""
        config = self._config
        self._card = read_card(config.model_card)
        self._profiles = read_profiles(config.codex_catalog, config.codex_profile, self.names)

    def info(self, name: str = "") -> ModelInfo:
        """Return its description for clients, under ``name``, as far as it is known before it is loaded."""
        config, name = self._config, name or self.name
        own = ModelInfo(name, self._created, config.context_window or 0, config.max_output_tokens)
        return self._card.info(own, self._profiles.get(name, {}))

    def fail(self, error: SingletreeError) -> None:
        """Record why it did not start."""
        self.failure = _PATH.sub(r"…/\1", error.message)
        self._retry_at = time.monotonic() + RETRY_SECONDS

    def refusal(self) -> Overloaded:
        """Return the error for a request that cannot wait for it."""
        if self._loading is not None or not self.failure:
            return Overloaded(
                f"model {self.name!r} is being loaded; try again in a moment", retry_after=_LOADING_SECONDS
            )
        left = max(1.0, self._retry_at - time.monotonic())
        return Overloaded(
            f"model {self.name!r} did not start: {self.failure}; it is tried again in {left:.0f} seconds",
            retry_after=left,
        )

    async def wait(self) -> Model:
        """Load it, unless that is under way, and wait for it, ``--hold-seconds`` at most.

        Raises:
            Overloaded: it did not start, or loading takes longer. It goes on, so that a later request finds the model.
        """
        if self._loading is None:
            if self.failure and time.monotonic() < self._retry_at:
                raise self.refusal()
            self._loading = asyncio.create_task(self._load_now())
        loading = self._loading
        await asyncio.wait({loading}, timeout=self._config.hold_seconds)
        model = loading.result() if loading.done() and not loading.cancelled() else None
        if model is None:
            raise self.refusal()
        return model

    async def _load_now(self) -> Model | None:
        try:
            model = await self._load()
        except SingletreeError as error:
            self.fail(error)
            _LOG.warning("model %s did not start: %s", self.name, error.message)
            return None
        except Exception:
            self.fail(SingletreeError("an internal error, which the server's log has"))
            _LOG.exception("model %s did not start", self.name)
            return None
        else:
            if self.loaded is not None:
                self.loaded(self, model)
            return model
        finally:
            self._loading = None

    async def close(self) -> None:
        """End the loading, if it is under way."""
        if self._loading is not None:
            self._loading.cancel()
            with suppress(asyncio.CancelledError):
                await self._loading


def expected_names(config: Config) -> tuple[str, ...]:
    """Return the names that the model of ``config`` will have, as far as they are known before it is loaded."""
    if named := tuple(name for name in config.model_name if name != ANY_NAME):
        return named
    if config.model is None:
        if config.engine_url:
            return config.engine_url[:1]
        return (byte_model.NAME if config.engine == "scripted" else resolve.DEFAULT_MODEL,)
    path = Path(config.model).expanduser()
    if resolve.is_packaged(config.model) or not (
        path.is_absolute() or path.suffix == ".gguf" or path.exists()
    ):
        repo = config.model.partition(":")[0]
        return tuple(dict.fromkeys((repo, repo.rpartition("/")[2], config.model)))
    return (path.name.removesuffix(".gguf"),)
