"""A served model: its tokenizer, chat template, family and engine, and the operator's card of it (``--model-card``).

How Codex treats a model that it does not know can also be inherited from an entry of a catalog in Codex's format
(``--codex-catalog``; ``singletree catalog --bundled`` writes the catalog that comes with Codex), by name
(``--codex-profile``).
"""

from __future__ import annotations

import asyncio
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from singletree.conversation import Conversation
from singletree.engines.engine import Constraint, Engine
from singletree.engines.lifetime import UnloadingEngine
from singletree.engines.progress import Progress, no_progress, shown_step
from singletree.engines.sharing import OwnedEngine, QueueingEngine
from singletree.engines.workers import MakePool, MatcherSource, Pool, RoutingOptions, TurnMatcher, Worker
from singletree.errors import BadConfiguration
from singletree.prompts.replay.recall import RecallCheckpoint, RecallTurns
from singletree.prompts.replay.turn_keys import Fingerprint
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.protocols.models import ModelInfo
from singletree.server.capsules import Capsules, load_capsules, model_fingerprint
from singletree.server.doors import open_door, open_door_in_thread
from singletree.server.models.chat_format import ChatFormat, find_eyes, load_chat_format, tokenizer_for
from singletree.server.models.model_source import FindSource, ModelSource, find_model_source
from singletree.server.settings.config import ANY_NAME, WEIGHTLESS_ENGINES, Config

_NOT_INHERITED = frozenset(
    {
        "slug",
        "display_name",
        "description",
        "visibility",
        "supported_in_api",
        "priority",
        "context_window",
        "max_context_window",
        "auto_compact_token_limit",
        "additional_speed_tiers",
        "service_tiers",
        "availability_nux",
        "upgrade",
        "comp_hash",
        "tool_mode",
        "use_responses_lite",
        "multi_agent_version",
        "multi_agent_reasoning_effort",
        "supports_reasoning_effort_updates",
        "node_repl_auto_review_required",
        "node_repl_disabled",
    }
)
"""Fields that describe the entry's own model or OpenAI's service; no other model inherits them."""


