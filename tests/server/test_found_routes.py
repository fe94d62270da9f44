"""What a client is told when it takes the wrong way in."""

from __future__ import annotations

from .serving import serving


async def test_a_wrong_method_is_told_the_right_one() -> None:
    async with serving() as served:
        answer = await served.client.get("/v1/messages")
    assert answer.status == 405
    assert "GET is not offered on /v1/messages; send POST" in answer.body.decode()
