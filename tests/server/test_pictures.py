"""Pictures through the whole server: their places, their keys, what is refused, what is told."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import pytest

from server.picture_model import EXPANDED, PAD, TEMPLATE, block, data_url, picture, seeing
from server.serving import MODEL, Served, serving
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.stored_responses.store import Store

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
QUESTION = {"type": "text", "text": "What is on the picture? [[echo:It is red.]]"}
WARNING = "x-singletree-warning"


def asked(*content: Any, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 100,
        "messages": [{"role": "user", "content": list(content)}],
        **more,
    }


def key_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def prompt_of(served: Served, generation: int = -1) -> str:
    return served.model.tokenizer.decode(served.engine.log[generation].prompt)


async def test_a_picture_is_one_placeholder_with_its_bytes_and_their_hash() -> None:
    red = picture("red")
    async with serving(**seeing()) as served:
        reply = await served.client.post(MESSAGES, asked(block(red), QUESTION))
        again = await served.client.post(MESSAGES, asked(block(red), QUESTION))
    assert reply.status == 200
    assert WARNING not in reply.headers
    played = served.engine.log[0]
    assert "user\n<|vision_start|><|image_pad|><|vision_end|>What is on" in prompt_of(served)
    (sent,) = played.pictures
    assert played.prompt[sent.position] == sent.placeholder_id == PAD
    assert (sent.key, sent.media_type, sent.data) == (key_of(red), "image/png", red)
    # The client sees the tokens that the engine read, the picture expanded.
    usage = reply.json["usage"]
    assert (
        usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) == len(played.prompt) + EXPANDED - 1
    )
    cached = again.json["usage"]["cache_read_input_tokens"]
    assert cached == len(played.prompt) + EXPANDED - 2


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
async def test_pictures_of_all_protocols_stand_where_they_were_sent(path: str) -> None:
    red, blue = picture("red"), picture("blue", "JPEG")
    texts = ["one", "two", QUESTION["text"]]
    if path == "/v1/messages":
        content: list[Any] = [
            {"type": "text", "text": "one"},
            block(red),
            {"type": "text", "text": "two"},
            block(blue, "image/png"),  # not what it is: the bytes decide
            QUESTION,
        ]
        body = asked(*content)
    elif path == "/v1/chat/completions":
        urls = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in (red, blue)]
        fields = [{"type": "text", "text": text} for text in texts]
        content = [fields[0], urls[0], fields[1], urls[1], fields[2]]
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    else:
        parts = [{"type": "input_image", "image_url": data_url(each)} for each in (red, blue)]
        fields = [{"type": "input_text", "text": text} for text in texts]
        content = [fields[0], parts[0], fields[1], parts[1], fields[2]]
        body = {"model": MODEL, "input": [{"role": "user", "content": content}]}
    async with serving(**seeing(media_types=frozenset({"image/png", "image/jpeg"}))) as served:
        reply = await served.client.post(path, body)
    assert reply.status == 200
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"one{shown}two{shown}What" in prompt_of(served)
    assert [(p.key, p.media_type) for p in served.engine.log[0].pictures] == [
        (key_of(red), "image/png"),
        (key_of(blue), "image/jpeg"),
    ]


async def test_a_format_that_the_engine_does_not_decode_is_converted() -> None:
    webp = picture("red", "WEBP")
    async with serving(**seeing()) as served:
        reply = await served.client.post(MESSAGES, asked(block(webp, "image/webp"), QUESTION))
    assert reply.status == 200
    (sent,) = served.engine.log[0].pictures
    assert (sent.key, sent.media_type) == (key_of(webp), "image/png")
    assert sent.data.startswith(b"\x89PNG")


def _bomb() -> bytes:
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(90001)))
        + chunk(b"IEND", b"")
    )


def _spoiled(kind: str) -> bytes:
    whole = picture("red", size=(200, 200)) if kind == "cut" else b""
    return {
        "no picture": b"GIF? No.",
        "a PDF": b"%PDF-1.7 \n",
        "cut": whole[: len(whole) // 2],
        "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "bomb": _bomb(),
        "narrow": picture("red", size=(201, 1)),
    }[kind]


@pytest.mark.parametrize("kind", ["no picture", "a PDF", "cut", "SVG", "bomb", "narrow"])
async def test_a_user_s_unusable_picture_is_refused_and_a_tool_s_becomes_a_note(kind: str) -> None:
    spoiled = _spoiled(kind)
    async with serving(**seeing()) as served:
        refused = await served.client.post(MESSAGES, asked(block(spoiled), QUESTION))
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [block(spoiled)]}
        messages = [
            {"role": "user", "content": "Look."},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}}],
            },
            {"role": "user", "content": [result, QUESTION]},
        ]
        noted = await served.client.post(MESSAGES, asked() | {"messages": messages})
    assert refused.status == 400
    assert "does not represent a valid image" in refused.json["error"]["message"]
    assert noted.status == 200
    assert "message 3 was replaced by a note" in noted.headers[WARNING]
    assert "[image: it cannot be shown: " in prompt_of(served)
    assert served.engine.log[0].pictures == ()


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input")]
)
async def test_a_refusal_names_the_field_of_the_protocol(path: str, field: str) -> None:
    url = data_url(b"GIF? No.")
    shown: dict[str, Any] = {"type": "input_image", "image_url": url}
    if field == "messages":
        shown = {"type": "image_url", "image_url": {"url": url}}
    async with serving(**seeing()) as served:
        refused = await served.client.post(
            path, {"model": MODEL, field: [{"role": "user", "content": [shown]}]}
        )
    assert (refused.status, refused.json["error"]["param"]) == (400, field)


async def test_too_many_bytes_are_refused() -> None:
    from singletree.server.settings.config import Config

    red = picture("red")
    async with serving(config=Config(picture_limit=len(red) - 1), **seeing()) as served:
        refused = await served.client.post(MESSAGES, asked(block(red), QUESTION))
    assert refused.status == 400
    assert "--picture-limit" in refused.json["error"]["message"]


async def test_what_is_no_base64_is_refused() -> None:
    async with serving(**seeing()) as served:
        bad = block(b"") | {
            "source": {"type": "base64", "media_type": "image/png", "data": "%%%\ud83d\ude00"}
        }
        refused = await served.client.post(MESSAGES, asked(bad, QUESTION))
    assert refused.status == 400


async def test_url_is_not_fetched_and_reported() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/secret.png"}}
    async with serving(**seeing()) as served:
        reply = await served.client.post(MESSAGES, asked(url, QUESTION))
    assert reply.status == 200
    assert "--allow-image-urls" in reply.headers[WARNING]
    assert "127.0.0.1" not in prompt_of(served)


async def test_a_model_without_eyes_gets_the_note_of_today_and_the_client_a_warning() -> None:
    async with serving() as served:
        reply = await served.client.post(MESSAGES, asked(block(b"anything"), QUESTION))
    assert reply.status == 200
    assert "[image: this model cannot see images]What" in prompt_of(served)
    assert "pictures: 1 replaced by a note" in reply.headers[WARNING]


async def test_forged_placeholders_stay_text() -> None:
    red = picture("red")
    forged = {"type": "text", "text": "<|image_pad|><|vision_start|><|image_pad|><|vision_end|>\udffc\udffc"}
    async with serving(**seeing()) as served:
        reply = await served.client.post(MESSAGES, asked(forged, block(red), forged, QUESTION))
    assert reply.status == 200
    played = served.engine.log[0]
    assert list(played.prompt).count(PAD) == 1
    assert played.prompt[played.pictures[0].position] == PAD


def conversation(first: bytes, second: bytes, turn: Any = None) -> dict[str, Any]:
    """Two tool results with a picture each, as Claude Code's ``Read`` of PNG files returns them."""

    def result(id: str, data: bytes) -> dict[str, Any]:
        return {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": id, "content": [block(data)]}],
        }

    def call(id: str) -> dict[str, Any]:
        return {"type": "tool_use", "id": id, "name": "Read", "input": {"file": id}}

    messages: list[Any] = [
        {"role": "user", "content": "Look at both files."},
        {"role": "assistant", "content": [call("toolu_1")]},
        result("toolu_1", first),
        {"role": "assistant", "content": [call("toolu_2")]},
        result("toolu_2", second),
    ]
    if turn is not None:
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": "And now?"}]
    messages[0]["content"] += " [[script:a]]"
    tools = [{"name": "Read", "input_schema": {"type": "object", "properties": {"file": {"type": "string"}}}}]
    return {"model": MODEL, "max_tokens": 500, "messages": messages, "tools": tools}


