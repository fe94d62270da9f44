"""Checks that an engine in this process delivers the tokens between the first and the last one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import structs

from engines.contract import tokens_of
from singletree.engines.engine import Engine, GenerationJob


async def check_delivery(engine: Engine, job: GenerationJob, refused: Collection[int]) -> None:
    """Generate ``job`` twice, with and without ``deliver``, and compare.

    Args:
        job: a generation of seven tokens, that come one after the other.
        refused: the numbers of the calls of ``deliver``, from 0, that return False.
    """
    plain = [chunk async for chunk in engine.generate(job)]
    delivered: list[int] = []
    seen: list[int] = []
    calls = 0

    def deliver(token_ids: Sequence[int]) -> bool:
        nonlocal calls
        delivered.extend(token_ids)
        seen.extend(token_ids)
        calls += 1
        return calls - 1 not in refused

    chunks = []
    async for chunk in engine.generate(structs.replace(job, deliver=deliver)):
        chunks.append(chunk)
        seen.extend(chunk.token_ids)
    assert seen == tokens_of(plain)
    assert len(delivered) == 5
    assert [len(chunk.token_ids) for chunk in chunks] == [1, *[0] * len(refused), 1]
    assert chunks[-1] == plain[-1]
