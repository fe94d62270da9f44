"""The chat format of a model: what is needed to write prompts for it and to parse its output; no engine.

Its family is found by the chat template, else by the checkpoint's own ``response_template``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from singletree import families
from singletree.conversation import Thinking
from singletree.errors import BadConfiguration, BadFamily
from singletree.parsing.family import DetectedFamily, Family, combine_halves, markers
from singletree.prompts.history import canonicalization
from singletree.prompts.prompt_cache import PromptCache
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.replay.turn_places import TurnDelimiters
from singletree.prompts.template.chat_template import ChatTemplate, load_chat_template
from singletree.prompts.tokenizer.tokenizer import GuardFunction, Tokenizer
from singletree.server.doors import open_door
from singletree.server.models.eyes import Eyes
from singletree.server.settings.config import Config
from singletree.server.turns.capsule import Capsules

T = TypeVar("T")
_PROMPT_BYTES = 128 * 2**20
_NO_HALF = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """What is needed to write prompts for a model and to parse its output; no engine.

    Attributes:
        why: how the family was chosen.
        stability_off: rules of ``prompts.history.canonicalization`` that are switched off.
        memory: the turns that it generated; None if none are kept.
        layout: what its template writes around an assistant turn; None if no added tokens separate turns.
        restore_reasoning: whether reasoning that a harness left out is restored.
        thinking: the defaults for requests that do not mention reasoning.
        capsules: encrypts turns for clients to carry; None for no capsules.
        eyes: how it gets pictures; None if it gets none.
        blindness: why it gets none; empty where that is not known.
        others: returns those of the server's other models.
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
    others: Callable[[], Sequence[ChatFormat]] = field(default=tuple, compare=False)
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


def _own_tokens(chat_format: ChatFormat) -> frozenset[str]:
    """Return the added tokens that are markers of the family's format and do not separate turns."""
    family, layout = chat_format.family, chat_format.layout or TurnDelimiters((), ())
    own = "\n".join(markers(family))
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
        tokenizer, source, variables=own.thinking_variables, call_id_format=own.call_id_format
    )
    family, why = choose_family(config, template, tokenizer.response_template)
    tokenizer = tokenizer.with_format(
        (*own.stop_markers, *family.stop_markers), (*markers(own), *markers(family))
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


def choose_family(
    config: Config, template: ChatTemplate, response_template: object = None
) -> tuple[Family, str]:
    """Return the family, and why: by the flags, and what no flag names (reasoning, calls) by the checkpoint.

    Raises:
        BadConfiguration: a flag names an unknown family, or one without reasoning or calls.
    """
    found = find_checkpoint_family(template, response_template)
    reads = template.capabilities
    if config.reasoning_parser is None and config.tool_call_parser is None:
        cure = (
            ""
            if found.known or not (reads.tools or reads.calls or reads.reasoning or reads.switches)
            else "; WARNING: name it with --tool-call-parser and --reasoning-parser if it has one"
        )
        return found.family, found.why + cure

    def get(name: str, half: str) -> Family:
        if name.lower() in RESPONSE_TEMPLATE_NAMES:
            return described_family(name, template, response_template)
        return families.pair(**{half: name})

    thinks = _half(config.reasoning_parser, found.family, lambda name: get(name, "reasoning"))
    calls = _half(config.tool_call_parser, found.family, lambda name: get(name, "tools"))
    given = {"--reasoning-parser": config.reasoning_parser, "--tool-call-parser": config.tool_call_parser}
    by_flag = [flag for flag, name in given.items() if name is not None]
    rest = "" if len(by_flag) == 2 else f"; the rest because {found.why}"
    return combine_halves(thinks, calls), f"by {' and '.join(by_flag)}{rest}"


def _half(name: str | None, found: Family, get: Callable[[str], Family]) -> Family | None:
    if name is None:
        return found
    return None if name == _NO_HALF else get(name)


def default_thinking(config: Config) -> Thinking:
    """Return the defaults for requests that do not mention reasoning. Raises BadConfiguration."""
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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadConfiguration(f"--chat-template {path}: {reason}") from None


FamilyOfTemplate = Callable[[ChatTemplate, object], Family]

RESPONSE_TEMPLATE_NAMES = frozenset({"hf", "response_template"})
"""The names in vLLM and SGLang for a parser that follows the checkpoint's ``response_template``."""


def template_alone(source: str) -> ChatTemplate:
    """Return a chat template as its family reads it, without a tokenizer. Raises BadConfiguration."""
    own = families.find(source).family
    return ChatTemplate(
        source,
        bos_token="<s>",
        eos_token="</s>",
        variables=own.thinking_variables,
        call_id_format=own.call_id_format,
    )


def find_checkpoint_family(template: ChatTemplate, response_template: object = None) -> DetectedFamily:
    """Return the family, and why: known by the chat template, else described by ``response_template``, else plain text.

    A ``response_template`` takes precedence over a known family without calls.
    """
    found = families.find(None if template.is_default else template.source)
    if response_template is None or (found.known and found.family.forms):
        return found
    try:
        return _described(template, response_template)
    except BadFamily as error:
        why = f"{found.why}; the checkpoint's response_template is ignored: {error.message}"
        return DetectedFamily(found.family, why, found.known)


def described_family(name: str, template: ChatTemplate, response_template: object) -> Family:
    """Return the family that this checkpoint's ``response_template`` describes.

    Raises:
        BadConfiguration: there is none, or it cannot be used here; the message has ``name``, the value of the flag.
    """
    cure = "leave the parser out to have the family found, or name one; `singletree families` lists them"
    if response_template is None:
        raise BadConfiguration(f"{name!r}: the checkpoint has no response_template; {cure}")
    try:
        return _described(template, response_template).family
    except BadFamily as error:
        raise BadConfiguration(
            f"{name!r}: the checkpoint's response_template cannot be used: {error.message}; {cure}"
        ) from None


def _described(template: ChatTemplate, response_template: object) -> DetectedFamily:
    family_of_template: FamilyOfTemplate = open_door("response template")
    family = family_of_template(template, response_template)
    return DetectedFamily(family, "by the checkpoint's response_template", True)
