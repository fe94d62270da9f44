"""Every model family, one file a vendor. A family is an entry in one of them and nothing else.

Names follow three worlds: our own, and as aliases those in Dynamo's, vLLM's and SGLang's parser registries.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules

from singletree.errors import BadConfiguration
from singletree.parsing.family import Family, Found, respelled
from singletree.parsing.family import pair as _pair

__all__ = ["find", "get", "names", "pair", "table"]

_ANYTHING_THAT_THINKS = "basic"
"""The reasoning half for a template that thinks between the usual tags and whose tool half says nothing of it."""


@lru_cache(maxsize=1)
def table() -> tuple[Family, ...]:
    """All families, by name."""
    found: dict[str, Family] = {}
    for module in iter_modules(__path__, __name__ + "."):
        for value in vars(import_module(module.name)).values():
            if isinstance(value, Family):
                found[value.name] = value
    return tuple(found[name] for name in sorted(found))


@lru_cache(maxsize=3)
def _by_name(half: str = "") -> dict[str, Family]:
    """Families by every name; ``half`` is ``tool`` or ``reasoning`` for the worlds in which names mean one half."""
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
    """Every name and alias."""
    families = table()
    halves = {n for f in families for n in (*f.tool_aliases, *f.reasoning_aliases)}
    return tuple(sorted(halves | {n for f in families for n in (f.name, *f.aliases)}))


def get(name: str) -> Family:
    """The family of that name or alias; ``-``, ``_``, ``.`` and case do not matter.

    Raises:
        BadConfiguration: no family has that name.
    """
    plain = _plain(name)
    family = _by_name().get(plain) or _by_name("tool").get(plain) or _by_name("reasoning").get(plain)
    if family is None:
        raise BadConfiguration(_FROM_CHECKPOINT.get(plain, f"no model family is called {name!r}") + _LISTED)
    return family


_LISTED = "; `singletree families` lists them"
_FROM_CHECKPOINT = {
    name: f"{name!r} means whatever the checkpoint's response_template says; leave the parser out to have it found"
    for name in ("hf", "response_template")
}


def pair(reasoning: str | None = None, tools: str | None = None) -> Family:
    """The reasoning half of one family and the tool half of another, as one family read in one pass.

    One name may mean different families as a reasoning parser and as a tool parser (``nemotron_nano``).

    Raises:
        BadConfiguration: no family has that name, or it lacks the half that is asked for.
    """
    thinks = _half("reasoning", reasoning) if reasoning else None
    calls = _half("tool", tools) if tools else None
    return _pair(thinks, calls)


def _half(half: str, name: str) -> Family:
    family = _by_name(half).get(_plain(name))
    if family is not None:
        return family
    other = "tool" if half == "reasoning" else "reasoning"
    written = "tool-call" if half == "tool" else half
    raise BadConfiguration(
        f"family {get(name).name!r} has no {written} format; name it as the {other} parser only"
    )


def find(chat_template: str | None) -> Found:
    """The family that a checkpoint's chat template belongs to, and why."""
    plain = get("plain")
    if not chat_template:
        return Found(plain, "no chat template: everything the model writes is taken as text", False)
    fitting = [(print_, f) for f in table() for print_ in _fingerprints(f) if _fits(print_, f, chat_template)]
    if fitting:
        seen, best = max(fitting, key=lambda found: len("".join(found[0])))
        return Found(
            _with_reasoning(respelled(best, chat_template), chat_template),
            f"the chat template holds {', '.join(seen)}",
            True,
        )
    basic = get(_ANYTHING_THAT_THINKS)
    if basic.reasoning and basic.reasoning[1].strip() in chat_template:
        return Found(
            basic, f"the chat template holds {basic.reasoning[1].strip()} and no tool format known here", True
        )
    return Found(plain, "the chat template holds no tool or reasoning format known here", False)


def _fingerprints(family: Family) -> list[tuple[str, ...]]:
    return [found for found in (family.fingerprint, family.also_fingerprint) if found]


def _fits(fingerprint: tuple[str, ...], family: Family, template: str) -> bool:
    return all(s in template for s in fingerprint) and not any(s in template for s in family.not_in_template)


def _with_reasoning(family: Family, template: str) -> Family:
    basic = get(_ANYTHING_THAT_THINKS)
    if family.reasoning is None and basic.reasoning and basic.reasoning[1].strip() in template:
        return _pair(basic, family)
    return family
