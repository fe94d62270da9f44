"""A served model: its tokenizer, chat template, family and engine."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from singletree import families
from singletree.conversation import Thinking
from singletree.engines.engine import Engine
from singletree.engines.queueing import QueueingEngine
from singletree.engines.routing.grammar_matchers import GrammarMatchers, MatcherVocabulary
from singletree.engines.routing.modes import RoutingOptions, make_policy
from singletree.engines.routing.pool import EnginePool
from singletree.engines.routing.residency import DEFAULT_PATIENCE
from singletree.engines.routing.worker import Worker
from singletree.engines.unloading import UnloadingEngine
from singletree.engines.weights.progress import Progress, no_progress, shown_step
from singletree.errors import BadConfiguration
from singletree.parsing import family as drawing
from singletree.parsing.family import Family
from singletree.prompts.history import canonicalization
from singletree.prompts.prompt_cache import PromptCache
from singletree.prompts.replay.splicing import TurnDelimiters
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.template.chat_template import ChatTemplate, load_chat_template
from singletree.prompts.tokenizer.tokenizer import GuardFunction, Tokenizer
from singletree.protocols.models import ModelInfo
from singletree.server.models import checkpoint_family, loaders
from singletree.server.models.capsule import Capsules, load_capsules, model_fingerprint
from singletree.server.models.eyes import Eyes, find_eyes, tokenizer_for
from singletree.server.models.model_card import Card, read_card, read_profiles
from singletree.server.models.pending_model import ANY_NAME
from singletree.server.models.redis_turn_store import RedisTurnStore
from singletree.server.models.shared_turns import SharedTurnMemory
from singletree.server.models.turn_journal import JournalledMemory
from singletree.server.models.turn_store import SqliteTurnStore

if TYPE_CHECKING:
    # Imported for its type alone: it brings in the command-line library.
    from singletree.server.models.config import Config

Report = Callable[[str], None]
T = TypeVar("T")

_PROMPT_BYTES = 128 * 2**20
_NO_HALF = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """What is needed to write prompts for a model and to parse its output; no engine.

    Attributes:
        tokenizer: the model's tokenizer.
        template: its chat template.
        family: how it writes reasoning and tool calls.
        why: how the family was chosen.
        stability_off: rules of ``prompts.history.canonicalization`` that are switched off.
        memory: the turns that it generated; None if none are kept.
        layout: what its template writes around an assistant turn; None if no added tokens separate turns.
        restore_reasoning: whether reasoning that a harness left out is restored.
        thinking: the defaults for requests that do not mention reasoning.
        capsules: encrypts turns for clients to carry; None for no capsules.
        prompt_cache: the last prompts of its conversations.
        eyes: how it gets pictures; None if it gets none.
        blindness: why it gets none; empty where that is not known.
        own_guard: keeps special tokens out of text that comes back as the assistant's.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    family: Family
    why: str
    stability_off: frozenset[str] = frozenset()
    memory: TurnMemory | None = None
    layout: TurnDelimiters | None = None
    restore_reasoning: bool = True
    thinking: Thinking = field(default_factory=Thinking)
    capsules: Capsules | None = None
    prompt_cache: PromptCache = field(default_factory=lambda: PromptCache(_PROMPT_BYTES))
    eyes: Eyes | None = None
    blindness: str = ""
    own_guard: GuardFunction = field(init=False, compare=False)
    _derived: dict[Callable[..., Any], Any] = field(
        init=False, compare=False, repr=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        # The only way to set a field of a frozen value: there must be no chat format without this guard.
        object.__setattr__(self, "own_guard", self.tokenizer.guard_except(_own_tokens(self)))

    def derived(self, make: Callable[[ChatFormat], T]) -> T:
        """Return ``make(self)``, which is called once: for values that depend on the format alone."""
        found: T | None = self._derived.get(make)
        if found is None:
            found = self._derived[make] = make(self)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(ChatFormat):
    """One served model.

    Attributes:
        names: the names that clients may use; lists show the first.
        engine: generates its tokens.
        context_window: longest prompt and completion together, in tokens.
        max_output_tokens: longest completion in tokens; None if only the window limits it.
        created: when it was loaded, in unix seconds.
        card: the operator's description of it.
        profiles: fields of Codex's ``ModelInfo`` that it inherits, by its name.
        aliases: further names, which lists do not show; ``*`` stands for any characters.
        unloading: stops the engine when nobody uses it; None if it runs for ever.
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

    @property
    def state(self) -> str:
        """One of ``MODEL_STATES``, for metrics."""
        return "loaded" if self.unloading is None or self.unloading.is_loaded else "unloaded"

    @property
    def name(self) -> str:
        """The name that lists show."""
        return self.names[0]

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
        )
        return self.card.info(own, self.profiles.get(own.id, {}))

    async def close(self) -> None:
        """Close the engine; generations in flight end with EngineFailed."""
        await self.engine.close()
        if isinstance(self.memory, JournalledMemory | SharedTurnMemory):
            await asyncio.to_thread(self.memory.close)


async def load_model(
    config: Config,
    report: Report,
    progress: Progress = no_progress,
    find_source: loaders.FindSource = loaders.find_model_source,
) -> Model:
    """Load the model that ``config`` names, and start its engine.

    Args:
        report: called with lines about what was loaded and why.
        progress: reports downloads.
        find_source: finds the model and its engines.

    Raises:
        BadConfiguration, WeightsUnavailable, EngineFailed.
    """
    card = read_card(config.model_card)
    source = await find_source(config, progress)
    try:
        chat_format = load_chat_format(config, await asyncio.to_thread(source.load_tokenizer))
        report(f"model      {source.names[0]}")
        report(f"template   {_template_origin(config, chat_format.template)}")
        report(f"family     {chat_format.family.name}: {chat_format.why}")
        for note in source.notes:
            report(note)
        names = tuple(name for name in config.model_name if name != ANY_NAME) or source.names
        profiles = read_profiles(config.codex_catalog, config.codex_profile, names)
        chat_format = replace(chat_format, capsules=_capsules(config, names[0], chat_format, report))
        chat_format = replace(chat_format, memory=await asyncio.to_thread(_memory, config, chat_format))
        runs_here = not config.engine_url and config.engine != "scripted"
        with shown_step(progress, f"loading {names[0]}") if runs_here else nullcontext():
            workers = await source.start_workers(chat_format.tokenizer)
        if config.idle_unload is not None:
            workers = tuple(
                _unloading(each, source, chat_format.tokenizer, config.idle_unload) for each in workers
            )
        engine = await serve_workers(config, workers, chat_format.tokenizer, names[0])
    except BaseException:
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
) -> QueueingEngine | EnginePool:
    """Return one engine that generates on ``workers``, which have been started.

    Args:
        tokenizer: follows the grammars of turns that go on after a failure.
        name: the model's name.

    Raises:
        BadConfiguration: an option of the router does not fit the engines.
    """
    if len(workers) == 1 and not workers[0].engine.info().resumable:
        # Such a turn would begin anew.
        return QueueingEngine(workers[0].engine, config.hold_seconds)
    mode = config.router_mode if len(workers) > 1 else "round-robin"
    options = RoutingOptions(
        name,
        config.kv_events,
        config.kv_replay,
        config.kv_cache_tokens,
        replace(DEFAULT_PATIENCE, wait=min(DEFAULT_PATIENCE.wait, config.hold_seconds)),
    )
    pool = EnginePool(
        workers,
        make_policy(mode, options),
        hold_seconds=config.hold_seconds,
        migration_limit=config.migration_limit,
        matchers=GrammarMatchers(partial(matcher_vocabulary, tokenizer)),
    )
    try:
        await pool.begin()
    except BaseException:
        await pool.close()
        raise
    return pool


def _unloading(worker: Worker, source: loaders.ModelSource, tokenizer: Tokenizer, seconds: float) -> Worker:
    async def start() -> Engine:
        [started] = await source.start_workers(tokenizer)
        return started.engine

    return Worker(worker.name, UnloadingEngine(worker.engine, start, seconds))


def matcher_vocabulary(tokenizer: Tokenizer) -> MatcherVocabulary:
    """Return the vocabulary by which llguidance follows a turn. Takes a second for a large one."""
    special = {id for text, id in tokenizer.added_tokens.items() if text in tokenizer.special_tokens}
    texts = [tokenizer.token_bytes(id) for id in range(tokenizer.vocabulary_size)]
    return MatcherVocabulary(texts, sorted(special), sorted(tokenizer.stop_token_ids), tokenizer.encode)


def _own_tokens(chat_format: ChatFormat) -> frozenset[str]:
    """Return the added tokens that are markers of the family's format and do not separate turns."""
    family, layout = chat_format.family, chat_format.layout or TurnDelimiters((), ())
    own = "\n".join(drawing.markers(family))
    # Some templates open reasoning in every header: that marker still belongs to the model's own output.
    opens = (family.reasoning or ("",))[0].strip()
    headers = [header.replace(opens, "") if opens else header for header in layout.headers]
    around = "\n".join([*headers, family.message_header, *family.dropped_markers, *layout.ends])
    return frozenset(
        text for text in chat_format.tokenizer.added_tokens if text in own and text not in around
    )


def load_chat_format(config: Config, tokenizer: Tokenizer) -> ChatFormat:
    """Return the chat format of the model with ``tokenizer``, by the flags in ``config`` or by the checkpoint.

    Raises:
        BadConfiguration: a flag names an unknown family or rule, or the chat template is invalid.
    """
    source = None if config.chat_template is None else _read(config.chat_template)
    # What only the family knows of a template is that of the checkpoint's own, whatever parsers the flags name.
    own = families.find(tokenizer.chat_template if source is None else source).family
    template = load_chat_template(
        tokenizer, source, variables=own.thinking_variables, call_id_picture=own.call_id_picture
    )
    family, why = choose_family(config, template, tokenizer.response_template)
    tokenizer = tokenizer.with_format(
        (*own.stop_markers, *family.stop_markers), (*drawing.markers(own), *drawing.markers(family))
    )
    return ChatFormat(
        tokenizer=tokenizer,
        template=template,
        family=family,
        why=why,
        stability_off=disabled_rules(config),
        memory=TurnMemory(config.turn_memory) if config.turn_memory else None,
        layout=template.layout(tokenizer),
        restore_reasoning=config.restore_reasoning,
        thinking=default_thinking(config),
    )


def _capsules(config: Config, name: str, chat_format: ChatFormat, report: Report) -> Capsules | None:
    fingerprint = model_fingerprint(name, chat_format.tokenizer, chat_format.template.source)
    return load_capsules(config.capsule_key, fingerprint, strict=config.strict_capsules, report=report)


def _memory(config: Config, chat_format: ChatFormat) -> TurnMemory | None:
    """Return the turn memory of ``chat_format``: its own, kept in a file, or shared with other processes.

    Raises:
        BadConfiguration: the file or the store cannot be used.
    """
    limit, path, capsules = config.turn_memory, config.turn_memory_path, chat_format.capsules
    if chat_format.memory is None or capsules is None:
        return chat_format.memory
    if config.turn_memory_url is not None:
        return SharedTurnMemory(limit, RedisTurnStore(config.turn_memory_url), capsules)
    if config.shared_folder is not None:
        file = path or config.shared_folder / f"turns-{capsules.fingerprint.hex()}.sqlite"
        try:
            store = SqliteTurnStore(file, limit, is_durable=path is not None)
        except (OSError, sqlite3.Error) as error:
            raise BadConfiguration(f"--turn-memory-path {file}: {error}") from None
        return SharedTurnMemory(limit, store, capsules)
    return chat_format.memory if path is None else JournalledMemory(limit, path, capsules)


def choose_family(
    config: Config, template: ChatTemplate, response_template: object = None
) -> tuple[Family, str]:
    """Return the family, and why: by the flags, and what no flag names (reasoning, calls) by the checkpoint.

    Args:
        response_template: the checkpoint's own description of its output, if it has one.

    Raises:
        BadConfiguration: a flag names an unknown family, or one without reasoning or calls.
    """
    found = checkpoint_family.find_checkpoint_family(template, response_template)
    if config.reasoning_parser is None and config.tool_call_parser is None:
        cure = (
            ""
            if found.known
            else "; WARNING: name it with --tool-call-parser and --reasoning-parser if it has one"
        )
        return found.family, found.why + cure

    def get(name: str, half: str) -> Family:
        if name.lower() in checkpoint_family.RESPONSE_TEMPLATE_NAMES:
            return checkpoint_family.described_family(name, template, response_template)
        return families.pair(**{half: name})

    thinks = _half(config.reasoning_parser, found.family, lambda name: get(name, "reasoning"))
    calls = _half(config.tool_call_parser, found.family, lambda name: get(name, "tools"))
    given = {"--reasoning-parser": config.reasoning_parser, "--tool-call-parser": config.tool_call_parser}
    by_flag = [flag for flag, name in given.items() if name is not None]
    rest = "" if len(by_flag) == 2 else f"; the rest because {found.why}"
    return drawing.combine_halves(thinks, calls), f"by {' and '.join(by_flag)}{rest}"


def _half(name: str | None, found: Family, get: Callable[[str], Family]) -> Family | None:
    if name is None:
        return found
    return None if name == _NO_HALF else get(name)


def default_thinking(config: Config) -> Thinking:
    """Return the defaults for requests that do not mention reasoning.

    Raises:
        BadConfiguration: ``--default-chat-template-kwargs`` is not a JSON object.
    """
    word = config.default_thinking.lower() if config.default_thinking else None
    switch = {"on": True, "off": False}.get(word or "")
    try:
        variables = json.loads(config.default_chat_template_kwargs or "{}")
    except (ValueError, RecursionError):
        variables = None
    if not isinstance(variables, dict):
        raise BadConfiguration(
            f"--default-chat-template-kwargs is {config.default_chat_template_kwargs!r}; give a JSON object such as "
            "'{\"enable_thinking\": false}'"
        )
    return Thinking(
        enabled=switch, effort=None if switch is not None else word, template_arguments=variables or None
    )


def disabled_rules(config: Config) -> frozenset[str]:
    """Return the stability rules that ``config`` switches off. Raises BadConfiguration for an unknown one."""
    off = set(config.stability_off)
    known = {rule.name for rule in canonicalization.NAMED}
    if off - known:
        raise BadConfiguration(
            f"--stability-off: unknown rule {', '.join(sorted(off - known))}; "
            f"the rules are {', '.join(sorted(known))}"
        )
    return frozenset(off if config.strip_anthropic_preamble else off | {"billing_header"})


def _template_origin(config: Config, template: ChatTemplate) -> str:
    if config.chat_template is not None:
        return f"from {config.chat_template}"
    if template.is_default:
        return "WARNING: the model has none; plain ChatML is used, give the right one with --chat-template"
    return "the model's own" + ("" if template.capabilities.tools else ", which prints no tools")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadConfiguration(f"--chat-template {path}: {reason}") from None
