"""The models that are served: each with its tokenizer, template, family and engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from singletree import families
from singletree.conversation import Thinking, Turn
from singletree.engines.engine import Engine
from singletree.engines.progress import Progress, quiet
from singletree.errors import BadConfiguration, ModelNotFound
from singletree.parsing import family as drawing
from singletree.parsing.family import Family
from singletree.prompts import stability
from singletree.prompts.beginnings import Beginnings
from singletree.prompts.replay import TurnMemory
from singletree.prompts.splicing import Layout
from singletree.prompts.template import ChatTemplate, load_chat_template
from singletree.prompts.tokenizer import Tokenizer
from singletree.protocols.models import ModelInfo
from singletree.server import checkpoint_family, origin
from singletree.server.capsule import Capsules, fingerprint_of, load_capsules
from singletree.server.card import Card, read_card, read_profiles
from singletree.server.config import Config
from singletree.server.continuing import ContinuingEngine
from singletree.server.overload import HoldingEngine
from singletree.server.turn_journal import JournalledMemory

Say = Callable[[str], None]

_PROMPT_BYTES = 128 * 2**20
_NO_HALF = "none"
_LONG_WINDOW = "[1m]"
"""What Claude Code puts behind a model's name to say that it counts on a window of a million tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """How a model is spoken to and read.

    Attributes:
        why: how the family was chosen.
        stability_off: rules of ``prompts.stability`` that are switched off.
        memory: the turns that it generated; None when none are kept.
        layout: how its template sets an assistant's turn; None where turns cannot be told apart by tokens.
        restore_reasoning: whether a harness that carries no reasoning gets that of the current tool loop back.
        capsules: what clients carry of its turns; None when they carry nothing.
        thinking: what holds for requests that say nothing of reasoning.
        beginnings: the last prompts of its conversations, as ``pipeline`` wrote them.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    family: Family
    why: str
    stability_off: frozenset[str] = frozenset()
    memory: TurnMemory | None = None
    layout: Layout | None = None
    restore_reasoning: bool = True
    thinking: Thinking = field(default_factory=Thinking)
    capsules: Capsules | None = None
    beginnings: Beginnings[Turn, Any] = field(default_factory=lambda: Beginnings(_PROMPT_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Speech):
    """One served model.

    Attributes:
        names: what clients may call it, the first is what it is called in lists.
        context_window: prompt and answer together, in tokens.
        max_output_tokens: longest answer in tokens; None where only the window limits it.
        created: unix seconds.
        card: what its operator says of it.
        profiles: fields of Codex's ``ModelInfo`` that it inherits, by its name.
    """

    names: tuple[str, ...]
    engine: Engine
    context_window: int
    max_output_tokens: int | None
    created: int
    card: Card = field(default_factory=Card)
    profiles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What it is called in lists."""
        return self.names[0]

    def info(self, name: str = "") -> ModelInfo:
        """What clients may learn about it, under its own name or another one."""
        card, known = self.card, next(iter(self.template.reads.efforts.values()), ())
        return ModelInfo(
            name or self.name,
            self.created,
            self.context_window,
            self.max_output_tokens,
            display_name=card.display_name,
            description=card.description,
            input_modalities=card.input_modalities,
            reasoning_efforts=known if card.reasoning_efforts is None else card.reasoning_efforts,
            default_effort=card.default_effort,
            instructions=card.instructions,
            tool_output_tokens=card.tool_output_tokens,
            codex={**self.profiles.get(name or self.name, {}), **card.codex},
        )


class Catalog:
    """All served models, by name, in which case does not matter."""

    def __init__(self, models: Sequence[Model]) -> None:
        self.models = tuple(models)
        self._by_name = {name.casefold(): model for model in self.models for name in model.names}

    def get(self, name: str) -> Model:
        """The model of that name; the only one there is for an empty name.

        Raises:
            ModelNotFound: none is called so.
        """
        if not name and len(self.models) == 1:
            return self.models[0]
        wanted = name.casefold()
        found = self._by_name.get(wanted) or self._by_name.get(wanted.removesuffix(_LONG_WINDOW))
        if found is None:
            raise ModelNotFound(name[:128], tuple(model.name for model in self.models))
        return found

    async def close(self) -> None:
        """End the engines; generations in flight end with EngineFailed."""
        for model in self.models:
            await model.engine.close()
            if isinstance(model.memory, JournalledMemory):
                await asyncio.to_thread(model.memory.close)


async def load(config: Config, say: Say, progress: Progress = quiet) -> Catalog:
    """The model that ``config`` names, its engine started. ``say`` gets lines on what was found and why.

    Raises:
        BadConfiguration, WeightsUnavailable, EngineFailed.
    """
    card = read_card(config.model_card)
    found = await origin.find(config, progress)
    try:
        speech = speech_of(config, await asyncio.to_thread(found.load_tokenizer))
        say(f"model      {found.names[0]}")
        say(f"template   {_told_template(config, speech.template)}")
        say(f"family     {speech.family.name}: {speech.why}")
        names = config.model_name or found.names
        profiles = read_profiles(config.codex_catalog, config.codex_profile, names)
        speech = replace(speech, capsules=_capsules(config, names[0], speech, say))
        speech = replace(speech, memory=await asyncio.to_thread(_kept_memory, config, speech))
        faster = asyncio.to_thread(speech.tokenizer.accelerate)
        engine, _ = await asyncio.gather(found.start_engine(speech.tokenizer), faster)
    except BaseException:
        await found.close()
        raise
    info = engine.info()
    window = min(info.context_window, config.context_window or info.context_window)
    say(f"engine     {config.engine}: {info.slots} at once, window of {window} tokens")
    model = Model(
        **{each.name: getattr(speech, each.name) for each in fields(Speech)},
        names=names,
        engine=_lasting(HoldingEngine(engine, config.hold_seconds)),
        context_window=window,
        max_output_tokens=config.max_output_tokens,
        created=int(time.time()),
        card=card,
        profiles=profiles,
    )
    return Catalog([model])


def _lasting(engine: Engine) -> Engine:
    return ContinuingEngine([engine]) if engine.info().goes_on else engine


def speech_of(config: Config, tokenizer: Tokenizer) -> Speech:
    """How the model with ``tokenizer`` is spoken to, as ``config`` or the checkpoint itself says.

    Raises:
        BadConfiguration: a flag names no family or rule, or the template is none.
    """
    source = None if config.chat_template is None else _read(config.chat_template)
    template = load_chat_template(tokenizer, source)
    family, why = choose_family(config, template, tokenizer.response_template)
    return Speech(
        tokenizer=tokenizer,
        template=template,
        family=family,
        why=why,
        stability_off=rules_off(config),
        memory=TurnMemory(config.turn_memory) if config.turn_memory else None,
        layout=template.layout(tokenizer),
        restore_reasoning=config.restore_reasoning,
        thinking=default_thinking(config),
    )


def _capsules(config: Config, name: str, speech: Speech, say: Say) -> Capsules | None:
    fingerprint = fingerprint_of(name, speech.tokenizer, speech.template.source)
    return load_capsules(config.capsule_key, fingerprint, strict=config.strict_capsules, say=say)


def _kept_memory(config: Config, speech: Speech) -> TurnMemory | None:
    """The memory of ``speech``, from its file where it has one."""
    if config.turn_memory_path is None or speech.memory is None or speech.capsules is None:
        return speech.memory
    return JournalledMemory(config.turn_memory, config.turn_memory_path, speech.capsules)


def choose_family(
    config: Config, template: ChatTemplate, response_template: object = None
) -> tuple[Family, str]:
    """The family by the flags, each half that no flag names by the checkpoint; and why.

    Raises:
        BadConfiguration: a flag names no family, or one without that half.
    """
    found = checkpoint_family.find(template, response_template)
    if config.reasoning_parser is None and config.tool_call_parser is None:
        cure = (
            ""
            if found.known
            else "; WARNING: name it with --tool-call-parser and --reasoning-parser if it has one"
        )
        return found.family, found.why + cure

    def get(name: str, half: str) -> Family:
        if name.lower() in checkpoint_family.NAMES:
            return checkpoint_family.named(name, template, response_template)
        return families.pair(**{half: name})

    thinks = _half(config.reasoning_parser, found.family, lambda name: get(name, "reasoning"))
    calls = _half(config.tool_call_parser, found.family, lambda name: get(name, "tools"))
    given = {"--reasoning-parser": config.reasoning_parser, "--tool-call-parser": config.tool_call_parser}
    by_flag = [flag for flag, name in given.items() if name is not None]
    rest = "" if len(by_flag) == 2 else f"; the rest because {found.why}"
    return drawing.pair(thinks, calls), f"by {' and '.join(by_flag)}{rest}"


def _half(name: str | None, found: Family, get: Callable[[str], Family]) -> Family | None:
    if name is None:
        return found
    return None if name == _NO_HALF else get(name)


def default_thinking(config: Config) -> Thinking:
    """What the server wishes where a client wishes nothing. Raises BadConfiguration for what is no JSON object."""
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


def rules_off(config: Config) -> frozenset[str]:
    """The stability rules that ``config`` switches off. Raises BadConfiguration for one that is unknown."""
    off = set(config.stability_off)
    known = {rule.name for rule in stability.NAMED}
    if off - known:
        raise BadConfiguration(
            f"--stability-off: no rule is called {', '.join(sorted(off - known))}; "
            f"there are {', '.join(sorted(known))}"
        )
    return frozenset(off if config.strip_anthropic_preamble else off | {"billing_header"})


def _told_template(config: Config, template: ChatTemplate) -> str:
    if config.chat_template is not None:
        return f"from {config.chat_template}"
    if template.is_default:
        return "WARNING: the model has none; plain ChatML stands in, give the right one with --chat-template"
    return "the model's own" + ("" if template.reads.tools else ", which prints no tools")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadConfiguration(f"--chat-template {path}: {reason}") from None
