"""Fields that engines add to OpenAI's protocols: constraints, sampling, and ignored fields.

vLLM (https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html, extra parameters), SGLang
(https://docs.sglang.ai/basic_usage/sampling_params.html), llama.cpp's server, and OpenAI's own fields that have no
effect here. An ignored field is named in a warning if its value asks for something.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from singletree import request_limits
from singletree.conversation import ResponseFormat, Sampling
from singletree.protocols import limits
from singletree.protocols.limits import refused

_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_TokenIds = Annotated[list[_TokenId], msgspec.Meta(max_length=1024)]
_Words = Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(max_length=1024)]


class _StructuredOutputs(msgspec.Struct):
    json: Any = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None
    disable_any_whitespace: Any = None
    disable_additional_properties: Any = None
    whitespace_pattern: Any = None


_Kind = Literal["json", "object", "regex", "choice", "grammar"]

CONSTRAINTS: Mapping[str, _Kind] = {
    "structured_outputs.json": "json",
    "structured_outputs.json_object": "object",
    "structured_outputs.regex": "regex",
    "structured_outputs.choice": "choice",
    "structured_outputs.grammar": "grammar",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
"""Path of a field that sets the format of the visible text -> the kind of its value. The order is: vLLM's fields,
vLLM's before 0.12, SGLang's, llama.cpp's."""

IGNORED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "structured_outputs.structural_tag": ((), "send json, regex, choice or grammar"),
    "structured_outputs.disable_any_whitespace": ((False,), "constraints already allow little white space"),
    "structured_outputs.disable_additional_properties": ((False,), "set additionalProperties in the schema"),
    "structured_outputs.whitespace_pattern": ((), "constraints already allow little white space"),
    "structural_tag": ((), "send structured_outputs with json, regex, choice or grammar"),
    "guided_decoding_backend": (("auto",), "the engine chooses its own"),
    "guided_whitespace_pattern": ((), "constraints already allow little white space"),
    "use_beam_search": ((False,), "send n for several answers"),
    "length_penalty": ((1, 0), "it is a setting of beam search"),
    "typical_p": ((1,), "send top_p or min_p"),
    "top_a": ((0,), "send min_p"),
    "mirostat": ((0,), "send temperature and min_p"),
    "dry_multiplier": ((0,), "send repetition_penalty"),
    "xtc_probability": ((0,), "send temperature and min_p"),
    "stop_regex": ((), "send stop with strings"),
    "logits_processors": ((), "send logit_bias"),
    "custom_logit_processor": ((), "send logit_bias"),
    "custom_params": (({},), "they are for a custom_logit_processor"),
    "repetition_detection": ((), "send repetition_penalty"),
    "thinking_token_budget": ((-1,), "send reasoning_effort"),
    "truncate_prompt_tokens": ((), "send a prompt that fits the window"),
    "chat_template": ((), "the server's own is used; start it with --chat-template"),
    "documents": ((), "send them as messages"),
    "priority": ((0,), "send the header x-dynamo-request-priority; a higher value goes first"),
    "kv_transfer_params": (({},), "only the engine itself accepts it"),
    "vllm_xargs": (({},), "only the engine itself accepts it"),
    "lora_path": ((), "one model is served"),
    "separate_reasoning": ((True,), "reasoning has a field of its own"),
    "return_hidden_states": ((False,), "hidden states are not reported"),
    "prompt_embeds": ((), "send text or token ids"),
    "web_search_options": ((), "this server does not search the web; send a tool that does"),
    "search_parameters": (({"mode": "off"},), "this server does not search the web; send a tool that does"),
    "modalities": ((["text"],), "only text is generated"),
    "audio": ((), "only text is generated"),
    "prediction": ((), "predicted outputs are not supported"),
}
"""Path of a field that has no effect -> the values with which it asks for nothing, and what to do instead.

None, empty texts and empty lists always ask for nothing. An empty object can ask for something: a search, or an answer
as sound, with all defaults."""


if TYPE_CHECKING:
    _IgnoredFields = msgspec.Struct
else:
    _IGNORED_NAMES = {path.partition(".")[0] for path in IGNORED} - {"structured_outputs"}
    _IgnoredFields = msgspec.defstruct(
        "_IgnoredFields", [(name, Any, None) for name in sorted(_IGNORED_NAMES)]
    )


