"""All models of one server, by the names that requests give them, loaded or not.

A model that is not loaded waits for its first request (``--load lazy``), or did not start.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from singletree.conversation import Request
from singletree.engines.checkpoint import DEFAULT_MODEL, built_in_repository
from singletree.engines.progress import Progress, no_progress
from singletree.engines.sharing import Queued
from singletree.errors import BadConfiguration, InvalidRequest, ModelNotFound, Overloaded, SingletreeError
from singletree.lru import LruCache
from singletree.protocols.models import ModelInfo
from singletree.server.models.model import Card, Model, Report, load_model, read_card, read_profiles
from singletree.server.models.model_source import FindSource, built_in_model, find_model_source
from singletree.server.settings.config import ANY_NAME, Config

_LONG_WINDOW = "[1m]"
"""Suffix that Claude Code adds to a model's name when it assumes a window of a million tokens."""


Moves = LruCache[tuple[str, str], str]
"""By session and model, the model that answers in its place. Either may be empty: any model, or all sessions."""

_MOVES = 4096


class Catalog:
    """All served models, by name; upper and lower case are equal.

    Attributes:
        moves: of this owner; those of all sessions that the operator made are for the requests of all owners.

    Args:
        models: the models, and in their places those that are not loaded.
        default: the model for every name that no model has; None to refuse such names.
        first_unnamed: whether the first model is the one for requests that name none, where there are several.
    """

    def __init__(
        self,
        models: Sequence[Model | PendingModel],
        default: Model | PendingModel | None = None,
        *,
        first_unnamed: bool = False,
    ) -> None:
        self._index = _Index(list(models), default, first_unnamed)
        self._index.arrange()
        self._owner = ""
        self._drains = self.moves = Moves(entries=_MOVES)

    def of(self, owner: str) -> Catalog:
        part = copy.copy(self)
        part._owner = owner
        if owner not in self._index.moves:
            self._index.moves[owner] = self._index.make_moves(owner)
        part.moves = self._index.moves[owner]
        return part

    def share_moves(self, make: Callable[[str], Moves]) -> None:
        """Keep the moves of each owner in what ``make`` returns for it."""
        self._index.make_moves = make
        self._drains = self.moves = make("")

    @property
    def models(self) -> tuple[Model, ...]:
        return tuple(model.of(self._owner) for model in self._index.loaded)

    @property
    def listed(self) -> tuple[Model | PendingModel, ...]:
        """The models that a list shows: all but those that did not start."""
        return tuple(
            each for each in self._index.known if not (isinstance(each, PendingModel) and each.failure)
        )

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
        return found.of(self._owner) if self._owner else found

    async def ready(self, name: str) -> Model:
        """Return the model ``name``; load it if it is not loaded, and wait for that as long as it may take.

        Raises:
            ModelNotFound: no model has this name.
            Overloaded: the model could not be loaded, or takes longer.
        """
        found = self._find(name)
        model = await found.wait() if isinstance(found, PendingModel) else found
        return model.of(self._owner) if self._owner else model

    async def ready_for(self, request: Request) -> tuple[Model, Request]:
        """Return the loaded model that answers ``request``, and the request with a name. Raises as ``ready``."""
        model = await self.ready(self._answering(request.model, request.session or ""))
        return model, request if request.model else replace(request, model=model.name)

    def _answering(self, name: str, session: str) -> str:
        if not len(self.moves) + len(self._drains):
            return name
        asked, main = self._find(name).name, session.partition("/")[0]
        places = [(place, model) for place in (session, main) if place for model in (asked, "")]
        name = next(filter(None, map(self.moves.get, places)), name)
        drained = "", self._find(name).name
        return self.moves.get(drained) or self._drains.get(drained) or name

    def _find(self, name: str) -> Model | PendingModel:
        index = self._index
        if not name and (index.first_unnamed or len(index.known) == 1):
            return index.known[0]
        wanted = name.casefold()
        found = index.by_name.get(wanted) or index.by_name.get(wanted.removesuffix(_LONG_WINDOW))
        found = found or next(
            (each for pattern, each in index.patterns if fnmatchcase(wanted, pattern)), None
        )
        found = found or index.default
        if found is None:
            served = tuple(each.name for each in self.listed)
            if not name and served:
                several = f"model is not given, and several are served: {', '.join(served)}"
                raise InvalidRequest(several, param="model")
            raise ModelNotFound(name[:128], served)
        return found

    def replace(self, pending: PendingModel, model: Model) -> None:
        index = self._index
        index.known[index.known.index(pending)] = model
        if index.default is pending:
            index.default = model
        index.arrange()

    def states(self) -> list[tuple[str, str]]:
        return [(each.name, each.state) for each in self._index.known]

    @property
    def loads_later(self) -> bool:
        return bool(self._index.pending)

    def waiting(self) -> int:
        engines = [model.engine for model in self._index.loaded]
        return sum(engine.waiting for engine in engines if isinstance(engine, Queued))

    async def close(self) -> None:
        for pending in self._index.pending:
            await pending.close()
        for model in self._index.loaded:
            await model.close()


