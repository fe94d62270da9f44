"""Fields of vLLM, SGLang and llama.cpp's server on OpenAI's protocols: honoured, or named."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from singletree.engines.engine import Chunk, EngineInfo, GenerationJob
from singletree.errors import InvalidRequest
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.protocols.openai.engine_fields import CONSTRAINTS, IGNORED, EngineFields
from singletree.remote.vllm.wire import CompletionsWire

from .by_hand import EngineByHand
from .memory import events
from .serving import MODEL, TEMPLATE, TOKENIZER, Served, serving

CHAT, RAW, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
each_path = pytest.mark.parametrize("path", [CHAT, RAW])
each_protocol = pytest.mark.parametrize("path", [CHAT, RAW, RESPONSES])
stream_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WARNING = "x-singletree-warning"


def body(path: str, prompt: str, **more: Any) -> dict[str, Any]:
    if path == RESPONSES:
        return {"model": MODEL, "max_output_tokens": 1000, "input": prompt, **more}
    messages = {"prompt": prompt} if path == RAW else {"messages": [{"role": "user", "content": prompt}]}
    return {"model": MODEL, "max_tokens": 1000, **messages, **more}


def nested(path: str, value: Any) -> dict[str, Any]:
    """A body's field at ``path``."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


async def asked(
    path: str, *, kinds: Any = None, optional_sampling: Any = None, **more: Any
) -> tuple[Any, Any]:
    """The reply, and what the engine was given."""
    async with serving() as served:
        if kinds is not None or optional_sampling is not None:
            info = EngineInfo(
                "E", 8192, constraints=kinds or (), optional_sampling=optional_sampling or frozenset()
            )
            served.engine._info = info
        reply = await served.client.post(path, body(path, "[[echo:x]]", **more))
        played = served.engine.log[0] if served.engine.log else None
    return reply, played


VALUES: dict[str, tuple[Any, str]] = {
    "json": (SCHEMA, '%json {"type": "object", "properties": {"a"'),
    "object": (True, '%json {"type": "object"'),
    "regex": (r"^\d+/x$", r"/\d+\/x/"),
    "choice": (["red", "a|b"], r"/red|a\|b/"),
    "grammar": ('root ::= "a" [0-9]', '"a" /[0-9]/'),
}
"""Kind of constraint -> a value, and what the grammar for the engine has of it."""


@each_protocol
@pytest.mark.parametrize("field", CONSTRAINTS)
async def test_every_constraint_is_held_to(path: str, field: str) -> None:
    value, words = VALUES[CONSTRAINTS[field]]
    reply, played = await asked(path, **nested(field, value))
    assert reply.status == 200, reply.body
    assert played.constraint.kind == "lark"
    assert words in played.constraint.value
    assert WARNING not in reply.headers


@each_protocol
@pytest.mark.parametrize("field", [f for f, kind in CONSTRAINTS.items() if kind == "json"])
async def test_a_schema_may_be_json_text(path: str, field: str) -> None:
    _, played = await asked(path, **nested(field, json.dumps(SCHEMA)))
    assert VALUES["json"][1] in played.constraint.value


async def test_a_grammar_goes_to_the_engine_as_it_came_where_it_stands_alone() -> None:
    grammar = VALUES["grammar"][0]
    _, raw = await asked(RAW, kinds=("lark", "gbnf"), ebnf=grammar)
    assert (raw.constraint.kind, raw.constraint.value) == ("gbnf", grammar)
    _, thinks = await asked(CHAT, kinds=("lark", "gbnf"), ebnf=grammar)
    assert thinks.constraint.kind == "lark"
    _, tagged = await asked(RAW, kinds=("structural_tag", "lark"), ebnf=grammar)
    assert tagged.constraint.value["format"] == {"type": "grammar", "grammar": grammar}


@each_protocol
@pytest.mark.parametrize("field", CONSTRAINTS)
async def test_an_engine_that_takes_no_constraint_refuses_by_the_field(path: str, field: str) -> None:
    reply, played = await asked(path, kinds=(), **nested(field, VALUES[CONSTRAINTS[field]][0]))
    assert (reply.status, played) == (400, None)
    assert reply.json["error"]["param"] == field
    assert reply.json["error"]["message"].startswith(f"{field}: the engine behind this model")


async def test_a_constraint_leaves_room_for_a_call() -> None:
    tool = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
    _, played = await asked(CHAT, guided_choice=["yes", "no"], tools=[tool])
    assert "/yes|no/" in played.constraint.value
    assert "<tool_call>" in played.constraint.value


