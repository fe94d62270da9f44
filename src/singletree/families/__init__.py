"""All model families: a file for each kind of format, and ``vendors`` and ``deepseek`` for makers of several kinds.

A family is an entry in one of these files and nothing else; ``shared`` has pieces that several vendors write.
Each family has a canonical name. Its aliases are its names in the parser registries of Dynamo, vLLM and SGLang.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules

from singletree.errors import BadConfiguration
from singletree.parsing.family import DetectedFamily, Family, with_variant
from singletree.parsing.family import combine_halves as _pair

__all__ = ["DetectedFamily", "find", "get", "names", "pair", "table"]

_BASIC_REASONING = "basic"
"""The family with the reasoning half for a template that uses the usual tags, when its tool half has no reasoning."""


@lru_cache(maxsize=1)
def table() -> tuple[Family, ...]:
    """Return all families, sorted by name."""
    found: dict[str, Family] = {}
    for module in iter_modules(__path__, __name__ + "."):
        for value in vars(import_module(module.name)).values():
            if isinstance(value, Family):
                found[value.name] = value
    return tuple(found[name] for name in sorted(found))


@lru_cache(maxsize=3)
def _by_name(half: str = "") -> dict[str, Family]:
    """Return families by every name. ``half`` (``tool`` or ``reasoning``) adds the names that mean only this half."""
    named = {_plain(alias): family for family in table() for alias in family.aliases}
    named |= {_plain(family.name): family for family in table()}
    if half:
        wanted = "forms" if half == "tool" else "reasoning"
        named = {name: family for name, family in named.items() if getattr(family, wanted)}
        named |= {_plain(alias): f for f in table() for alias in getattr(f, f"{half}_aliases")}
    return named


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def names() -> tuple[str, ...]:
    """Return every name and alias, sorted."""
    families = table()
    halves = {n for f in families for n in (*f.tool_aliases, *f.reasoning_aliases)}
    return tuple(sorted(halves | {n for f in families for n in (f.name, *f.aliases)}))


def get(name: str) -> Family:
    """Return the family with this name or alias; ``-``, ``_``, ``.`` and case do not matter.

    Raises:
        BadConfiguration: no family has this name.
    """
    plain = _plain(name)
    family = _by_name().get(plain) or _by_name("tool").get(plain) or _by_name("reasoning").get(plain)
    if family is None:
        why = _FROM_CHECKPOINT.get(plain, f"no model family has the name {name!r}")
        raise BadConfiguration(f"{why}; `singletree families` lists them")
    return family


_FROM_CHECKPOINT = {
    name: f"{name!r} means the checkpoint's own response_template; leave the parser out to have it detected"
    for name in ("hf", "response_template")
}


def pair(reasoning: str | None = None, tools: str | None = None) -> Family:
    """Return one family from the reasoning half of ``reasoning`` and the tool half of ``tools``, parsed in one pass.

    One name may mean different families as a reasoning parser and as a tool parser (``nemotron_nano``).

    Raises:
        BadConfiguration: no family has this name, or it lacks the half that is needed.
    """
    thinks = _half("reasoning", reasoning) if reasoning else None
    calls = _half("tool", tools) if tools else None
    return _pair(thinks, calls)


def _half(half: str, name: str) -> Family:
    family = _by_name(half).get(_plain(name))
    if family is not None:
        return family
    other = "tool" if half == "reasoning" else "reasoning"
    kind = "tool-call" if half == "tool" else half
    raise BadConfiguration(
        f"family {get(name).name!r} has no {kind} format; use it as the {other} parser only"
    )


def find(chat_template: str | None) -> DetectedFamily:
    """Return the family that a checkpoint's chat template belongs to, and why."""
    plain, basic = get("plain"), get(_BASIC_REASONING)
    if not chat_template:
        why = "no chat template: everything that the model writes is taken as text"
        return DetectedFamily(plain, why, False)
    assert basic.reasoning is not None
    closer = basic.reasoning[1].strip()
    fitting = [
        (fingerprint, family)
        for family in table()
        for fingerprint in (family.fingerprint, family.also_fingerprint)
        if fingerprint and all(text in chat_template for text in fingerprint)
        if not any(text in chat_template for text in family.not_in_template)
    ]
    if fitting:
        seen, best = max(fitting, key=lambda found: len("".join(found[0])))
        family = with_variant(best, chat_template)
        if family.reasoning is None and closer in chat_template:
            family = _pair(basic, family)
        return DetectedFamily(family, f"the chat template contains {', '.join(seen)}", True)
    if closer in chat_template:
        return DetectedFamily(basic, f"the chat template contains {closer} and no known tool format", True)
    return DetectedFamily(plain, "the chat template contains no known tool or reasoning format", False)