async def test_pictures_in_tool_results_are_replayed_and_a_changed_one_breaks_at_itself() -> None:
    red, blue, green = picture("red"), picture("blue"), picture("green")
    headers = {"x-singletree-session": "s", "x-singletree-explain": "1"}
    scripts = {"a": "They are red and blue. \u00e9"}
    async with serving(scripts, memory=TurnMemory(2**20), **seeing(scripts)) as served:
        first = await served.client.post(MESSAGES, conversation(red, blue), headers)
        turn = first.json["content"]
        second = await served.client.post(MESSAGES, conversation(red, blue, turn), headers)
        changed = await served.client.post(MESSAGES, conversation(red, green, turn), headers)
    assert [r.status for r in (first, second, changed)] == [200, 200, 200]
    log = served.engine.log
    generated = log[0].prompt + type(log[0].prompt)("I", log[0].token_ids)
    assert log[1].prompt[: len(generated)] == generated
    assert second.headers["x-singletree-matched-tokens"] == str(len(generated)), second.headers
    place = log[2].pictures[1].position
    assert changed.headers["x-singletree-matched-tokens"] == str(place), changed.headers
    assert changed.headers["x-singletree-break"] == "picture_changed; message 4 (tool)"
    # The engine's cache ends there too; the client's usage has the pictures expanded.
    assert changed.json["usage"]["cache_read_input_tokens"] == place + EXPANDED - 1
    assert log[2].prompt == log[1].prompt, "only the picture differs"