async def test_what_of_a_schema_is_not_enforced_is_reported() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    reply, played = await asked(CHAT, guided_json=schema)
    assert played.constraint is not None
    assert reply.headers[WARNING] == "guided_json.properties.a.uniqueItems: this keyword is not enforced"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": [1]}, "guided_json", "'[1]'"),
    ({"json_schema": "3"}, "json_schema", "'3'"),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"guided_choice": ["a", ""]}, "guided_choice.1", "empty"),
    ({"guided_choice": [1]}, "guided_choice.0", "Expected `str`"),
    ({"guided_choice": "yes"}, "guided_choice", "Expected `array"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "not a regular expression"),
    ({"structured_outputs": []}, "structured_outputs", "Expected `object"),
    ({"regex": "(?=a)b"}, "regex", "look-around"),
    ({"ebnf": 'root ::= "a'}, "ebnf", "line 1"),
    ({"guided_grammar": "root ::= word"}, "guided_grammar", "'word'"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "regex", "ebnf"),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json", "response_format"),
    (
        {"structured_outputs": {"json": {}, "regex": "a"}},
        "structured_outputs.json",
        "structured_outputs.regex",
    ),
    ({"min_tokens": -1}, "min_tokens", "from 0"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens", "max_tokens is 10"),
    ({"min_tokens": "x"}, "min_tokens", "Expected `int"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0", ">= 0"),
    ({"stop_token_ids": [5, 99999999]}, "stop_token_ids.1", "99999999"),
    ({"allowed_token_ids": [99999999]}, "allowed_token_ids.0", "99999999"),
    ({"bad_words": [""]}, "bad_words.0", ">= 1"),
    ({"bad_words": "x"}, "bad_words", "Expected `array"),
    ({"repeat_penalty": 1000}, "repeat_penalty", "1000"),
]


@each_protocol
@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[str(each[0])[:60] for each in REFUSED])
async def test_a_value_of_no_use_is_refused_with_path_value_and_cure(
    path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    if path == RESPONSES:
        names = {"max_tokens": "max_output_tokens", "response_format": "text"}
        fields = {
            names.get(name, name): {"format": value} if name == "response_format" else value
            for name, value in fields.items()
        }
        words = {"max_tokens is 10": "max_output_tokens is 10", "response_format": "text.format"}.get(
            words, words
        )
    reply, played = await asked(path, **fields)
    assert (reply.status, played) == (400, None)
    error = reply.json["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]


@each_path
@stream_or_not
async def test_what_the_engine_finds_wrong_with_a_constraint_names_its_field(path: str, stream: bool) -> None:
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        for words, param in (("failed to parse grammar", "ebnf"), ("the prompt is odd", None)):
            engine.emit(InvalidRequest(f"the engine refused the request: {words}"))
            reply = await served.client.post(path, body(path, "x", ebnf='root ::= root "a"', stream=stream))
            assert reply.status == 400
            assert reply.json["error"]["param"] == param
            assert reply.json["error"]["message"].startswith("ebnf: " if param else "the engine")


def test_the_tables_name_fields_that_are_read() -> None:
    [nested_fields] = [
        field.type.__args__[0]
        for field in msgspec.structs.fields(EngineFields)
        if field.name == "structured_outputs"
    ]
    names = {field.name for field in msgspec.structs.fields(EngineFields)}
    names |= {f"structured_outputs.{field.name}" for field in msgspec.structs.fields(nested_fields)}
    assert names >= {*CONSTRAINTS, *IGNORED}
    untyped = {f.name for f in msgspec.structs.fields(EngineFields) if f.type is Any}
    assert untyped <= {*CONSTRAINTS, *IGNORED}, "read and forgotten"


@each_protocol
@pytest.mark.parametrize("field", IGNORED)
async def test_what_has_no_effect_is_named(path: str, field: str) -> None:
    reply, _ = await asked(path, **nested(field, {"some": "thing"}))
    assert reply.status == 200
    assert reply.headers[WARNING].startswith(f"{field} is ignored: ")
    for harmless in (None, "", [], *IGNORED[field][0]):
        reply, _ = await asked(path, **nested(field, harmless))
        assert (reply.status, WARNING in reply.headers) == (200, False), harmless


@each_protocol
async def test_the_engine_gets_the_sampling_that_it_can_do(path: str) -> None:
    fields = {
        "min_tokens": 3,
        "stop_token_ids": [65, 66],
        "allowed_token_ids": [65, 66, 67],
        "bad_words": ["Z", "word"],
        "repeat_penalty": 1.25,
        "min_p": 0.5,
        "top_k": 7,
    }
    reply, played = await asked(path, **fields)
    assert WARNING not in reply.headers
    sampling = played.sampling
    assert (sampling.min_tokens, sampling.allowed_token_ids) == (3, (65, 66, 67))
    assert (sampling.bad_words, sampling.repetition_penalty) == (("Z", "word"), 1.25)
    assert sampling.logit_bias == {TOKENIZER.encode("Z")[0]: -100}
    sent = json.loads(CompletionsWire("m").encode(GenerationJob([1], sampling, "r"), max_tokens=9))
    assert sent["min_tokens"] == 3
    assert (sent["bad_words"], sent["allowed_token_ids"]) == (["Z", "word"], [65, 66, 67])
    assert (sent["min_p"], sent["top_k"], sent["repetition_penalty"]) == (0.5, 7, 1.25)


@each_protocol
async def test_what_the_engine_cannot_do_is_named(path: str) -> None:
    reply, played = await asked(
        path, optional_sampling=frozenset(), min_tokens=3, allowed_token_ids=[65], bad_words=["Z", "word"]
    )
    assert reply.headers[WARNING].split("; ") == [
        "min_tokens is ignored: the engine E does not support it",
        "bad_words is ignored for bad_words.0, bad_words.1, of several tokens each: the engine E does not support it",
        "allowed_token_ids is ignored: the engine E does not support it",
    ]
    assert (played.sampling.min_tokens, played.sampling.allowed_token_ids) == (0, ())
    assert played.sampling.logit_bias == {TOKENIZER.encode("Z")[0]: -100}, (
        "a token alone is banned all the same"
    )


async def text(served: Served, path: str, *, stream: bool, **more: Any) -> tuple[str, str]:
    """The text of an answer, and its finish reason."""
    reply = await served.client.post(path, body(path, "x", stream=stream, **more))
    assert reply.status == 200, reply.body
    bodies = [data for _, data in events(reply.body) if isinstance(data, dict)] if stream else [reply.json]
    choices = [choice for each in bodies for choice in each["choices"]]
    answer = [
        c.get("text") or (c.get("delta") or c.get("message") or {}).get("content") or "" for c in choices
    ]
    return "".join(answer), next(c["finish_reason"] for c in reversed(choices) if c["finish_reason"])


@each_path
@stream_or_not
@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "abSTOPcd"),
        ({"include_stop_str_in_output": True}, "abSTOPcdSTOP"),
        ({"no_stop_trim": True}, "abSTOPcdSTOP"),
    ],
)
async def test_stop_strings_end_the_text_or_are_the_end_of_it(
    path: str, stream: bool, size: int, fields: dict[str, Any], expected: str
) -> None:
    """Of the first ``min_tokens`` none is looked at: the first stop string stands in them."""
    engine = EngineByHand()
    ids = TOKENIZER.encode("abSTOPcdSTOPef")
    async with serving(engine=engine) as served:
        engine.emit(*(Chunk(ids[at : at + size]) for at in range(0, len(ids), size)))
        engine.emit(Chunk((), "stop"))
        found = await text(served, path, stream=stream, stop=["STOP"], min_tokens=6, **fields)
    assert found == (expected, "stop")


