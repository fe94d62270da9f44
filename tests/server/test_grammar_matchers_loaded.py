"""What follows the grammars of turns is loaded and made once, however many turns need it at the same moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from singletree.engines.engine import Constraint
from singletree.server.models import model
from singletree.testing import byte_model


async def test_turns_that_need_it_at_once_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Source:
        async def follow(self, constraint: Constraint, token_ids: Any) -> None:
            return None

    def make(*given: Any) -> Source:
        made.append(given)
        return Source()

    async def open_slowly(feature: str) -> Any:
        await asyncio.sleep(0)
        return make

    monkeypatch.setattr(model, "open_door_in_thread", open_slowly)
    tokenizer = byte_model.byte_tokenizer()
    matchers = model._Matchers(tokenizer, with_tags=True)
    await asyncio.gather(*(matchers.follow(Constraint("lark", ""), ()) for _ in range(8)))
    assert made == [(tokenizer, True)]
