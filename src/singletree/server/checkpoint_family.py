"""The family that a checkpoint gives away: by its chat template, else by its own ``response_template``."""

from __future__ import annotations

from singletree import families
from singletree.errors import BadConfiguration, BadFamily
from singletree.parsing.family import Family, Found
from singletree.parsing.response_template import family_of
from singletree.prompts.template import ChatTemplate
from singletree.server.template_turns import tried

NAMES = frozenset({"hf", "response_template"})
"""What vLLM and SGLang call a parser that does as the checkpoint's ``response_template`` says."""


def find(template: ChatTemplate, response_template: object = None) -> Found:
    """The family, and why: known by the chat template, else described by ``response_template``, else plain text.

    A family that only thinks is less than a description with calls.
    """
    found = families.find(None if template.is_default else template.source)
    if response_template is None or (found.known and found.family.forms):
        return found
    try:
        return _described(template, response_template)
    except BadFamily as error:
        why = f"{found.why}; the checkpoint's response_template is left aside: {error.message}"
        return Found(found.family, why, found.known)


def named(name: str, template: ChatTemplate, response_template: object) -> Family:
    """The family that ``name``, one of ``NAMES``, means for this checkpoint.

    Raises:
        BadConfiguration: it describes none that can be read here.
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


def _described(template: ChatTemplate, response_template: object) -> Found:
    """What ``response_template`` describes, if it reads what ``template`` writes. Raises BadFamily."""
    family = family_of(response_template)
    trials = [] if template.is_default else tried(family, template)
    wrong = [trial.written.case for trial in trials if not trial.agrees]
    if wrong:
        raise BadFamily(f"it does not read what the chat template writes ({', '.join(wrong)})")
    return Found(family, "the checkpoint's response_template says so", True)