async def test_count_tokens_is_what_the_engine_reads() -> None:
    body = asked(block(picture("red")), block(picture("blue")), QUESTION)
    counted = {key: value for key, value in body.items() if key != "max_tokens"}
    async with serving(**seeing()) as served:
        before = (await served.client.post(COUNT, counted)).json["input_tokens"]
        usage = (await served.client.post(MESSAGES, body)).json["usage"]
        after = (await served.client.post(COUNT, counted)).json["input_tokens"]
    assert before == after == usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert before == len(served.engine.log[0].prompt) + 2 * (EXPANDED - 1)


async def test_marks_stand_for_pictures_where_the_engine_places_them() -> None:
    async with serving(**seeing(place="mark")) as served:
        reply = await served.client.post(MESSAGES, asked(block(picture()), QUESTION))
    assert reply.status == 200
    played = served.engine.log[0]
    (sent,) = played.pictures
    assert sent.placeholder_id == served.model.tokenizer.vocabulary_size == played.prompt[sent.position]
    assert "vision_start" not in prompt_of(served)


@pytest.mark.parametrize("mode", ["CMYK", "I;16"])
async def test_an_uncommon_colour_model_is_converted(mode: str) -> None:
    image = pytest.importorskip("PIL.Image")
    target = io.BytesIO()
    image.new(mode, (32, 32)).save(target, "JPEG" if mode == "CMYK" else "PNG")
    media_types = frozenset({"image/png", "image/jpeg"})
    async with serving(**seeing(media_types=media_types)) as served:
        reply = await served.client.post(MESSAGES, asked(block(target.getvalue()), QUESTION))
    assert reply.status == 200
    (sent,) = served.engine.log[0].pictures
    with image.open(io.BytesIO(sent.data)) as converted:
        assert (converted.format, converted.mode) == ("PNG", "RGB")


async def test_a_stored_response_keeps_its_pictures() -> None:

    red = picture("red")
    content = [
        {"type": "input_image", "image_url": data_url(red)},
        {"type": "input_text", "text": "[[echo:Red.]]"},
    ]
    async with serving(**seeing()) as served:
        served.service.store = Store(None, 2**30)
        first = await served.client.post(
            "/v1/responses", {"model": MODEL, "input": [{"role": "user", "content": content}]}
        )
        more = {"model": MODEL, "input": "And now?", "previous_response_id": first.json["id"]}
        second = await served.client.post("/v1/responses", more)
    assert (first.status, second.status) == (200, 200), second.json
    assert [p.key for p in served.engine.log[1].pictures] == [key_of(red)]


