"""The outputs of vLLM in this process: as chunks, or as tokens that are delivered in the call that brings them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import zmq
import zmq.asyncio
from msgspec.structs import astuple

from singletree.engines.engine import Chunk, LogprobRow
from singletree.errors import EngineFailed
from singletree.events import WeightVersion
from singletree.in_process.engine import Handover
from singletree.remote.vllm.wire import FINISHES

_LEAST_LOGPROB = -9999.0  # what vLLM's own servers send for minus infinity
_TOKEN_FIELDS = 2  # The first fields of vLLM's EngineCoreOutput: the id of the request, and the new tokens.


class OutputBypass:
    """Delivers tokens before vLLM's output processor makes objects of them, which cost more than all the rest.

    It takes the outputs of vLLM's engine that have tokens and nothing else, of generations whose consumer waits. What
    vLLM counts it counts on: the tokens, and which of them came from which weights.

    Args:
        processor: vLLM's ``OutputProcessor``. Its ``process_outputs`` gets the other outputs only.
        empty_output: an ``EngineCoreOutput`` without tokens: whatever differs from it is more than tokens.
    """

    def __init__(self, processor: Any, empty_output: Any) -> None:
        self._process = processor.process_outputs
        self._states = processor.request_states
        self._nothing_else = astuple(empty_output)[_TOKEN_FIELDS:]
        self._generations: dict[str, tuple[Handover, Callable[..., Any], Callable[[str], None]]] = {}
        processor.process_outputs = self._process_outputs

    def add(self, id: str, handover: Handover) -> None:
        """Deliver the tokens of the request that vLLM calls ``id``, from now on."""
        state = self._states.get(id)
        if hasattr(state, "track_weight_version") and hasattr(state, "detokenizer"):
            self._generations[id] = handover, state.detokenizer.update, state.track_weight_version

    def discard(self, id: str) -> None:
        self._generations.pop(id, None)

    def _process_outputs(
        self, outputs: Sequence[Any], *args: Any, weight_version: str | None = None, **kwargs: Any
    ) -> Any:
        others = [output for output in outputs if not self._delivers(output, weight_version)]
        return self._process(others, *args, weight_version=weight_version, **kwargs)

    def _delivers(self, output: Any, weight_version: str | None) -> bool:
        generation = self._generations.get(output.request_id)
        if generation is None or not all(map(is_, astuple(output)[_TOKEN_FIELDS:], self._nothing_else)):
            return False
        handover, count_tokens, track_weight_version = generation
        token_ids = output.new_token_ids
        if not handover.offer(token_ids):
            return False
        if weight_version is not None and token_ids:
            track_weight_version(weight_version)
        count_tokens(token_ids, False)
        return True


def bypass_processor(llm: Any, empty_output: Any) -> OutputBypass | None:
    """Return the bypass of the output processor of an ``AsyncLLM``.

    It is None if vLLM has to see every output itself, and where the processor is not built as in 0.32 and 0.33.
    """
    processor = llm.output_processor
    is_known = all(hasattr(processor, name) for name in ("log_stats", "stream_interval", "request_states"))
    if not is_known or processor.log_stats or processor.stream_interval > 1:
        return None
    return OutputBypass(processor, empty_output)


class GenerationOutputs:
    """The outputs of one generation.

    Args:
        queue: vLLM's ``RequestOutputCollector``, which merges outputs until they are taken. Its ``put`` is replaced.
        bypass: delivers what never comes to the queue; None where vLLM works otherwise.

    Attributes:
        handover: delivers tokens, once it has a ``deliver``.
    """

    def __init__(self, queue: Any, bypass: OutputBypass | None) -> None:
        self.handover = Handover()
        self._queue = queue
        self._bypass = bypass
        self._put = queue.put
        queue.put = self._receive
        if bypass is not None:
            bypass.add(queue.request_id, self.handover)

    def _receive(self, output: Any) -> None:
        if isinstance(output, Exception) or not (
            _is_plain(output) and self.handover.offer(output.outputs[0].token_ids)
        ):
            self._put(output)
            self.handover.wake()

    async def next(self) -> Any:
        """Return the next output that was not delivered; None where ``deliver`` takes no more. Raises vLLM's errors."""
        output = self._queue.get_nowait()
        if output is None:
            await self.handover.wait()
            output = self._queue.get_nowait()
        return output

    def close(self) -> None:
        if self._bypass is not None:
            self._bypass.discard(self._queue.request_id)
        vars(self._queue).pop("put", None)  # It refers to this object.
        self._queue.close()