@each_path
@stream_or_not
@pytest.mark.parametrize("include", [False, True])
async def test_stop_tokens_end_the_text_or_are_the_end_of_it(path: str, stream: bool, include: bool) -> None:
    [semicolon] = TOKENIZER.encode(";")
    async with serving({"s": "a;b"}) as served:
        reply = await served.client.post(
            path,
            body(
                path,
                "[[script:s]]",
                stop_token_ids=[semicolon],
                include_stop_str_in_output=include,
                stream=stream,
            ),
        )
        [played] = served.engine.log
    assert played.token_ids[-1] == semicolon
    assert (b"a;" in reply.body or b'";"' in reply.body) is include
    assert b"b;" not in reply.body


async def test_a_turn_that_a_stop_token_ended_comes_back_without_it() -> None:
    """The token is no part of the turn, so it is no part of the next prompt."""
    [semicolon] = TOKENIZER.encode(";")
    layout = TEMPLATE.layout(TOKENIZER)
    async with serving({"s": "a;b"}, memory=TurnMemory(2**20), layout=layout) as served:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "[[script:s]]"}]
        for _ in range(2):
            asked = {"model": MODEL, "messages": messages, "stop_token_ids": [semicolon]}
            reply = await served.client.post(CHAT, asked, headers={"x-singletree-explain": "1"})
            messages += [reply.json["choices"][0]["message"], {"role": "user", "content": "more"}]
        prompt = TOKENIZER.decode(served.engine.log[-1].prompt_token_ids)
    assert reply.headers["x-singletree-course"] == "appended"
    assert "<|im_start|>assistant\na<|im_end|>" in prompt


async def test_the_models_own_end_is_no_stop_token_where_it_is_ignored() -> None:
    engine = StopTokens()
    async with serving(engine=engine) as served:
        for more in ({}, {"ignore_eos": True}, {"ignore_eos": True, "stop_token_ids": [65]}):
            engine.emit(Chunk((66,), "stop"))
            await served.client.post(CHAT, body(CHAT, "x", **more))
    assert engine.stops == [tuple(TOKENIZER.stop_token_ids), (), (65,)]


class StopTokens(EngineByHand):
    """Remembers at which tokens it was told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.stops: list[tuple[int, ...]] = []

    def generate(self, job: GenerationJob) -> Any:
        """See ``Engine``."""
        self.stops.append(tuple(job.stop_token_ids))
        return super().generate(job)
