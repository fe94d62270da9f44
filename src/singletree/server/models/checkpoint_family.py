"""Finds the family of a checkpoint: by its chat template, else by its own ``response_template``."""

from __future__ import annotations

from singletree import families
from singletree.errors import BadConfiguration, BadFamily
from singletree.parsing.drafting.response_template import family_of
from singletree.parsing.family import DetectedFamily, Family
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.server.models.template_turns import try_family

RESPONSE_TEMPLATE_NAMES = frozenset({"hf", "response_template"})
"""The names in vLLM and SGLang for a parser that follows the checkpoint's ``response_template``."""


def template_alone(source: str) -> ChatTemplate:
    """Return the chat template ``source``, with what its family knows of it, for use without a tokenizer.

    Raises:
        BadConfiguration: it is not a template that renders a message.
    """
    own = families.find(source).family
    return ChatTemplate(
        source,
        bos_token="<s>",
        eos_token="</s>",
        variables=own.thinking_variables,
        call_id_picture=own.call_id_picture,
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

    Args:
        name: the value of the flag, one of ``RESPONSE_TEMPLATE_NAMES``, for error messages.

    Raises:
        BadConfiguration: there is no ``response_template``, or it cannot be used here.
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
    """Return the family that ``response_template`` describes. Raises BadFamily if it misreads ``template``'s turns."""
    family = family_of(response_template)
    trials = [] if template.is_default else try_family(family, template)
    wrong = [trial.rendered.case for trial in trials if not trial.agrees]
    if wrong:
        raise BadFamily(f"it misreads turns that the chat template writes ({', '.join(wrong)})")
    return DetectedFamily(family, "by the checkpoint's response_template", True)
