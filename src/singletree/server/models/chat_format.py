"""The chat format of a model: what is needed to write prompts for it and to parse its output; no engine.

Its family is found by the chat template, else by the checkpoint's own ``response_template``. ``Eyes`` has whether it
gets the pictures of a conversation, in which form, and how many tokens they take.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from singletree import families
from singletree.conversation import Thinking
from singletree.engines.engine import Chunk, Engine, EngineInfo, count_picture_tokens
from singletree.errors import BadConfiguration, BadFamily
from singletree.lru import LruCache
from singletree.parsing.family import DetectedFamily, Family, combine_halves, markers
from singletree.pictures import PromptPicture
from singletree.prompts.history import canonicalization
from singletree.prompts.prompt_cache import PromptCache
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.replay.turn_places import TurnDelimiters
from singletree.prompts.template.chat_template import ChatTemplate, load_chat_template
from singletree.prompts.template.pictures import find_picture_token
from singletree.prompts.tokenizer.added_tokens import PICTURE_MARK
from singletree.prompts.tokenizer.tokenizer import GuardFunction, Tokenizer
from singletree.server.capsules import Capsules
from singletree.server.doors import open_door
from singletree.server.settings.config import Config

_COUNT_BYTES = 2**20
_MEDIA = re.compile("image|img|picture|vision|video|audio|sound|media", re.IGNORECASE)
INSTALL = "pip install 'singletree[pictures]'"


@dataclass(frozen=True, slots=True)
class Eyes:
    """How a model gets pictures.

    Attributes:
        placeholder_id: the token that stands for each picture in a prompt.
        mark: the text that stands for a picture in a message; empty where the template has a form for pictures.
        media_types: the formats that the engine decodes.
        reads_text: whether the engine looks for placeholders in the text of a prompt.
        token_counts: how many tokens each picture takes, by its key, as far as the engine has reported it.
    """

    placeholder_id: int
    mark: str
    media_types: frozenset[str]
    reads_text: bool = False
    token_counts: LruCache[str, int] = field(default_factory=lambda: LruCache(_COUNT_BYTES))


def find_eyes(engine: EngineInfo, template: ChatTemplate, tokenizer: Tokenizer) -> tuple[Eyes | None, str]:
    """Return how the model gets pictures, and an empty text; or None, and why it gets none."""
    support = engine.pictures
    if support is None:
        return None, engine.blindness or "the engine takes no pictures for this model"
    mark = PICTURE_MARK if support.place == "mark" else ""
    placeholder = tokenizer.picture_mark_id if mark else find_picture_token(template, tokenizer)
    if placeholder is None:
        return None, "the chat template prints no token for a picture"
    if importlib.util.find_spec("PIL") is None:
        return None, f"Pillow is not installed on the server, which checks pictures: {INSTALL}"
    return Eyes(placeholder, mark, support.media_types, support.reads_text), ""


def tokenizer_for(eyes: Eyes | None, tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer for the prompts of a model with ``eyes``.

    If the engine reads text, no text of a client may read like a token that stands for a picture, a video or a sound:
    SGLang would never answer.
    """
    if eyes is None or not eyes.reads_text:
        return tokenizer
    return tokenizer.with_neutral([text for text in tokenizer.added_tokens if _MEDIA.search(text)])


_ENTRY_BYTES = 64


def learn_counts(
    eyes: Eyes | None, prompt_tokens: int, pictures: Sequence[PromptPicture], chunk: Chunk
) -> None:
    """Remember what ``chunk`` reports about the ``pictures`` of a prompt with ``prompt_tokens`` token ids."""
    if eyes is None or chunk.prompt_tokens is None:
        return
    counts = eyes.token_counts
    if chunk.picture_tokens is not None:
        for picture, count in zip(pictures, chunk.picture_tokens, strict=False):
            counts.put(picture.key, count, _ENTRY_BYTES)
        return
    # An engine that reports only the whole: what the known pictures do not take is the one unknown picture's.
    unknown = [picture.key for picture in pictures if counts.get(picture.key) is None]
    if unknown and len(set(unknown)) == 1:
        known = sum(counts.get(picture.key) or 0 for picture in pictures)
        rest = chunk.prompt_tokens - (prompt_tokens - len(pictures)) - known
        if rest > 0 and rest % len(unknown) == 0:
            counts.put(unknown[0], rest // len(unknown), _ENTRY_BYTES)


async def exact_length(
    eyes: Eyes | None, engine: Engine, prompt_tokens: int, pictures: Sequence[PromptPicture]
) -> int:
    """Return the length of a prompt as the engine reads it. The engine counts the pictures that are not known yet.

    Raises:
        SingletreeError: as ``Engine.generate``.
    """
    if eyes is None:
        return prompt_tokens
    total = prompt_tokens - len(pictures)
    for picture in pictures:
        count = eyes.token_counts.get(picture.key)
        if count is None:
            count = await count_picture_tokens(engine, picture)
            eyes.token_counts.put(picture.key, count, _ENTRY_BYTES)
        total += count
    return total


def known_length(eyes: Eyes | None, prompt_tokens: int, pictures: Sequence[PromptPicture]) -> int:
    """Return the length of a prompt, as far as its pictures are known; an unknown one counts as one token."""
    if eyes is None or not pictures:
        return prompt_tokens
    return prompt_tokens + sum((eyes.token_counts.get(picture.key) or 1) - 1 for picture in pictures)


def without_expansion(eyes: Eyes | None, pictures: Sequence[PromptPicture], tokens: int) -> int:
    """Return how many token ids of a prompt the first ``tokens`` that the engine read are.

    A picture that is only partly among them does not count.
    """
    added = 0
    for picture in pictures if eyes is not None else ():
        assert eyes is not None
        count = eyes.token_counts.get(picture.key) or 1
        if tokens < picture.position + added + count:
            return min(tokens - added, picture.position)
        added += count - 1
    return tokens - added


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