def _is_plain(output: Any) -> bool:
    """Return whether an output of vLLM that is not the first has tokens, and nothing else to report."""
    completion = output.outputs[0]
    return (
        completion.finish_reason is None
        and completion.logprobs is None
        and output.prompt_logprobs is None
        and not completion.weight_versions
    )


def vllm_chunk(output: Any, reports_cached: bool, encode_array: Callable[[Any], str]) -> Chunk:
    """Return the chunk of one output of vLLM. Raises EngineFailed for a finish reason that stands for a failure.

    Args:
        output: a ``RequestOutput`` of vLLM.
        reports_cached: whether it is the first of its generation, which reports cached tokens.
        encode_array: encodes the array of routed experts.
    """
    completion = output.outputs[0]
    finish = None
    if completion.finish_reason is not None:
        finish = FINISHES.get(completion.finish_reason)
        if finish is None:
            raise EngineFailed(
                f"vLLM ended the generation with {completion.finish_reason!r}; its log has the cause"
            )
    token_ids, logprobs, prompt_logprobs = completion.token_ids, completion.logprobs, output.prompt_logprobs
    return Chunk(
        token_ids,
        finish,
        output.num_cached_tokens if reports_cached else None,
        None if logprobs is None else list(map(_row, token_ids, logprobs)),
        list(map(_row, output.prompt_token_ids, prompt_logprobs)) if prompt_logprobs else None,
        weight_versions=[
            WeightVersion(each.version, each.start, each.end) for each in completion.weight_versions or ()
        ],
        routed_experts=None
        if finish is None or completion.routed_experts is None
        else encode_array(completion.routed_experts),
    )


def _row(token_id: int, position: Any) -> LogprobRow:
    """Return the row of one token, itself first; empty when its log-probability is unknown."""
    if not position or token_id not in position or math.isnan(position[token_id].logprob):
        return ()
    others = ((id, entry.logprob) for id, entry in position.items() if id != token_id)
    pairs = [(token_id, position[token_id].logprob), *(pair for pair in others if not math.isnan(pair[1]))]
    return [(id, max(logprob, _LEAST_LOGPROB)) for id, logprob in pairs]


_POLLIN = int(zmq.POLLIN)  # A flag of pyzmq's makes a new object in each operation.


class MessageReceiver:
    """Replaces ``recv_multipart`` of an asyncio socket that nobody has used yet and that one task reads.

    pyzmq keeps a queue of futures and asks for the state of the socket seven times a message: 100 Python calls, more
    than a token costs otherwise. One reader needs one future.

    Args:
        socket: a ``zmq.asyncio.Socket``; its ``recv_multipart`` and ``close`` are replaced.
    """

    def __init__(self, socket: Any) -> None:
        self._socket: Any = zmq.Socket.shadow(socket)
        self._descriptor = socket.FD
        self._close = socket.close
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        socket.recv_multipart = self.recv_multipart
        socket.close = self.close

    async def recv_multipart(self, flags: int = 0, copy: bool = True, track: bool = False) -> Any:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self._wake)
        # The descriptor becomes readable once for all that has come, until the socket is asked for its state.
        while not self._socket.get(zmq.EVENTS) & _POLLIN:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._socket.recv_multipart(zmq.DONTWAIT, copy=copy, track=track)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        elif not self._socket.closed:
            self._socket.get(zmq.EVENTS)  # Nobody reads: without this the loop would turn without end.

    def close(self, linger: int | None = None) -> None:
        """Close the socket; the task that reads it is cancelled."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
            if self._waiter is not None:
                self._waiter.cancel()
        self._loop = None
        self._close(linger)


def receive_cheaply(engine_core: Any) -> None:
    """Let the client of vLLM's engine process receive by a ``MessageReceiver``, if it is built as in 0.32 and 0.33."""
    resources = getattr(engine_core, "resources", None)
    socket = getattr(resources, "output_socket", None)
    if isinstance(socket, zmq.asyncio.Socket) and getattr(resources, "output_queue_task", ...) is None:
        MessageReceiver(socket)
