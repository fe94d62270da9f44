"""What ``RemoteEngine`` does for every server: endpoints in order, the model's own sampling, what a server hides."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.hostile import ASKED
from engines.vllm_memory import MemoryAnswer
from engines.wire_servers import ANY_TOKEN, DIALECTS, DialectTransport, Step, remote_engine, started
from singletree.conversation import Sampling
from singletree.engines.checkpoint import read_sampling_defaults
from singletree.engines.engine import Chunk, Constraint, GenerationJob
from singletree.errors import BadConfiguration, EngineFailed, InvalidRequest
from singletree.pictures import PromptPicture
from singletree.remote.engine import RemoteEngine

PROMPT = (1, 2, 3)


async def collect(engine: RemoteEngine, sampling: Sampling, **more: Any) -> list[Chunk]:
    job = GenerationJob(PROMPT, sampling, "r", **more)
    return [chunk async for chunk in engine.generate(job)]


async def sent(name: str, sampling: Sampling, defaults: dict[str, Any] | None = None, **more: Any) -> Any:
    """What the wire sends for a job."""
    transport = DialectTransport(DIALECTS[name])
    engine = remote_engine(transport)
    await engine.start()
    engine.complete(window=512, model_defaults=defaults or {})
    await collect(engine, sampling, **more)
    return transport.bodies[0]


async def test_vllm_is_asked_at_its_best_endpoint() -> None:
    both = DialectTransport(DIALECTS["vllm-generate"], others=[DIALECTS["vllm-completions"]])
    engine = await started(both)
    assert (engine.info().details or {})["endpoint"] == "/inference/v1/generate"
    assert engine.info().returns_prompt_logprobs
    await collect(engine, Sampling(max_tokens=2))
    await collect(engine, Sampling(max_tokens=2, prompt_logprobs=0))
    assert ["token_ids" in body for body in both.bodies] == [True, False]


async def test_what_the_lesser_endpoint_costs_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = await started(DialectTransport(DIALECTS["vllm-completions"]))
    assert (engine.info().details or {})["endpoint"] == "/v1/completions"
    [message] = [r.message for r in caplog.records if "--enable-scale-out" in r.message]
    assert "no pictures" in message
    assert "a tenth more" in message


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("vllm-generate", "sampling_params"),
        ("sglang-incremental", "sampling_params"),
        ("tensorrt-llm", None),
    ],
)
async def test_the_models_own_sampling_is_sent_where_the_server_does_not_apply_it(
    name: str, at: str | None
) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    body = await sent(name, Sampling(max_tokens=2, top_p=0.5), defaults)
    found = body if at is None else body[at]
    assert {key: found[key] for key in defaults} == {"temperature": 0.6, "top_p": 0.5, "top_k": 20}


@pytest.mark.parametrize("name", ["vllm-completions", "llama-server"])
async def test_and_left_out_where_it_does(name: str) -> None:
    assert "temperature" not in await sent(name, Sampling(max_tokens=2), {"temperature": 0.6})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            '{"temperature": 0.6, "top_k": 20, "do_sample": true, "eos_token_id": [1]}',
            {"temperature": 0.6, "top_k": 20},
        ),
        ('{"top_k": 0, "top_p": 0.95}', {"top_p": 0.95}),
        ('{"temperature": "hot"}', {}),
        ("nonsense", {}),
    ],
)
def test_what_a_checkpoint_recommends(tmp_path: Path, text: str, found: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    assert read_sampling_defaults(tmp_path) == found
    assert read_sampling_defaults(tmp_path / "none.gguf") == {}


async def test_a_window_that_the_server_hides_is_the_checkpoints() -> None:
    engine = remote_engine(DialectTransport(DIALECTS["tensorrt-llm"]))
    await engine.start()
    with pytest.raises(BadConfiguration, match="--context-window"):
        engine.complete(window=None, model_defaults={})
    engine.complete(window=100, model_defaults={})
    assert engine.info().context_window == 100
    known = await started(DialectTransport(DIALECTS["vllm-generate"]))
    known.complete(window=None, model_defaults={})
    assert known.info().context_window == 512


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sglang-incremental", "lark"), ("tensorrt-llm", "gbnf"), ("llama-server", "structural_tag")],
)
async def test_a_constraint_that_the_server_does_not_know(name: str, kind: Any) -> None:
    engine = await started(DialectTransport(DIALECTS[name]))
    assert kind not in engine.info().constraints
    with pytest.raises(InvalidRequest, match=kind):
        await collect(engine, Sampling(max_tokens=2), constraint=Constraint(kind, "x"))


SCHEMA = {"type": "object"}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


@pytest.mark.parametrize(
    ("name", "constraint", "found"),
    [
        ("vllm-generate", ("json_schema", SCHEMA), {"structured_outputs": {"json": SCHEMA}}),
        ("sglang-incremental", ("json_schema", SCHEMA), {"json_schema": '{"type":"object"}'}),
        ("sglang-incremental", ("gbnf", "root ::= x"), {"ebnf": "root ::= x"}),
        (
            "tensorrt-llm",
            ("json_schema", '{"type":"object"}'),
            {"response_format": {"type": "json", "schema": SCHEMA}},
        ),
        ("tensorrt-llm", ("structural_tag", TAG), {"response_format": TAG}),
        ("tensorrt-llm", ("regex", "a+"), {"response_format": {"type": "regex", "regex": "a+"}}),
    ],
)
async def test_the_form_of_a_constraint(
    name: str, constraint: tuple[Any, Any], found: dict[str, Any]
) -> None:
    body = await sent(name, Sampling(max_tokens=2), constraint=Constraint(*constraint))
    where = body.get("sampling_params", body)
    assert {key: where[key] for key in found} == found


async def test_a_structural_tag_that_is_no_object_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="an object"):
        await sent("tensorrt-llm", Sampling(max_tokens=2), constraint=Constraint("structural_tag", "[["))


TENSORRT_FIELDS = {
    *(
        "model",
        "prompt",
        "echo",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "presence_penalty",
    ),
    *("seed", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *(
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "detokenize",
        "add_special_tokens",
    ),
    *("response_format", "priority"),
}
"""Fields that ``CompletionRequest`` of TensorRT-LLM has: it refuses any other."""


async def test_tensorrt_llm_gets_no_field_that_it_does_not_know() -> None:
    sampling = Sampling(
        max_tokens=2, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, presence_penalty=0.1, frequency_penalty=0.1,
        repetition_penalty=1.1, seed=3, logprobs=2, logit_bias={5: 1.0}, ignore_eos=True, min_tokens=1,
        bad_words=("x",), allowed_token_ids=(1,),
    )  # fmt: skip
    body = await sent(
        "tensorrt-llm", sampling, stop_token_ids=(9,), priority=5, constraint=Constraint("regex", "a")
    )
    assert set(body) <= TENSORRT_FIELDS
    assert body["detokenize"] is body["add_special_tokens"] is False


@pytest.mark.parametrize(
    ("priority", "found"), [(0, None), (1, 0.4995), (-1000, 1.0), (10**9, 0.0), (-(10**9), 1.0)]
)
async def test_priorities_of_tensorrt_llm_are_between_0_and_1(priority: int, found: float | None) -> None:
    body = await sent("tensorrt-llm", Sampling(max_tokens=2), priority=priority)
    assert body.get("priority") == found


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({}, None),
        ({"enable_priority_scheduling": True}, -5),
        ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, 5),
    ],
)
async def test_priorities_have_the_sign_that_sglang_schedules_by(
    flags: dict[str, bool], found: int | None
) -> None:
    dialect = DIALECTS["sglang-incremental"]
    info = {**dialect.pages["/server_info"], **flags}
    pages = {**dialect.pages, "/server_info": info}
    transport = DialectTransport(
        DIALECTS["sglang-incremental"].__class__(**{**vars(dialect), "pages": pages})
    )
    engine = await started(transport)
    await collect(engine, Sampling(max_tokens=2), priority=5)
    await collect(engine, Sampling(max_tokens=2))
    # SGLang takes a request without a priority as the last of all, which every other one interrupts.
    assert [body.get("priority") for body in transport.bodies] == [found, None if found is None else 0]


def described(path: str, *fields: str) -> dict[str, Any]:
    """What a server says of the body of ``path``, as FastAPI writes it."""
    schema = {"$ref": "#/components/schemas/Body"}
    operation = {"requestBody": {"content": {"application/json": {"schema": schema}}}}
    body: dict[str, Any] = {"properties": {field: {} for field in fields}}
    return {"paths": {path: {"post": operation}}, "components": {"schemas": {"Body": body}}}


@pytest.mark.parametrize(
    ("name", "path", "field", "value"),
    [
        ("sglang-incremental", "/generate", "session_id", "s"),
        ("tensorrt-llm", "/v1/completions", "conversation_params", {"conversation_id": "s"}),
    ],
)
async def test_a_session_is_named_only_to_a_server_that_describes_the_field(
    name: str, path: str, field: str, value: Any
) -> None:
    dialect, found = DIALECTS[name], []
    for page in (
        {},
        described(path, "rid"),
        described(path, "rid", field),
        {"paths": {path: {"post": None}}},
    ):
        pages = {**dialect.pages, "/openapi.json": page}
        transport = DialectTransport(replace(dialect, pages=pages))
        await collect(await started(transport), Sampling(max_tokens=2), session="s")
        found.append(transport.bodies[-1].get(field))
    assert found == [None, None, value, None]


@pytest.mark.parametrize(
    ("backend", "has_tags"), [("xgrammar", True), ("llguidance", False), ("none", False), (None, True)]
)
async def test_sglang_gets_only_constraints_of_its_grammar_backend(
    backend: str | None, has_tags: bool, caplog: pytest.LogCaptureFixture
) -> None:
    dialect = DIALECTS["sglang-incremental"]
    pages = {
        **dialect.pages,
        "/server_info": {**dialect.pages["/server_info"], "grammar_backend": backend},
    }
    engine = await started(DialectTransport(dialect.__class__(**{**vars(dialect), "pages": pages})))
    assert ("structural_tag" in engine.info().constraints) == has_tags
    assert ("--grammar-backend xgrammar" in caplog.text) == (not has_tags)


async def test_sglang_never_gets_an_id_twice() -> None:
    transport = DialectTransport(DIALECTS["sglang-incremental"])
    engine = await started(transport)
    for _ in range(2):
        await collect(engine, Sampling(max_tokens=2))
    assert len({body["rid"] for body in transport.bodies}) == 2


async def test_sglang_stops_where_it_would_ignore_the_stop_token() -> None:
    dialect = DIALECTS["sglang-incremental"]
    answer = MemoryAnswer(body=[dialect.event(Step(ASKED, [101, 55, 103]))])
    engine = await started(DialectTransport(dialect, answer))
    chunks = await collect(engine, Sampling(max_tokens=8, ignore_eos=True), stop_token_ids=(55,))
    assert ([*chunks[0].token_ids], chunks[0].finish) == ([101, 55], "stop")
    assert answer.closed


async def test_a_refusal_inside_sglangs_stream_is_a_refusal() -> None:
    dialect = DIALECTS["sglang-incremental"]
    event = dialect.event(Step(ASKED, [ANY_TOKEN], (), "abort")).replace(
        b'"type": "abort"', b'"type": "abort", "status_code": 400, "message": "Failed to compile"'
    )
    engine = await started(DialectTransport(dialect, MemoryAnswer(body=[event, b""])))
    with pytest.raises(InvalidRequest, match="Failed to compile"):
        await collect(engine, Sampling(max_tokens=8))


async def test_an_aborted_stream_of_sglang_repeats_no_token() -> None:
    dialect = DIALECTS["sglang-incremental"]
    first = dialect.event(Step(ASKED, [101]))
    last = dialect.event(Step(ASKED, [101], (), "abort"))
    engine = await started(DialectTransport(dialect, MemoryAnswer(body=[first, last, b""])))
    chunks = await collect(engine, Sampling(max_tokens=8))
    assert [t for c in chunks for t in c.token_ids] == [101]
    assert chunks[-1].finish == "cancelled"


MISSING = b'data: {"content": "\xc3\xa9", "tokens": [9], "tokens_predicted": 2, "stop": false}\n\n'


@pytest.mark.parametrize("answers", [True, False])
async def test_tokens_that_llama_server_does_not_stream_are_looked_up(answers: bool) -> None:
    class Tokenizes(DialectTransport):
        def post(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> Any:
            if path != "/tokenize":
                return super().post(path, body, headers)
            page = b'{"tokens": [{"id": 8, "piece": [195]}, {"id": 9, "piece": [169]}]}'
            return MemoryAnswer(200 if answers else 500, [page if answers else b"no", b""])

    dialect = DIALECTS["llama-server"]
    rest = dialect.event(Step(ASKED, [10], (8, 9), "stop"))
    engine = await started(Tokenizes(dialect, MemoryAnswer(body=[MISSING, rest, b""])))
    if not answers:
        with pytest.raises(EngineFailed, match="tokenize"):
            await collect(engine, Sampling(max_tokens=8))
        return
    chunks = await collect(engine, Sampling(max_tokens=8))
    assert [t for c in chunks for t in c.token_ids] == [8, 9, 10]


async def test_llama_server_reports_its_slots_and_its_file() -> None:
    engine = remote_engine(DialectTransport(DIALECTS["llama-server"]), slots=None)
    await engine.start()
    info = engine.info()
    assert (info.name, info.slots, info.checkpoint) == ("m", 4, "/m/m.gguf")


PNG = PromptPicture(1, 2, "ab", "image/png", b"png")


async def sent_with_pictures(name: str, *pictures: PromptPicture) -> Any:
    transport = DialectTransport(DIALECTS[name])
    engine = await started(transport)
    job = GenerationJob(PROMPT, Sampling(max_tokens=2), "r", pictures=pictures)
    assert [chunk async for chunk in engine.generate(job)]
    return transport.bodies[0]


async def test_pictures_go_beside_their_placeholders() -> None:
    url = "data:image/png;base64,cG5n"
    vllm = await sent_with_pictures("vllm-generate", PNG)
    assert vllm["token_ids"] == list(PROMPT)
    assert vllm["content_parts"] == [{"type": "image_url", "url": url, "uuid": "sha256:ab"}]


@pytest.mark.parametrize(
    "pictures", [(replace(PNG, position=0),), (PNG, PNG), (replace(PNG, placeholder_id=9),)]
)
async def test_a_picture_without_its_placeholder_is_never_sent(pictures: tuple[PromptPicture, ...]) -> None:
    with pytest.raises(InvalidRequest, match="one placeholder for each picture"):
        await sent_with_pictures("vllm-generate", *pictures)


@pytest.mark.parametrize("name", ["vllm-completions", "sglang-incremental", "tensorrt-llm", "llama-server"])
async def test_pictures_are_refused_where_there_are_none(name: str) -> None:
    with pytest.raises(InvalidRequest, match="takes no pictures"):
        await sent_with_pictures(name, PNG)
