"""Token ids that no model has are refused with the id and the range."""

from __future__ import annotations

import json

import pytest

from .serving import MODEL, serving


@pytest.mark.parametrize("token", [10**9, 10**20, -1])
async def test_an_unknown_id_is_refused(token: int) -> None:
    async with serving() as served:
        answer = await served.client.post("/v1/detokenize", {"model": MODEL, "tokens": [1, token]})
    assert answer.status == 400
    assert "tokens.1" in json.loads(answer.body)["error"]["message"]