class Card(Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a card.

    Attributes:
        reasoning_efforts: the efforts that a request may name; by default those that the template knows.
        input_modalities: by default text, and image where the model gets pictures.
        instructions: Codex's base instructions; ``instructions_file`` is a path relative to the card.
        tool_output_tokens: how many tokens of a tool's output Codex keeps.
        codex: more fields of Codex's ``ModelInfo``, unchanged.
    """

    display_name: str = ""
    description: str | None = None
    reasoning_efforts: tuple[str, ...] | None = None
    default_effort: str | None = None
    input_modalities: tuple[str, ...] | None = None
    instructions: str = ""
    instructions_file: str = ""
    tool_output_tokens: int = 10_000
    codex: dict[str, Any] = {}

    def info(self, own: ModelInfo, profile: Mapping[str, Any]) -> ModelInfo:
        """Return ``own``, what the checkpoint and the settings give, with the fields of the card and of ``profile``."""
        efforts = self.reasoning_efforts
        return replace(
            own,
            display_name=self.display_name,
            description=self.description,
            input_modalities=self.input_modalities or own.input_modalities,
            reasoning_efforts=own.reasoning_efforts if efforts is None else efforts,
            default_effort=self.default_effort,
            instructions=self.instructions,
            tool_output_tokens=self.tool_output_tokens,
            codex={**profile, **self.codex},
        )


class _Catalog(Struct):
    models: list[dict[str, Any]]


def read_card(path: Path | None) -> Card:
    """Read the card at ``path``; without a path, return an empty one. Raises BadConfiguration."""
    if path is None:
        return Card()
    try:
        card = msgspec.convert(tomllib.loads(_read_text(path)), Card)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BadConfiguration(f"--model-card {path.name}: {error}") from None
    if card.instructions_file:
        text = _read_text(path.parent / card.instructions_file)
        return msgspec.structs.replace(card, instructions=text, instructions_file="")
    return card


def read_profiles(
    catalog: Path | None, wanted: Sequence[str], names: Sequence[str]
) -> dict[str, Mapping[str, Any]]:
    """Return the fields that each of ``names`` inherits from ``catalog``, a file in the format of Codex's.

    Args:
        wanted: ``NAME=SLUG``, or ``SLUG`` for the first of ``names``.

    Raises:
        BadConfiguration: the file cannot be read, has no such entry, or the model has no such name.
    """
    if not wanted:
        return {}
    if catalog is None:
        raise BadConfiguration(
            "--codex-profile needs --codex-catalog: write one with `singletree catalog --bundled`"
        )
    entries = _entries(catalog)
    inherited: dict[str, Mapping[str, Any]] = {}
    for each in wanted:
        name, slug = each.rsplit("=", 1) if "=" in each else (names[0], each)
        if slug not in entries:
            raise BadConfiguration(f"{catalog.name} has no {slug!r}; it has {', '.join(sorted(entries))}")
        if name not in names:
            raise BadConfiguration(
                f"--codex-profile names {name!r}, which is not a name of this model; its names are {', '.join(names)}"
            )
        inherited[name] = {key: value for key, value in entries[slug].items() if key not in _NOT_INHERITED}
    return inherited


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    try:
        found = msgspec.json.decode(_read_text(path), type=_Catalog).models
    except msgspec.DecodeError as error:
        raise BadConfiguration(f"--codex-catalog {path.name}: {error}") from None
    return {str(entry.get("slug")): entry for entry in found}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise BadConfiguration(f"cannot read {path}: {reason}") from None


Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(ChatFormat):
    """One served model.

    Attributes:
        names: the names that clients may use; lists show the first, ``name``.
        context_window: longest prompt and completion together, in tokens.
        max_output_tokens: longest completion in tokens; None if only the window limits it.
        created: when it was loaded, in unix seconds.
        card: the operator's description of it.
        profiles: fields of Codex's ``ModelInfo`` that it inherits, by its name.
        aliases: further names, which lists do not show; ``*`` stands for any characters.
        unloading: stops the engine when nobody uses it; None if it runs for ever.
        reads_outlooks: whether the engine does.
    """

    names: tuple[str, ...]
    engine: Engine
    context_window: int
    max_output_tokens: int | None
    created: int
    card: Card = field(default_factory=Card)
    profiles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    unloading: UnloadingEngine | None = None
    name: str = field(init=False)
    reads_outlooks: bool = field(init=False)
    _parts: dict[str, Model] = field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        ChatFormat.__post_init__(self)  # Slots make another class, which super() does not know.
        object.__setattr__(self, "name", self.names[0])
        object.__setattr__(self, "reads_outlooks", self.engine.info().reads_outlooks)

    def of(self, owner: str) -> Model:
        """Return the model with the memories of one owner, who shares the engine; itself for an empty name."""
        if not owner:
            return self
        found = self._parts.get(owner)
        if found is None:
            own = replace(
                self,
                engine=OwnedEngine(self.engine, owner),
                tokenizer=self.tokenizer.of(owner),
                memory=None if self.memory is None else self.memory.of(owner),
                prompt_cache=self.prompt_cache.of(owner),
                capsules=None if self.capsules is None else self.capsules.of(owner),
                others=lambda: [each.of(owner) for each in self.others() if isinstance(each, Model)],
            )
            found = self._parts.setdefault(owner, own)
        return found

    @property
    def state(self) -> str:
        return "loaded" if self.unloading is None or self.unloading.is_loaded else "unloaded"

    def kept_conversation(self, messages: tuple[Fingerprint, ...]) -> Conversation | None:
        """Return the conversation of these fingerprints, as its client sent it; None where no prompt of it is kept."""
        for checkpoints in self.prompt_cache.checkpoints():
            found: RecallCheckpoint | None = checkpoints.get(RecallTurns)
            if found is None or len(found.given.turns) != len(messages):
                continue
            if found.recalled.digests.fingerprints == messages:
                return found.given
        return None

    def info(self, name: str = "") -> ModelInfo:
        """Return its description for clients, under ``name``; by default under its first name."""
        efforts = next(iter(self.template.capabilities.efforts.values()), ())
        own = ModelInfo(
            name or self.name,
            self.created,
            self.context_window,
            self.max_output_tokens,
            input_modalities=("text",) if self.eyes is None else ("text", "image"),
            reasoning_efforts=efforts,
            calls_tools=self.template.capabilities.tools,
            prompt_speed=(self.engine.info().details or {}).get("prompt_tokens_per_second"),
        )
        return self.card.info(own, self.profiles.get(own.id, {}))

    async def close(self) -> None:
        await self.engine.close()
        if self.memory is not None:
            await asyncio.to_thread(self.memory.close)


WatchWeights = Callable[[Engine, Sequence[Engine], Path], Engine]
"""Returns an engine whose weights may change, on these workers, for the capture in a folder."""


async def load_model(
    config: Config,
    report: Report,
    progress: Progress = no_progress,
    find_source: FindSource = find_model_source,
) -> Model:
    """Load the model of ``config``, start its engine. Raises BadConfiguration, WeightsUnavailable, EngineFailed."""
    card = read_card(config.model_card)
    source = await find_source(config, progress)
    memory: TurnMemory | None = None
    try:
        chat_format = load_chat_format(config, await asyncio.to_thread(source.load_tokenizer))
        report(f"model      {source.names[0]}")
        report(f"template   {_template_origin(config, chat_format.template, source.template_origin)}")
        report(f"family     {chat_format.family.name}: {chat_format.why}")
        for note in source.notes:
            report(note)
        names = tuple(name for name in config.model_name if name != ANY_NAME) or source.names
        profiles = read_profiles(config.codex_catalog, config.codex_profile, names)
        fingerprint = model_fingerprint(names[0], chat_format.tokenizer, chat_format.template.source)
        capsules = load_capsules(
            config.capsule_key, fingerprint, strict=config.strict_capsules, report=report
        )
        chat_format = replace(chat_format, capsules=capsules)
        memory = await asyncio.to_thread(_memory, config, chat_format)
        chat_format = replace(chat_format, memory=memory)
        runs_here = not config.engine_url and config.engine not in WEIGHTLESS_ENGINES
        with shown_step(progress, f"loading {names[0]}") if runs_here else nullcontext():
            workers = await source.start_workers(chat_format.tokenizer)
        if config.idle_unload is not None:
            workers = tuple(
                _unloading(each, source, chat_format.tokenizer, config.idle_unload) for each in workers
            )
        engine: Engine = await serve_workers(config, workers, chat_format.tokenizer, names[0])
        if config.capture is not None:
            watch: WatchWeights = open_door("weights")
            engine = watch(engine, [each.engine for each in workers], config.capture)
    except BaseException:
        if memory is not None:
            await asyncio.to_thread(memory.close)
        await source.close()
        raise
    info = engine.info()
    window = min(info.context_window, config.context_window or info.context_window)
    report(f"engine     {source.engine}: {info.slots} at once, window of {window} tokens")
    eyes, blindness = find_eyes(info, chat_format.template, chat_format.tokenizer)
    tokenizer = tokenizer_for(eyes, chat_format.tokenizer)
    chat_format = replace(chat_format, eyes=eyes, blindness=blindness, tokenizer=tokenizer)
    if info.pictures is not None or chat_format.template.capabilities.image is not None:
        report(f"pictures   {'shown to the model' if eyes else f'WARNING: not shown: {blindness}'}")
    return Model(
        **{each.name: getattr(chat_format, each.name) for each in fields(ChatFormat) if each.init},
        names=names,
        aliases=config.model_alias,
        engine=engine,
        context_window=window,
        max_output_tokens=config.max_output_tokens,
        created=int(time.time()),
        card=card,
        profiles=profiles,
        unloading=next((each.engine for each in workers if isinstance(each.engine, UnloadingEngine)), None),
    )


async def serve_workers(
    config: Config, workers: Sequence[Worker], tokenizer: Tokenizer, name: str
) -> QueueingEngine | Pool:
    """Return one engine that generates on ``workers``, which have been started.

    The tokenizer follows the grammars of turns that go on after a failure.

    Raises:
        BadConfiguration: an option of the router does not fit the engines.
    """
    if len(workers) == 1 and not workers[0].engine.info().resumable:
        # Such a turn would begin anew.
        return QueueingEngine(workers[0].engine, config.hold_seconds)
    mode = config.router_mode if len(workers) > 1 else "round-robin"
    options = RoutingOptions(
        mode,
        name,
        config.kv_events,
        config.kv_replay,
        config.kv_cache_tokens,
        config.hold_seconds,
        config.migration_limit,
    )
    make_pool: MakePool = open_door("router kv" if mode == "kv" else "router")
    with_tags = workers[0].engine.info().has_special_tags
    pool = make_pool(workers, options, _Matchers(tokenizer, with_tags=with_tags))
    try:
        await pool.begin()
    except BaseException:
        await pool.close()
        raise
    return pool


def _unloading(worker: Worker, source: ModelSource, tokenizer: Tokenizer, seconds: float) -> Worker:
    async def start() -> Engine:
        [started] = await source.start_workers(tokenizer)
        return started.engine

    return Worker(worker.name, UnloadingEngine(worker.engine, start, seconds))


MakeMatchers = Callable[[Tokenizer, bool], MatcherSource]


class _Matchers:
    """Follows the grammars of turns; what that takes is loaded for the first that goes on after a failure."""

    def __init__(self, tokenizer: Tokenizer, *, with_tags: bool) -> None:
        self._tokenizer, self._with_tags = tokenizer, with_tags
        self._source: MatcherSource | None = None

    async def follow(self, constraint: Constraint, token_ids: Sequence[int]) -> TurnMatcher | None:
        if self._source is None:
            make: MakeMatchers = await open_door_in_thread("grammar matchers")
            if self._source is None:  # Another turn may have made it meanwhile.
                self._source = make(self._tokenizer, self._with_tags)
        return await self._source.follow(constraint, token_ids)


OpenMemory = Callable[[Config, Capsules], TurnMemory]


def _memory(config: Config, chat_format: ChatFormat) -> TurnMemory | None:
    """Return the turn memory: in memory only, in a file, or shared with other processes. Raises BadConfiguration."""
    capsules = chat_format.capsules
    stores = (config.turn_memory_url, config.turn_memory_path, config.shared_folder)
    if chat_format.memory is None or capsules is None or not any(stores):
        return chat_format.memory
    open_memory: OpenMemory = open_door("turn stores")
    return open_memory(config, capsules)


def _template_origin(config: Config, template: ChatTemplate, origin: str) -> str:
    if config.chat_template is not None:
        return f"from {config.chat_template}"
    if template.is_default:
        return "WARNING: the model has none; plain ChatML is used, give the right one with --chat-template"
    return origin + ("" if template.capabilities.tools else ", which prints no tools")
