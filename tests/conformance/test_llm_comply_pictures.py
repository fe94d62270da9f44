"""The picture cases of ``llm-comply`` on a real model with eyes: llama.cpp with a vision projector of made-up weights.

What such a model writes means nothing. It is checked that it reads the picture, and that the answer is one that the
schema of each API describes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import llm_comply
import pytest
from llm_comply.schema import SpecLoader
from llm_comply.tests.anthropic import ANTHROPIC_TESTS
from llm_comply.tests.open_responses import OPEN_RESPONSES_TESTS
from llm_comply.tests.openai_chat import OPENAI_CHAT_TESTS

from engines.small_model import small_model
from engines.test_llamacpp_pictures import real
from engines.tiny_mmproj import TOKENS, write_mmproj
from singletree.engines.engine import Chunk, GenerationJob
from singletree.prompts.tokenizer.tokenizer import load_tokenizer

from . import comply

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:jsonschema.RefResolver:DeprecationWarning"),
]

SECONDS = 300.0
BEHIND = "Answer in one word."
"""llama.cpp refuses a prompt that ends with a picture, and the model shall soon be done."""
APIS: dict[str, tuple[list[Any], str, str, str]] = {
    "messages": (ANTHROPIC_TESTS, "anthropic.json", "messages", "max_tokens"),
    "chat": (OPENAI_CHAT_TESTS, "openai_chat.json", "messages", "max_tokens"),
    "responses": (OPEN_RESPONSES_TESTS, "openresponses.json", "input", "max_output_tokens"),
}
"""The cases of each API, the file of its schema, and its fields for messages and for the length of an answer."""


@pytest.mark.parametrize("api", APIS)
async def test_the_checkers_picture_case(api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    cases, file, prompt, limit = APIS[api]
    (case,) = [case for case in cases if case.id.endswith("image-input")]
    spec = SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / file))
    read: list[Chunk] = []
    mmproj = write_mmproj(tmp_path / "mmproj.gguf")
    async with real(load_tokenizer(small_model(), marks_pictures=True), mmproj) as served:
        generate = served.engine.generate

        async def keep(job: GenerationJob) -> AsyncGenerator[Chunk, None]:
            async with aclosing(generate(job)) as chunks:
                async for chunk in chunks:
                    read.append(chunk)
                    yield chunk

        monkeypatch.setattr(served.engine, "generate", keep)
        fields = {"temperature": 0, limit: 64}
        await comply.check(case, spec, served, monkeypatch, prompt, mark=BEHIND, seconds=SECONDS, **fields)
    assert [list(chunk.picture_tokens) for chunk in read if chunk.picture_tokens] == [[TOKENS]]
