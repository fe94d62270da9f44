"""All models of one server, by the names that requests give them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

from singletree.engines.queueing import QueueingEngine
from singletree.engines.routing.pool import EnginePool
from singletree.engines.weights.progress import Progress, no_progress
from singletree.errors import BadConfiguration, ModelNotFound, SingletreeError
from singletree.server.models.catalog import Model, Report, load_model
from singletree.server.models.loaders import FindSource, find_model_source
from singletree.server.models.pending_model import ANY_NAME, PendingModel, expected_names

if TYPE_CHECKING:
    # Imported for its type alone: it brings in the command-line library.
    from singletree.server.models.config import Config

_LONG_WINDOW = "[1m]"
"""Suffix that Claude Code adds to a model's name when it assumes a window of a million tokens."""


class Catalog:
    """All served models, by name; upper and lower case are equal.

    Args:
        models: the models, and in their places those that are not loaded.
        default: the model for every name that no model has; None to refuse such names.
    """

    def __init__(
        self, models: Sequence[Model | PendingModel], default: Model | PendingModel | None = None
    ) -> None:
        self._known = list(models)
        self._default = default
        self._arrange()

    def _arrange(self) -> None:
        """Make the look-ups anew. If two models have a name, it is that of the first."""
        self.models = tuple(each for each in self._known if not isinstance(each, PendingModel))
        self._pending = [each for each in self._known if isinstance(each, PendingModel)]
        self._by_name: dict[str, Model | PendingModel] = {}
        self._patterns: list[tuple[str, Model | PendingModel]] = []
        for each in self._known:
            for name in (*each.names, *each.aliases):
                self._by_name.setdefault(name.casefold(), each)
            self._patterns += [(name.casefold(), each) for name in each.aliases if "*" in name]

    @property
    def listed(self) -> tuple[Model | PendingModel, ...]:
        """The models that a list shows: all but those that did not start."""
        return tuple(each for each in self._known if not (isinstance(each, PendingModel) and each.failure))

    def listed_model(self, name: str) -> Model | PendingModel:
        """Return the model ``name``, loaded or not. Raises ModelNotFound, and Overloaded if it did not start."""
        found = self._find(name)
        if isinstance(found, PendingModel) and found.failure:
            raise found.refusal()
        return found

    def get(self, name: str) -> Model:
        """Return the loaded model ``name``; for an empty name the only model, if there is only one.

        Raises:
            ModelNotFound: no model has this name.
            Overloaded: the model is not loaded.
        """
        found = self._find(name)
        if isinstance(found, PendingModel):
            raise found.refusal()
        return found

    async def ready(self, name: str) -> Model:
        """Return the model ``name``; load it if it is not loaded, and wait for that as long as it may take.

        Raises:
            ModelNotFound: no model has this name.
            Overloaded: the model could not be loaded, or takes longer.
        """
        found = self._find(name)
        return await found.wait() if isinstance(found, PendingModel) else found

    def _find(self, name: str) -> Model | PendingModel:
        if not name and len(self._known) == 1:
            return self._known[0]
        wanted = name.casefold()
        found = self._by_name.get(wanted) or self._by_name.get(wanted.removesuffix(_LONG_WINDOW))
        found = found or next(
            (each for pattern, each in self._patterns if fnmatchcase(wanted, pattern)), None
        )
        found = found or self._default
        if found is None:
            raise ModelNotFound(name[:128], tuple(each.name for each in self.listed))
        return found

    def replace(self, pending: PendingModel, model: Model) -> None:
        """Put ``model`` in the place of ``pending``, from which it was loaded."""
        self._known[self._known.index(pending)] = model
        if self._default is pending:
            self._default = model
        self._arrange()

    def states(self) -> list[tuple[str, str]]:
        """Return the name of each model and the state that it is in, for metrics."""
        return [(each.name, each.state) for each in self._known]

    @property
    def loads_later(self) -> bool:
        """Whether a model is not loaded."""
        return bool(self._pending)

    def waiting(self) -> int:
        """Return how many generations wait for an engine."""
        engines = [model.engine for model in self.models]
        return sum(engine.waiting for engine in engines if isinstance(engine, QueueingEngine | EnginePool))

    async def close(self) -> None:
        """Close the engines; generations in flight end with EngineFailed."""
        for pending in self._pending:
            await pending.close()
        for model in self.models:
            await model.close()


async def load_models(
    config: Config,
    report: Report,
    progress: Progress = no_progress,
    find_source: FindSource = find_model_source,
) -> Catalog:
    """Load the models that ``config`` names, one after the other, and start their engines.

    Where there are several, one that does not start stops none of the others; requests for it are refused with the
    reason, and make it try again.

    Args:
        report: called with lines about what was loaded and why.
        progress: reports downloads.
        find_source: finds each model and its engines.

    Raises:
        BadConfiguration, WeightsUnavailable, EngineFailed: no model could be loaded.
    """
    each = config.each_model or (config,)
    # One at a time: an engine measures the free memory when it starts.
    turn = asyncio.Lock()
    known: list[Model | PendingModel] = []

    async def load_one(one: Config, at: int) -> Model:
        async with turn:
            model = await load_model(one, report, progress, find_source)
            others = [*known[:at], *known[at + 1 :]]
            try:
                return _with_own_names(model, [other for other in others if isinstance(other, Model)], one)
            except BaseException:
                await model.close()
                raise

    failed: list[SingletreeError] = []
    try:
        for at, one in enumerate(each):
            pending = PendingModel(one, partial(load_one, one, at))
            try:
                if one.load == "lazy":
                    pending.describe()
                    report(f"model      {pending.name}: loaded by its first request")
                    known.append(pending)
                else:
                    known.append(await load_one(one, at))
            except SingletreeError as error:
                failed.append(error)
                if len(failed) == len(each):
                    raise failed[0] from None
                report(f"WARNING    {pending.name} did not start: {error.message}")
                pending.fail(error)
                known.append(pending)
    except BaseException:
        await Catalog(known).close()
        raise
    takes_any = [ANY_NAME in one.model_name for one in each]
    catalog = Catalog(known, default=known[takes_any.index(True)] if any(takes_any) else None)
    for later in known:
        if isinstance(later, PendingModel):
            later.loaded = catalog.replace
    return catalog


def _with_own_names(model: Model, others: Sequence[Model], config: Config) -> Model:
    """Return ``model`` without the names that ``others`` have, and with those under which lists showed it before.

    Raises:
        BadConfiguration: no name is left.
    """
    taken = {name.casefold() for other in others for name in other.names}
    names = tuple(name for name in model.names if name.casefold() not in taken)
    if not names:
        raise BadConfiguration(
            f"another model is already called {model.name!r}; give one of them a model-name of its own, in its table "
            "[[models]] of the file given with --config"
        )
    listed = expected_names(config) if config.load == "lazy" else ()
    aliases = tuple(dict.fromkeys((*model.aliases, *(name for name in listed if name not in names))))
    return replace(model, names=names, aliases=aliases)