class EngineFields(_IgnoredFields, kw_only=True):
    """The sampling fields that all OpenAI protocols have, and those of engines, as the client sends them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    cache_salt: limits.CacheSalt | None = None
    structured_outputs: _StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    min_tokens: int | None = None
    stop_token_ids: _TokenIds | None = None
    allowed_token_ids: _TokenIds | None = None
    bad_words: _Words | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    repeat_penalty: float | None = None


def ignored(body: EngineFields) -> Iterator[str]:
    """Yield a warning for each field of ``body`` that asks for something and has no effect."""
    if _are_absent(body, _IGNORED_FIELDS):
        return
    for path, (harmless, cure) in IGNORED.items():
        value = _value(body, path)
        if value is not None and value not in ("", []) and value not in harmless:
            yield f"{path} is ignored: {cure}"


def engine_sampling_of(
    body: EngineFields, most: int | None, most_field: str = "max_tokens", **more: Any
) -> Sampling:
    """Return the sampling parameters that these fields of ``body`` set, and those in ``more``. Raises InvalidRequest.

    ``most`` is the largest number of tokens to generate, as the client sent it in ``most_field``; None for no limit.
    """
    least = body.min_tokens or 0
    if most is not None and 0 < most < least:
        cure = f"send min_tokens of at most {most_field}"
        raise refused("min_tokens", f"is {least} but {most_field} is {most}; {cure}")
    if body.bad_words:
        characters = sum(map(len, body.bad_words))
        request_limits.check("bad_word_characters", characters, what="characters", param="bad_words")
    return Sampling(
        max_tokens=limits.at_least_one(most),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repeat_penalty
        if body.repetition_penalty is None
        else body.repetition_penalty,
        seed=body.seed,
        stop=limits.checked_stops(body.stop, "stop"),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=least,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        includes_stop=bool(body.include_stop_str_in_output or body.no_stop_trim),
        bad_words=tuple(body.bad_words or ()),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        **more,
    )


def format_from_fields(
    body: EngineFields, own_format: ResponseFormat | None = None, own_field: str = "response_format"
) -> ResponseFormat | None:
    """Return the format that the visible text must have; None if no field of ``body`` sets one.

    ``own_format`` is what the protocol's own field, ``own_field``, sets. Raises InvalidRequest if two fields set a
    format, or a value is invalid.
    """
    if own_format is not None and own_format.schema is not None:
        limits.check_schema_fields(own_format.schema, own_format.schema_at)
    if _are_absent(body, _CONSTRAINT_FIELDS):
        return own_format
    values = [(path, kind, _value(body, path)) for path, kind in CONSTRAINTS.items()]
    given = [each for each in values if each[2] or (each[1] == "json" and each[2] == {})]
    if not given:
        for path, kind, value in values:
            if kind == "choice" and value == []:
                raise refused(path, "is []; send at least one text to choose from")
        return own_format
    path, kind, value = given[0]
    others = [other for other, _, _ in given[1:]] or [own_field] * (own_format is not None)
    if others:
        raise refused(path, f"and {others[0]} both set the format of the response; send one of them")
    return _FORMATS[kind](value, path)


def _top_fields(paths: Iterable[str]) -> Callable[[EngineFields], tuple[Any, ...]]:
    return attrgetter(*dict.fromkeys(path.partition(".")[0] for path in paths))


_IGNORED_FIELDS, _CONSTRAINT_FIELDS = _top_fields(IGNORED), _top_fields(CONSTRAINTS)


def _are_absent(body: EngineFields, fields: Callable[[EngineFields], tuple[Any, ...]]) -> bool:
    values = fields(body)  # At once: there are dozens of fields, and in most requests all are None.
    return values.count(None) == len(values)


def _value(body: EngineFields, path: str) -> Any:
    value: Any = body
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _json(value: Any, path: str) -> ResponseFormat:
    if isinstance(value, str):
        limits.check_values(value.encode("utf-8", "replace"))
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            cure = "send the schema as an object, or as its JSON text"
            raise refused(path, f"is not valid JSON ({error}); {cure}") from None
    if not isinstance(value, dict):
        shown = limits.quote_value(json.dumps(value))
        raise refused(path, f"is {shown}; send a JSON schema as an object")
    limits.check_schema_fields(value, path)
    return ResponseFormat(value, schema_at=path)


def _choice(value: list[str], path: str) -> ResponseFormat:
    characters = sum(map(len, value))
    request_limits.check("grammar_characters", characters, what="characters", param=path)
    for i, text in enumerate(value):
        if not text:
            raise refused(f"{path}.{i}", "is empty; send text of at least one character")
    return ResponseFormat(choices=tuple(value), schema_at=path)


def _pattern(value: str, path: str) -> ResponseFormat:
    limits.check_grammar("regex", value, path)
    return ResponseFormat(pattern=value, schema_at=path)


def _grammar(value: str, path: str) -> ResponseFormat:
    limits.check_grammar("grammar", value, path)
    return ResponseFormat(grammar=value, schema_at=path)


_FORMATS: Mapping[_Kind, Callable[[Any, str], ResponseFormat]] = {
    "json": _json,
    "object": lambda value, path: ResponseFormat(schema_at=path),
    "regex": _pattern,
    "choice": _choice,
    "grammar": _grammar,
}
