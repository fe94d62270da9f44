"""In the real template of each family, the tokens of a turn stand in the next prompt as they were generated."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import pytest

from clients.returned_turns import request_of
from prompts.template_sources import COLLECTED, collected, label
from singletree import families
from singletree.checking.returned_turns import PROTOCOLS
from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.errors import BadConfiguration
from singletree.parsing.family import markers, with_variant
from singletree.parsing.render_turn import render_turn
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.models.chat_format import ChatFormat
from singletree.testing.scripted_engine import ScriptedEngine
from singletree.testing.scripts import Script

from .forging import speech, vocabulary
from .serving import MODEL, serving

OWN = Path(__file__).parents[1] / "families" / "templates"
SOURCES = {label(path): path for path in collected()} | {
    f"own/{p.stem}": p for p in sorted(OWN.glob("*.jinja"))
}
TOKEN = re.compile(
    r"<\|[^|<>\s{}%]{1,60}\|>|<｜[^<>\s]{1,40}｜>|\[/?[A-Z_]{3,}\]|</?(?:start|end)_of_\w+>|<start_function_call>"
    r"|<turn\|>|<\|turn>|<\|?tool_\w+\|?>|<channel\|>|<\|channel>|<\|\"\|>|<escape>|\[e~\[|\]~b\]|<seed:\w+>"
    r"|</seed:\w+>|<SPECIAL_\d+>|<(?:end|beginning)_of_sentence>"
)
"""What is one token, as far as a template shows it."""

TURNS: Sequence[tuple[Part, ...]] = (
    (
        Reasoning("Two things at once, I think."),
        Text("Let me look at both."),
        ToolCall("get", '{"city": "Paris", "n":  3}', ""),
        ToolCall("read", '{"path": "a b/ü.py"}', ""),
    ),
    (Reasoning("Once more I look."), ToolCall("get", '{"city": "Rome"}', "")),
    (Reasoning("I know it all."), Text("It is sunny.")),
)
STRING = {"type": "string"}
TOOLS = [
    ("get", "Gets.", {"type": "object", "properties": {"city": STRING, "n": {"type": "integer"}}}),
    ("read", "Reads.", {"type": "object", "properties": {"path": STRING}}),
]

BREAKS: Mapping[str, str] = {
    "axolotl/exaone4": "drops reasoning",
    "llama.cpp/Apriel-1.6-15b-Thinker-fixed": "drops reasoning",
    "llama.cpp/CohereForAI-c4ai-command-r-plus-tool_use": "prints instructions behind the last message",
    "llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use": "drops reasoning beside text",
    "llama.cpp/NVIDIA-Nemotron-Nano-v2": "drops reasoning",
    "llama.cpp/Qwen-QwQ-32B": "drops reasoning",
    "llama.cpp/moonshotai-Kimi-K2": "numbers the calls of each turn from 0",
    "npm_lenml/command_r_plus.tool_use": "prints instructions behind the last message",
    "trl/deepseekv3": "opens the calls of the first turn only",
    "vllm/tool_chat_template_deepseekr1": "drops reasoning",
    "vllm/tool_chat_template_mistral_parallel": "prints instructions in the last words of the user",
}
"""Why a template does not print what its model wrote, by ``label``."""


class Answering(ScriptedEngine):
    """Writes ``TURNS`` as models of the family do, behind whatever the prompt has opened."""

    def __init__(self, spoken: ChatFormat) -> None:
        tokenizer = spoken.tokenizer
        super().__init__(
            tokenizer.encode, tokenizer.decode, end_token_id=next(iter(tokenizer.stop_token_ids), None)
        )
        self._chooser = self  # type: ignore[assignment]
        self._spoken = spoken
        self._calls = 0
        self.texts: list[str] = []

    def choose(self, prompt: Sequence[int]) -> tuple[str, Script]:
        """Return the turn that comes next, as a script."""
        family, opened = self._spoken.family, self._spoken.tokenizer.decode(prompt)[-80:]
        # Cohere's models count over the conversation, if their template does.
        numbers = count(self._calls if self._spoken.template.capabilities.calls else 0)
        parts = [self._known(part) for part in TURNS[len(self.texts)]]
        text = render_turn(family, [p for p in parts if family.reasoning or not isinstance(p, Reasoning)])
        if "tool_idx" in self._spoken.template.source:
            text = re.sub(r'(?<="tool_call_id": ")\d+', lambda _: str(next(numbers)), text)
        if opened.endswith(family.message_header):
            text = text.removeprefix(family.message_header)
        ready = (size for size in range(80, 0, -1) if text[:size].strip() and opened.endswith(text[:size]))
        self.texts.append(text[next(ready, 0) :])
        return self.texts[-1], Script(tokens=tuple(self._spoken.tokenizer.encode(self.texts[-1])))

    def _known(self, part: Part) -> Part:
        if not isinstance(part, ToolCall):
            return part
        form, number = self._spoken.family.forms[0], self._calls
        self._calls += 1
        own = form.id_format.replace("{name}", part.name).replace("{index}", str(number))
        return replace(part, id=own or f"abcdefgh{number}")


def spoken_by(source: str) -> ChatFormat:
    """How a model with that template is spoken to; its tokens are those that template and family show."""
    family = with_variant(families.find(source).family, source)
    found = sorted({*TOKEN.findall("\n".join([source, *markers(family)]))})
    ends = [mark for mark in (*map(str.strip, family.stop_markers), "<|im_end|>") if mark in found]
    tokenizer = vocabulary(dict.fromkeys([*found, "<s>", "</s>"], True), [*ends, "</s>"][0])
    return speech(tokenizer, source, family)


async def play(spoken: ChatFormat) -> list[tuple[list[int], list[int]]]:
    """Each prompt with what was generated behind it, and the next prompt."""
    engine, protocol = Answering(spoken), PROTOCOLS[0]
    model = {name: getattr(spoken, name) for name in ("tokenizer", "template", "family", "layout")}
    async with serving(engine=engine, memory=TurnMemory(2**20), context_window=2**20, **model) as served:
        turns: list[dict[str, object]] = []
        for _ in TURNS:
            given = request_of(protocol, "How is it going?", turns, TOOLS) | {"model": MODEL}
            answer = await served.client.post(protocol.path, given)
            assert answer.status == 200, answer.body
            turns += protocol.turn(protocol.blocks(json.loads(answer.body)), False)
    ends = spoken.tokenizer.stop_token_ids
    return [
        ([*one.prompt, *(token for token in one.token_ids if token not in ends)], [*other.prompt])
        for one, other in pairwise(engine.log)
    ]


@pytest.mark.skipif(not COLLECTED.is_dir(), reason="the collection of chat templates is not here")
@pytest.mark.parametrize("name", SOURCES)
async def test_a_loop_of_reasoning_text_and_calls_only_grows(name: str) -> None:  # C3
    source = SOURCES[name].read_text(encoding="utf-8")
    try:
        spoken = spoken_by(source)
    except BadConfiguration as error:
        pytest.skip(error.message)
    if not spoken.family.forms:
        pytest.skip("its model writes no calls")
    grows = all(after[: len(expected)] == expected for expected, after in await play(spoken))
    assert grows is (name not in BREAKS)