@dataclass(slots=True)
class _Index:
    """The look-ups of a catalog, which its parts share. If two models have a name, it is that of the first."""

    known: list[Model | PendingModel]
    default: Model | PendingModel | None
    first_unnamed: bool
    moves: dict[str, Moves] = field(default_factory=dict)
    make_moves: Callable[[str], Moves] = lambda owner: Moves(entries=_MOVES)
    loaded: list[Model] = field(default_factory=list)
    pending: list[PendingModel] = field(default_factory=list)
    by_name: dict[str, Model | PendingModel] = field(default_factory=dict)
    patterns: list[tuple[str, Model | PendingModel]] = field(default_factory=list)

    def arrange(self) -> None:
        self.loaded = [each for each in self.known if not isinstance(each, PendingModel)]
        self.pending = [each for each in self.known if isinstance(each, PendingModel)]
        self.by_name, self.patterns = {}, []
        for each in self.known:
            for name in (*each.names, *each.aliases):
                self.by_name.setdefault(name.casefold(), each)
            self.patterns += [(name.casefold(), each) for name in each.aliases if "*" in name]


async def load_models(
    config: Config,
    report: Report,
    progress: Progress = no_progress,
    find_source: FindSource = find_model_source,
) -> Catalog:
    """Load the models that ``config`` names, one after the other, and start their engines.

    Where there are several, one that does not start stops none of the others; requests for it are refused with the
    reason, and make it try again.

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
            try:
                model = _with_own_names(model, [*known[:at], *known[at + 1 :]], one)
                return replace(model, others=lambda: [m for m in catalog.models if m.name != model.name])
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
                    pending.names = _own_names(pending.names, known)
                    report(f"model      {pending.name}: loaded by its first request")
                    known.append(pending)
                else:
                    known.append(await load_one(one, at))
            except SingletreeError as error:
                failed.append(error)
                if config.built_in or len(failed) == len(each):
                    raise failed[0] from None
                report(f"WARNING    {pending.name} did not start: {error.message}")
                pending.fail(error)
                known.append(pending)
    except BaseException:
        await Catalog(known).close()
        raise
    takes_any = [ANY_NAME in one.model_name for one in each]
    catalog = Catalog(
        known, default=known[takes_any.index(True)] if any(takes_any) else None, first_unnamed=config.built_in
    )
    for later in known:
        if isinstance(later, PendingModel):
            later.loaded = catalog.replace
    return catalog


def _own_names(names: Sequence[str], others: Sequence[Model | PendingModel]) -> tuple[str, ...]:
    """Return ``names`` without those of ``others``, but for those that did not start.

    Raises BadConfiguration if none is left.
    """
    taken = {
        name.casefold()
        for other in others
        if isinstance(other, Model) or not other.failure
        for name in other.names
    }
    own = tuple(name for name in names if name.casefold() not in taken)
    if not own:
        raise BadConfiguration(
            f"another model is already called {names[0]!r}; give one of them a model-name of its own, in its table "
            "[[models]] of the file given with --config"
        )
    return own


def _with_own_names(model: Model, others: Sequence[Model | PendingModel], config: Config) -> Model:
    """Return ``model`` without the names of ``others``, and with those that lists showed before as further names."""
    names = _own_names(model.names, others)
    listed = expected_names(config) if config.load == "lazy" else ()
    aliases = tuple(dict.fromkeys((*model.aliases, *(name for name in listed if name not in names))))
    return replace(model, names=names, aliases=aliases)


_LOG = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
"""How long a model that did not start is left alone, before a request makes it try again."""

_LOADING_SECONDS = 5.0
"""When a client should ask again for a model that is being loaded."""

_PATH = re.compile(r"(?<![\w:/.~])(?:~|\.{1,2})?/(?:[^\s'\",;:]*/)?([^\s'\",;:/]+)")
"""A path of this machine in a message, and its last part: clients do not see more of it."""


class PendingModel:
    """A model that is not loaded.

    Attributes:
        names: the names by which requests ask for it; lists show the first.
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
        return self.names[0]

    @property
    def state(self) -> str:
        return "loading" if self._loading is not None else "failed" if self.failure else "lazy"

    def describe(self) -> None:
        """Read what lists show of it. Raises BadConfiguration for a wrong model card or profile."""
        config = self._config
        self._card = read_card(config.model_card)
        self._profiles = read_profiles(config.codex_catalog, config.codex_profile, self.names)

    def info(self, name: str = "") -> ModelInfo:
        config, name = self._config, name or self.name
        own = ModelInfo(
            name, self._created, config.context_window or 0, config.max_output_tokens, is_loaded=False
        )
        return self._card.info(own, self._profiles.get(name, {}))

    def fail(self, error: SingletreeError) -> None:
        self.failure = _PATH.sub(r"…/\1", error.message)
        self._retry_at = time.monotonic() + RETRY_SECONDS

    def refusal(self) -> Overloaded:
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
        built_in = built_in_model(config.engine)
        return (DEFAULT_MODEL if built_in is None else built_in[0],)
    path = Path(config.model).expanduser()
    if built_in_repository(config.model) or not (
        path.is_absolute() or path.suffix == ".gguf" or path.exists()
    ):
        repo = config.model.partition(":")[0]
        return tuple(dict.fromkeys((repo, repo.rpartition("/")[2], config.model)))
    return (path.name.removesuffix(".gguf"),)
