"""What all requests hold together before their generations begin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from singletree.errors import Overloaded
from singletree.server.answers import request_body as module
from singletree.server.answers.request_body import ArrivingBody, BodyAdmission

from .serving import serving

SetLimits = Callable[..., None]


def test_the_largest_of_the_arriving_bodies_is_refused(set_limits: SetLimits) -> None:
    set_limits(bytes_in_preparation=100)
    admission, large, small = BodyAdmission(), ArrivingBody(), ArrivingBody()
    admission.add(large, bytes(150))  # alone it may be larger
    admission.add(small, bytes(90))
    assert (large.is_refused, large.pieces, admission.arriving) == (True, [], 90)
    with pytest.raises(Overloaded, match="--limit bytes_in_preparation"):
        admission.add(large, b"x")
    admission.remove(large)
    admission.remove(small)
    assert admission.arriving == 0


async def test_bodies_wait_for_one_another_in_their_order(
    set_limits: SetLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(bytes_in_preparation=100)
    admission, order = BodyAdmission(), []

    async def work(size: int) -> None:
        await admission.enter(size)
        order.append(size)

    await admission.enter(80)
    tasks = [asyncio.create_task(work(200))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == []
    admission.leave(80)
    await tasks[0]
    assert (order, admission.in_work) == ([200], 200)
    tasks += [asyncio.create_task(work(size)) for size in (30, 40)]
    await asyncio.sleep(0)
    admission.leave(200)
    await asyncio.gather(*tasks)
    assert (order, admission.in_work) == ([200, 30, 40], 70)


async def test_bodies_that_wait_are_bounded_together(set_limits: SetLimits) -> None:
    set_limits(bytes_in_preparation=100)
    admission = BodyAdmission()
    await admission.enter(80)
    waiting = [asyncio.create_task(admission.enter(size)) for size in (60, 40)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="--limit bytes_in_preparation"):
        await asyncio.wait_for(admission.enter(1), 1)
    admission.leave(80)
    await asyncio.gather(*waiting)
    assert admission.in_work == 100


async def test_one_that_leaves_or_waits_too_long_keeps_no_room(
    set_limits: SetLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(bytes_in_preparation=100)
    admission = BodyAdmission()
    await admission.enter(80)
    left = asyncio.create_task(admission.enter(70))
    behind = asyncio.create_task(admission.enter(20))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    await behind
    monkeypatch.setattr(module, "_WAIT_SECONDS", 0.0)
    with pytest.raises(Overloaded):
        await admission.enter(90)
    admission.leave(80)
    admission.leave(20)
    assert admission.in_work == 0


@pytest.mark.parametrize("content", ["[[gen:4:1:0]]", "x" * 2_000_000])
async def test_a_request_holds_nothing_once_it_is_prepared_or_refused(content: str) -> None:
    async with serving() as served:
        sent = {"model": "alias", "messages": [{"role": "user", "content": content}]}
        await served.client.post("/v1/chat/completions", sent)
        await served.client.post("/v1/chat/completions", {"model": "alias", "messages": "wrong"})
        assert (served.service.admission.arriving, served.service.admission.in_work) == (0, 0)


async def test_a_request_without_room_gets_a_time_to_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_WAIT_SECONDS", 0.0)
    async with serving() as served:
        await served.service.admission.enter(10**9)
        sent: dict[str, object] = {
            "model": "alias",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "x"}],
        }
        small = await served.client.post("/v1/chat/completions", sent)
        sent["ignored"] = "x" * 100_000
        chat = await served.client.post("/v1/chat/completions", sent)
        messages = await served.client.post("/v1/messages", sent)
    assert (small.status, chat.status, messages.status) == (200, 503, 529)
    assert messages.json["error"]["type"] == "overloaded_error"
    assert chat.headers["retry-after"] == "5"
