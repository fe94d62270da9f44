"""OpenAI's own SDK over HTTP, on what the server keeps: stored responses, conversations, work in the background."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from clients.conftest import Flags
from clients.scripts import HERMES, Style, think
from clients.served import MODEL, Server

TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
WORDS = " ".join(["The quick brown fox jumps over the lazy dog."] * 4)

Script = Callable[..., str]


@pytest.fixture(scope="module")
def serving(server: Callable[[Style, Flags], Server]) -> Server:
    return server(HERMES, ("--capsule-key", secrets.token_hex(32)))


@pytest.fixture(scope="module")
def sdk(serving: Server) -> Iterator[OpenAI]:
    with OpenAI(api_key="k", base_url=f"{serving.url}/v1", max_retries=0) as client:
        yield client


@pytest.fixture
def script(serving: Server) -> Script:
    """A marker for a prompt, by which the model says the turns; ``options`` are the script's."""

    def of(*turns: str, options: str = "") -> str:
        names = [f"{secrets.token_hex(4)}-{number}" for number in range(len(turns))]
        for name, text in zip(names, turns, strict=True):
            text = f"#opts {options}\n{text}" if options else text
            (serving.scripts / f"{name}.txt").write_text(text, encoding="utf-8")
        return f"[[script:{','.join(names)}]]"

    return of


def slow(script: Script, delay: float = 0.1) -> str:
    return script(WORDS, options=f'{{"delay": {delay}, "chunk": 1}}')


def finished(sdk: OpenAI, id: str) -> Response:
    """The response once it is made, as who polls for it finds it."""
    until = time.monotonic() + 60
    while (response := sdk.responses.retrieve(id)).status in ("queued", "in_progress"):
        assert time.monotonic() < until
        time.sleep(0.05)
    return response


def test_a_conversation_goes_on_from_a_stored_response(
    sdk: OpenAI, serving: Server, script: Script
) -> None:  # C30
    asked = "Look. " + script(think("I look.") + HERMES.call("look", {}), "It is red.")
    first = sdk.responses.create(model=MODEL, input=asked, tools=[TOOL])
    call = first.output[-1]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "red"}
    second = sdk.responses.create(model=MODEL, input=[result], tools=[TOOL], previous_response_id=first.id)
    assert second.output_text == "It is red."
    before, after = serving.plays(None)[-2:]
    begun = before.prompt_token_ids + before.token_ids
    assert after.prompt_token_ids[: len(begun)] == begun


def test_a_stored_response_can_be_had_listed_and_deleted(sdk: OpenAI, script: Script) -> None:
    made = sdk.responses.create(model=MODEL, input="Hi " + script("Hello."), metadata={"of": "a test"})
    assert sdk.responses.retrieve(made.id) == made
    [item] = sdk.responses.input_items.list(made.id).data
    assert (item.type, item.role) == ("message", "user")  # type: ignore[union-attr]
    sdk.responses.delete(made.id)
    for use in (sdk.responses.retrieve, sdk.responses.delete, sdk.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            use(made.id)
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.responses.create(model=MODEL, input="And?", previous_response_id=made.id)
    assert refused.value.code == "previous_response_not_found"


def test_pages_of_input_items_follow_one_another(sdk: OpenAI, script: Script) -> None:
    messages: Any = [{"role": "user", "content": f"{number}"} for number in range(5)]
    made = sdk.responses.create(model=MODEL, input=[*messages, {"role": "user", "content": script("Yes.")}])
    texts = [item.content[0].text for item in sdk.responses.input_items.list(made.id, limit=2, order="asc")]  # type: ignore[union-attr, index]
    assert texts[:5] == ["0", "1", "2", "3", "4"]
    assert len(texts) == 6


def test_nothing_is_kept_of_what_is_not_to_be_stored(sdk: OpenAI, script: Script) -> None:
    made = sdk.responses.create(model=MODEL, input="Hi " + script("Hello."), store=False)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(made.id)


def test_work_in_the_background_is_polled_for(sdk: OpenAI, script: Script) -> None:
    begun = sdk.responses.create(model=MODEL, input=slow(script, 0.01), background=True)
    assert begun.status in ("queued", "in_progress")
    assert finished(sdk, begun.id).output_text == WORDS


def test_a_stream_that_broke_is_read_on_from_the_last_event(sdk: OpenAI, script: Script) -> None:
    with sdk.responses.create(model=MODEL, input=slow(script, 0.02), background=True, stream=True) as stream:
        seen = [event for event, _ in zip(stream, range(8), strict=False)]
    assert seen[0].type == "response.created"
    with sdk.responses.retrieve(
        seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number
    ) as stream:
        seen += stream
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    last = seen[-1]
    assert last.type == "response.completed"
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert last.response.output_text == text == WORDS


def test_work_in_the_background_can_be_cancelled(sdk: OpenAI, script: Script) -> None:  # C40
    begun = sdk.responses.create(model=MODEL, input=slow(script), background=True)
    assert sdk.responses.cancel(begun.id).status == "cancelled"
    assert sdk.responses.retrieve(begun.id).status == "cancelled"
    done = sdk.responses.create(model=MODEL, input="Hi " + script("Hello."))
    with pytest.raises(openai.BadRequestError):
        sdk.responses.cancel(done.id)


def test_a_conversation_grows_with_its_responses(sdk: OpenAI, serving: Server, script: Script) -> None:
    messages: Any = [{"type": "message", "role": "developer", "content": "Be brief."}]
    conversation = sdk.conversations.create(metadata={"of": "a test"}, items=messages)
    first = sdk.responses.create(model=MODEL, input="Hi " + script("Hello."), conversation=conversation.id)
    sdk.responses.create(model=MODEL, input="Bye " + script("Goodbye."), conversation=conversation.id)
    prompt = serving.plays(None)[-1].prompt
    assert prompt.index("Be brief.") < prompt.index("Hello.") < prompt.index("Bye ")
    items = list(sdk.conversations.items.list(conversation.id, order="asc", limit=2))
    assert len(items) == 5
    answered = sdk.conversations.items.retrieve(first.output[0].id or "", conversation_id=conversation.id)
    assert answered.id == first.output[0].id
    sdk.conversations.items.delete(answered.id or "", conversation_id=conversation.id)
    assert len(list(sdk.conversations.items.list(conversation.id))) == 4
    assert sdk.conversations.update(conversation.id, metadata={"of": "b"}).metadata == {"of": "b"}
    sdk.conversations.delete(conversation.id)
    with pytest.raises(openai.NotFoundError):
        sdk.conversations.retrieve(conversation.id)


def test_a_conversation_is_compacted(sdk: OpenAI, serving: Server, script: Script) -> None:
    asked = "Hi " + script("A secret: blue.", "The secret is blue.")
    first = sdk.responses.create(model=MODEL, input=asked)
    compacted = sdk.responses.compact(model=MODEL, previous_response_id=first.id)
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    window: Any = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
    sdk.responses.create(model=MODEL, input=[*window, {"role": "user", "content": script("Blue.")}])
    prompt = serving.plays(None)[-1].prompt
    assert "The secret is blue." in prompt
    assert "A secret: blue." not in prompt


def test_input_tokens_are_those_of_the_prompt(sdk: OpenAI, serving: Server, script: Script) -> None:  # C27
    fields: Any = {"model": MODEL, "input": "Hi " + script("Hello."), "tools": [TOOL]}
    counted = sdk.responses.input_tokens.count(**fields).input_tokens
    used = sdk.responses.create(**fields).usage
    assert used is not None
    assert counted == used.input_tokens == len(serving.plays(None)[-1].prompt_token_ids)
