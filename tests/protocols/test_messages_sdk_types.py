"""All that the official SDK can put into a request: accepted, or ignored with a word, whichever type it is of.

The types are read from the SDK, so that one that it adds shows up here.
"""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints

import anthropic.types as stable
import anthropic.types.beta as beta
import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase
from pydantic import BaseModel

from singletree.errors import InvalidRequest
from singletree.events import ReasoningDelta
from singletree.protocols.client_tools import anthropic_tool
from singletree.protocols.messages import request as messages

from .test_messages_decode import BASH, decode, text, user
from .test_messages_encode import encoder


def names(union: Any) -> list[str]:
    """The ``type`` of each member of a union of the SDK's."""
    return [name for member in get_args(union) for name in _names(member)]


def _names(member: Any) -> list[str]:
    if not isinstance(member, type):
        return names(member)
    if issubclass(member, BaseModel):
        return literals(member.model_fields["type"].annotation)
    return literals(get_type_hints(member)["type"])


def literals(hint: Any) -> list[str]:
    """The words of a literal, whatever is wrapped around it."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [word for inner in get_args(hint) for word in literals(inner)]


BLOCKS = sorted({*names(stable.ContentBlockParam), *names(beta.BetaContentBlockParam)})
TOOLS = sorted({*names(stable.ToolUnionParam), *names(beta.BetaToolUnionParam)} - {"custom"})
ANY_BLOCK: dict[str, Any] = {
    "text": "t",
    "thinking": "t",
    "data": "d",
    "id": "i",
    "tool_use_id": "i",
    "name": "n",
    "title": "t",
    "input": {},
    "content": [],
    "tool_name": "n",
    "tool": {"type": "tool_reference", "name": "n"},
}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBOR"}
OF_THEIR_OWN: dict[str, dict[str, Any]] = {
    "image": {"source": SOURCE},
    "document": {"source": SOURCE | {"media_type": "application/pdf"}},
    "search_result": {"source": "https://a"},
    "compaction": {"content": "So far."},
}


def test_the_sdk_has_types() -> None:
    assert {"text", "thinking", "tool_use", "redacted_thinking", "container_upload"} < set(BLOCKS)
    assert {"bash_20250124", "web_search_20250305", "mcp_toolset"} < set(TOOLS)


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_block_is_read_where_it_can_stand(kind: str) -> None:  # C36
    block = ANY_BLOCK | {"type": kind} | OF_THEIR_OWN.get(kind, {})
    written, refused = [], []
    for role in ("user", "assistant", "system"):
        try:
            written.append(decode(messages=[{"role": role, "content": [block]}, user(text("x"))]))
        except InvalidRequest as error:
            refused.append(f"{kind} is not allowed in {role} content" in error.message)
    assert written
    assert all(refused)
    for request in written:
        read = request.conversation.turns[0].parts
        assert bool(read) != any(warning.startswith(f"{kind} blocks") for warning in request.warnings)


@pytest.mark.parametrize("kind", ["tool_result", "web_search_tool_result", "search_result", "tool_use"])
def test_what_a_block_need_not_have(kind: str) -> None:
    least = {"type": kind, "id": "i", "tool_use_id": "i", "name": "n", "title": "t"}
    assert decode(messages=[{"role": "assistant", "content": [least]}]).conversation.turns[0].parts


CLIENT_SIDE = [kind for kind in TOOLS if anthropic_tool(kind)]


@pytest.mark.parametrize("kind", CLIENT_SIDE)
def test_every_tool_that_the_client_runs_is_the_models(kind: str) -> None:  # C26
    request = decode(tools=[{"type": kind, "name": "theirs"}, BASH])
    assert [tool.name for tool in request.conversation.tools] == ["theirs", "Bash"]
    assert request.conversation.tools[0].parameters
    assert request.warnings == ()


@pytest.mark.parametrize("kind", [kind for kind in TOOLS if kind not in CLIENT_SIDE])
def test_every_tool_that_the_vendor_runs_is_ignored_with_a_word(kind: str) -> None:  # C26
    request = decode(tools=[{"type": kind, "name": "theirs"}, BASH])
    assert [tool.name for tool in request.conversation.tools] == ["Bash"]
    assert kind in request.warnings[0]


NESTED = {"messages", "tools", "thinking", "tool_choice", "output_config", "context_management", "metadata"}
KNOWN: dict[str, Any] = {
    "max_tokens": 9,
    "model": "m",
    "system": "s",
    "stop_sequences": ["x"],
    "cache_control": {"type": "ephemeral"},
    "mcp_servers": [{"type": "url", "url": "https://a", "name": "a"}],
    "container": "c",
    "diagnostics": {"previous_message_id": "msg_1"},
    "fallbacks": [{"model": "n"}],
}


REFUSED = {"thread", "compaction"}
"""They ask for another answer than a turn."""


@pytest.mark.parametrize("field", sorted(set(get_type_hints(MessageCreateParamsBase)) - NESTED - REFUSED))
def test_every_field_is_accepted(field: str) -> None:
    request = decode(**{field: KNOWN.get(field, "some word")})
    assert request.conversation.turns[-1] == decode().conversation.turns[-1]
    ignored = field in messages._WITHOUT_EFFECT
    assert [warning.split(" ")[0] for warning in request.warnings] == [field] * ignored


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_what_asks_for_another_answer_is_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: this server"):
        decode(**{field: {"type": "create"}})
    assert decode(**{field: None}).conversation == decode().conversation


@pytest.mark.parametrize("effort", literals(get_type_hints(beta.BetaOutputConfigParam)["effort"]))
def test_every_effort_is_read(effort: str) -> None:
    assert decode(output_config={"effort": effort, "task_budget": {"total": 9}}).thinking.effort == effort


@pytest.mark.parametrize("kind", names(beta.BetaThinkingConfigParam))
@pytest.mark.parametrize(
    "display", [None, *literals(get_type_hints(beta.BetaThinkingConfigAdaptiveParam)["display"])]
)
def test_every_way_to_think_is_read(kind: str, display: str | None) -> None:
    request = decode(thinking={"type": kind, "display": display, "block_binding": None})
    assert request.thinking.enabled == (kind != "disabled")
    shown = encoder(request).feed(ReasoningDelta("a", "a"))
    assert (b"thinking_delta" not in shown) == (display == "omitted")


@pytest.mark.parametrize("kind", names(beta.BetaToolChoiceParam))
@pytest.mark.parametrize("alone", [None, False, True])
def test_every_choice_of_tools_is_read(kind: str, alone: bool | None) -> None:  # C38
    choice = {"type": kind, "name": "Bash", "disable_parallel_tool_use": alone}
    request = decode(tools=[BASH], tool_choice=choice)
    assert request.parallel_tool_calls == (not alone)
    assert (request.tool_choice.mode == "required") == (kind in ("any", "tool"))
