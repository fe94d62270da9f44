"""Which outputs of vLLM's engine go past its output processor; the real one is in ``test_vllm_in_process_real.py``."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from engines.fake_vllm import Output, Queue
from singletree.in_process.vllm_outputs import GenerationOutputs, OutputBypass, bypass_processor


class EngineOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """vLLM's ``EngineCoreOutput``, with some of its fields."""

    request_id: str
    new_token_ids: list[int]
    routed_experts: Any = None
    finish_reason: str | None = None
    num_nans_in_logits: int = 0


class State:
    """vLLM's ``RequestState``, of what it counts."""

    def __init__(self) -> None:
        self.detokenizer = self
        self.counted: list[int] = []
        self.versions: list[tuple[str, int]] = []

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> None:
        """See vLLM."""
        assert not stop_terminated
        self.counted.extend(new_token_ids)

    def track_weight_version(self, weight_version: str) -> None:
        """See vLLM."""
        if not self.versions or self.versions[-1][0] != weight_version:
            self.versions.append((weight_version, len(self.counted)))


class Processor:
    """vLLM's ``OutputProcessor``."""

    log_stats = False
    stream_interval = 1

    def __init__(self, **queues: Queue) -> None:
        self.queues = queues
        self.request_states = {id: State() for id in queues}

    def process_outputs(
        self, outputs: Sequence[EngineOutput], timestamp: float, stats: Any, weight_version: str | None = None
    ) -> int:
        """See vLLM."""
        for output in outputs:
            completion = SimpleNamespace(
                token_ids=output.new_token_ids,
                finish_reason=output.finish_reason,
                logprobs=None,
                weight_versions=None,
            )
            queue = self.queues[output.request_id]
            queue.put(Output([completion], output.finish_reason is not None, 0, [1]))
        return len(outputs)


class Bench:
    """One generation whose consumer waits."""

    def __init__(self) -> None:
        self.queue = Queue("a")
        self.processor = Processor(a=self.queue, b=Queue("b"))
        self.state = self.processor.request_states["a"]
        bypass = bypass_processor(SimpleNamespace(output_processor=self.processor), EngineOutput("", []))
        assert bypass is not None
        self.outputs = GenerationOutputs(self.queue, bypass)
        self.delivered: list[int] = []
        self.takes_more = True
        self.outputs.handover.deliver = self._deliver
        self.next = asyncio.create_task(self.outputs.next())

    def _deliver(self, token_ids: Sequence[int]) -> bool:
        self.delivered.extend(token_ids)
        return self.takes_more

    def step(self, *outputs: EngineOutput, weights: str | None = "w1") -> Any:
        """Process the outputs of a step, as vLLM calls it; return how many vLLM had to process itself."""
        return self.processor.process_outputs(list(outputs), 1.0, None, weight_version=weights)


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    await asyncio.sleep(0)
    yield made
    made.next.cancel()


async def test_tokens_alone_are_delivered_and_counted(bench: Bench) -> None:
    assert bench.step(EngineOutput("a", [1]), EngineOutput("b", [7])) == 1
    assert bench.step(EngineOutput("a", [2, 3]), weights="w2") == 0
    assert bench.step(EngineOutput("a", []), weights=None) == 0
    assert bench.delivered == bench.state.counted == [1, 2, 3]
    assert bench.state.versions == [("w1", 0), ("w2", 1)]
    assert bench.processor.queues["b"].get_nowait() is not None
    assert not bench.next.done()


@pytest.mark.parametrize(
    "more",
    [{"finish_reason": "stop"}, {"num_nans_in_logits": 1}, {"routed_experts": array("f", [0.5, 1.5])}],
    ids=lambda more: next(iter(more)),
)
async def test_what_is_more_than_tokens_is_vllms(bench: Bench, more: dict[str, Any]) -> None:
    assert bench.step(EngineOutput("a", [1], **more)) == 1
    assert bench.state.counted == [], "vLLM counts it"
    if "finish_reason" in more:
        output = await bench.next
        assert (output.finished, output.outputs[0].token_ids, bench.delivered) == (True, [1], [])
    else:
        assert bench.delivered == [1], "its output has tokens alone"


async def test_a_consumer_that_takes_no_more_gets_the_rest_when_it_asks(bench: Bench) -> None:
    bench.takes_more = False
    assert bench.step(EngineOutput("a", [1])) == 0
    assert bench.step(EngineOutput("a", [2])) == 1
    assert bench.step(EngineOutput("a", [3])) == 1
    output = await bench.next
    assert output.outputs[0].token_ids == [2, 3]
    bench.next = asyncio.create_task(bench.outputs.next())
    await asyncio.sleep(0)
    assert bench.step(EngineOutput("a", [4])) == 0
    assert await bench.next is None
    assert bench.delivered == [1, 4]


async def test_an_error_is_raised_and_nothing_is_delivered_behind_it(bench: Bench) -> None:
    bench.queue.put(OSError("the engine died"))
    assert bench.step(EngineOutput("a", [1])) == 1
    with pytest.raises(OSError, match="died"):
        await bench.next


async def test_a_generation_that_is_closed_is_vllms(bench: Bench) -> None:
    bench.outputs.close()
    bench.outputs.close()
    assert bench.step(EngineOutput("a", [1])) == 1
    assert bench.delivered == []
    assert bench.queue.closed


@pytest.mark.parametrize(("name", "value"), [("log_stats", True), ("stream_interval", 2)])
def test_where_vllm_has_to_see_every_output_there_is_no_bypass(name: str, value: Any) -> None:
    processor = Processor()
    setattr(processor, name, value)
    assert bypass_processor(SimpleNamespace(output_processor=processor), EngineOutput("", [])) is None
    assert "process_outputs" not in vars(processor)


async def test_a_request_that_vllm_does_not_know_is_left() -> None:
    bypass = OutputBypass(Processor(), EngineOutput("", []))
    queue = Queue("gone")
    outputs = GenerationOutputs(queue, bypass)
    outputs.close()
    assert queue.closed