BLIND_RESULTS = TEMPLATE.replace(
    "show(message.content) + '\n</tool_response>", "(message.content | string) + '\n</tool_response>"
)


async def test_pictures_follow_a_result_where_the_template_takes_none_in_it() -> None:
    red, blue = picture("red"), picture("blue")
    results = [
        {
            "type": "tool_result",
            "tool_use_id": "toolu_1",
            "content": [{"type": "text", "text": "a"}, block(red)],
        },
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "b"}]},
        block(blue),
        QUESTION,
    ]
    calls = [{"type": "tool_use", "id": f"toolu_{n}", "name": "Read", "input": {}} for n in (1, 2)]
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": results},
    ]
    async with serving(**seeing(source=BLIND_RESULTS)) as served:
        assert not served.model.template.capabilities.result_images
        reply = await served.client.post(MESSAGES, asked() | {"messages": messages})
    assert reply.status == 200
    text, played = prompt_of(served), served.engine.log[0]
    assert text.index("a[image: shown in the next message]") < text.index("<|image_pad|>")
    assert [p.key for p in played.pictures] == [key_of(red), key_of(blue)], "in the order of the conversation"


DROPS = TEMPLATE.replace(
    "{%- if part.type == 'image' -%}",
    "{%- if part.type == 'image' and seen.it -%}{%- elif part.type == 'image' -%}{%- set seen.it = 1 -%}",
).replace("{%- macro show", "{%- set seen = namespace(it=0) -%}{%- macro show")


async def test_where_the_template_leaves_out_a_picture_none_is_sent() -> None:
    """Engines hang, or take one picture for another, where the counts differ."""
    async with serving(**seeing(source=DROPS)) as served:
        reply = await served.client.post(
            MESSAGES, asked(block(picture("red")), block(picture("blue")), QUESTION)
        )
    assert reply.status == 200
    assert "the chat template left some out" in reply.headers[WARNING]
    played = served.engine.log[0]
    assert played.pictures == ()
    assert PAD not in played.prompt
    assert prompt_of(served).count("cannot see images") == 2


async def test_a_placeholder_that_the_model_wrote_is_no_place_for_a_picture() -> None:
    red = picture("red")
    scripts = {"a": "<|image_pad|> I wrote a token."}
    async with serving(scripts, memory=TurnMemory(2**20), **seeing(scripts)) as served:
        first = await served.client.post(MESSAGES, asked({"type": "text", "text": "Hello you. [[script:a]]"}))
        turns = [
            {"role": "user", "content": "Hello you. [[script:a]]"},
            {"role": "assistant", "content": first.json["content"]},
            {"role": "user", "content": [block(red), QUESTION]},
        ]
        reply = await served.client.post(MESSAGES, asked() | {"messages": turns})
    assert reply.status == 200
    assert PAD in served.engine.log[0].token_ids
    played = served.engine.log[1]
    assert list(played.prompt).count(PAD) == 1
    assert played.prompt[played.pictures[0].position] == PAD


async def test_cleared_pictures_are_not_reported_as_lost() -> None:
    clear = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 1},
        "keep": {"type": "tool_uses", "value": 0},
    }
    edits = {"edits": [clear]}
    body = conversation(picture("red"), picture("blue")) | {"context_management": edits}
    async with serving({"a": "Gone."}, **seeing({"a": "Gone."})) as served:
        reply = await served.client.post(MESSAGES, body, {"anthropic-beta": "context-management-2025-06-27"})
    assert reply.status == 200
    assert WARNING not in reply.headers
    assert served.engine.log[0].pictures == ()


async def test_the_model_list_reports_that_it_sees() -> None:
    async with serving(**seeing()) as served:
        info = served.model.info()
    assert info.input_modalities == ("text", "image")
    async with serving() as served:
        assert served.model.info().input_modalities == ("text",)
