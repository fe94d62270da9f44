"""Sessions in the forms that trainers read; ``docs/training.md`` lists who reads which."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from singletree import __version__
from singletree.errors import InvalidRequest
from singletree.training.graph import CapturedCall, SessionGraph, Trajectory, trajectories
from singletree.training.records import unpack_logprobs

TRAJECTORY_SCHEMA = "singletree.trajectory.v1"
_ATIF = "ATIF-v1.8"
JsonObject = dict[str, Any]


def trajectory_documents(graph: SessionGraph) -> Iterator[JsonObject]:
    """Yield the trajectories of a session that have anything to train on, each as one JSON value."""
    for number, each in enumerate(_trained(graph)):
        first, last = each.spans[0].call.start, each.last.start
        yield {
            "schema": TRAJECTORY_SCHEMA,
            "session": session_name(graph),
            "trajectory": number,
            "status": graph.status,
            "lacks": graph.lacks,
            "reward": reward_of(graph),
            "is_terminal": each.is_terminal,
            "agent": last.agent,
            "is_subagent": last.is_subagent,
            "model": last.model,
            "logprobs_are": last.logprobs,
            "prompt_length": first.length,
            "token_ids": each.token_ids().tolist(),
            "loss_mask": each.loss_mask(),
            "logprobs": each.logprobs(),
            "calls": [
                {
                    "call": span.call.id,
                    "start": span.start,
                    "end": span.end,
                    "masked": span.masked,
                    "finish": span.call.end.finish if span.call.end else "",
                    "weights": _weights(span.call, span.start),
                    "experts": span.call.end.experts if span.call.end else "",
                    "sampling": span.call.start.sampling,
                    "constrained": span.call.start.constrained,
                    "recovered": span.call.start.recovered,
                    "redacted": span.call.start.redacted,
                }
                for span in each.spans
            ],
        }


_FLAT: Mapping[str, tuple[str, ...]] = {
    "trl": ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward"),
    "verl": ("prompt_ids", "response_ids", "response_logprobs", "response_mask", "reward_score"),
    "skyrl": ("prompt_token_ids", "response_ids", "rollout_logprobs", "loss_masks", "rewards"),
}
"""What trainers call the first prompt of a trajectory, what follows it, its log-probabilities, its mask, its reward."""


def _flat(graph: SessionGraph, form: str) -> Iterator[tuple[JsonObject, Trajectory]]:
    """Yield these fields of each trajectory. Tokens without a log-probability, which are never trained on, have 0."""
    for each in _trained(graph):
        at, tokens = each.spans[0].start, each.token_ids()
        logprobs = [0.0 if value is None else value for value in each.logprobs()[at:]]
        values = tokens[:at].tolist(), tokens[at:].tolist(), logprobs, each.loss_mask()[at:], reward_of(graph)
        yield dict(zip(_FLAT[form], values, strict=True)), each


def trl_documents(graph: SessionGraph) -> Iterator[JsonObject]:
    """Yield the fields that TRL's ``rollout_func`` returns, for each trajectory."""
    for fields, each in _flat(graph, "trl"):
        yield {**fields, "session": session_name(graph), "is_terminal": each.is_terminal}


def verl_documents(graph: SessionGraph) -> Iterator[JsonObject]:
    """Yield each trajectory as an ``AgentLoopOutput`` of verl."""
    for fields, each in _flat(graph, "verl"):
        extra = {"session": session_name(graph), "is_terminal": each.is_terminal}
        yield {**fields, "num_turns": 2 * len(each.spans), "metrics": {}, "extra_fields": extra}


def skyrl_documents(graph: SessionGraph) -> Iterator[JsonObject]:
    """Yield a session as a ``GeneratorOutput`` of SkyRL, in which each trajectory is a row."""
    if rows := [*_flat(graph, "skyrl")]:
        reasons = ["" if each.last.end is None else each.last.end.finish for _, each in rows]
        columns: JsonObject = {name: [fields[name] for fields, _ in rows] for name in _FLAT["skyrl"]}
        yield {**columns, "stop_reasons": reasons, "rollout_metrics": None}


def openenv_documents(graph: SessionGraph) -> Iterator[JsonObject]:
    """Yield a session as a ``TrainingTrace`` of OpenEnv: each call once, those that are not trained on with a mask of
    zeros. Calls without log-probabilities have no place in it.
    """
    turns: dict[str, JsonObject] = {}
    for each in trajectories(graph):
        mask = each.loss_mask()
        for span in each.spans:
            call, end = span.call, span.call.end
            if end is None or not end.logprobs or (span.masked and call.id in turns):
                continue
            trained = [] if span.masked else mask[span.start : span.end]
            message = {} if end.turn is None else _message(end.turn)
            turns[call.id] = {
                "node_id": call.id,
                "prompt_token_ids": call.prompt.tolist(),
                "completion_token_ids": call.completion.tolist(),
                "per_token_logps": [v if v == v else 0.0 for v in unpack_logprobs(end.logprobs)],
                "loss_mask": [0] * span.start + trained + [0] * (call.length - span.start - len(trained)),
                "request": {"messages": [_message(turn) for turn in history(call)]},
                "response": {"choices": [{"message": message, "finish_reason": end.finish}]},
                "metadata": {**_origin(call, span.masked), "sampling_params": call.start.sampling},
            }
    if turns:
        yield {"schema_version": 1, "turns": list(turns.values())}


def rllm_documents(graph: SessionGraph) -> Iterator[JsonObject]:
    """Yield each call as a ``TraceRecord`` of rllm-model-gateway."""
    name = session_name(graph)
    for call in graph.calls.values():
        start, end = call.start, call.end
        if end is None:
            continue
        prompt = call.prompt
        yield {
            "trace_id": f"{name}:{call.id}",
            "session_id": name,
            "model": start.model,
            "messages": [_message(turn) for turn in history(call)],
            "prompt_token_ids": prompt.tolist(),
            "response_message": {} if end.turn is None else _message(end.turn),
            "completion_token_ids": call.completion.tolist(),
            "logprobs": _known_logprobs(end.logprobs),
            "finish_reason": end.finish,
            "latency_ms": round((end.at - start.at) * 1000, 3),
            "token_counts": {"prompt": len(prompt), "completion": len(call.completion)},
            "timestamp": start.at,
            "metadata": {
                **_origin(call, "session" if graph.problems else graph.masked(call)),
                "parent": call.parent.id if call.parent is not None and call.continues else None,
            },
        }


def atif_documents(graph: SessionGraph) -> Iterator[JsonObject]:
    """Yield the trajectories in the Agent Trajectory Interchange Format. Without ``--capture-content`` they have the
    token ids of the turns, and empty messages.
    """
    name = session_name(graph)
    for number, each in enumerate(trajectories(graph)):
        steps: list[JsonObject] = []
        known = 0
        for span in each.spans:
            turns = history(span.call)
            steps += _client_steps(turns[known:], steps)
            steps.append(_agent_step(span.call, span.masked))
            known = len(turns) + bool(turns)
        for at, step in enumerate(steps, 1):
            step["step_id"] = at
        ends = [span.call.end for span in each.spans if span.call.end is not None]
        final = {
            "total_prompt_tokens": sum(span.call.prompt_length for span in each.spans),
            "total_completion_tokens": sum(len(span.call.completion) for span in each.spans),
            "total_cached_tokens": sum(end.cached or 0 for end in ends),
            "total_steps": len(steps),
        }
        yield {
            "schema_version": _ATIF,
            "session_id": name,
            "trajectory_id": f"{name}.{number}",
            "agent": {
                "name": each.last.start.agent or "agent",
                "version": f"singletree-{__version__}",
                "model_name": each.last.start.model,
            },
            "steps": steps,
            "final_metrics": final,
            "extra": {
                "reward": reward_of(graph),
                "is_terminal": each.is_terminal,
                "status": graph.status,
                "lacks": graph.lacks,
            },
        }


TraceForm = Callable[[SessionGraph], Iterator[JsonObject]]

FORMS: Mapping[str, TraceForm] = {
    "singletree": trajectory_documents,
    "trl": trl_documents,
    "verl": verl_documents,
    "skyrl": skyrl_documents,
    "openenv": openenv_documents,
    "rllm": rllm_documents,
    "atif": atif_documents,
}
"""The forms, by name."""


def find_form(name: str) -> TraceForm:
    """Return the form ``name``. Raises InvalidRequest where there is none."""
    if name not in FORMS:
        raise InvalidRequest(f"form is {name[:64]!a}; the forms are {', '.join(FORMS)}", param="form")
    return FORMS[name]


def session_name(graph: SessionGraph) -> str:
    """Return the name of the session; empty where it is not known."""
    return "" if graph.head is None else graph.head.session


def reward_of(graph: SessionGraph) -> float | None:
    """Return the reward; None for a session that is not whole, or whose scored answer is not known."""
    if graph.completion is None or graph.status != "complete" or graph.terminal()[0] is None:
        return None
    return graph.completion.reward


def count_trained(graph: SessionGraph) -> JsonObject:
    """Return what is known of a session as numbers: how much of it can be trained on, and why the rest cannot."""
    calls = list(graph.calls.values())
    found = trajectories(graph)
    sampled = sum(len(call.completion) for call in calls)
    trained = [each.trained for each in found]
    followers = graph.followers()
    reasons = [graph.masked(call) for call in calls]
    terminal, why = graph.terminal()
    masked = {reason: reasons.count(reason) for reason in sorted({*reasons} - {""})}
    return {
        "session": session_name(graph),
        "status": graph.status,
        "lacks": graph.lacks,
        "problems": graph.problems,
        "calls": len(calls),
        "prompt_tokens": sum(len(call.new) for call in calls),
        "sampled_tokens": sampled,
        "trained_tokens": sum(trained),
        "trajectories": sum(count > 0 for count in trained),
        "share_in_one_trajectory": round(max(trained, default=0) / sampled, 4) if sampled else None,
        "share_trained": round(sum(trained) / sampled, 4) if sampled else None,
        "continued": sum(call.continues for call in followers),
        "drifted": sum(not call.continues for call in followers),
        "masked": masked,
        "terminal": None if terminal is None else terminal.id,
        "terminal_unknown": "" if terminal is not None else why,
        "reward": reward_of(graph),
    }


def _trained(graph: SessionGraph) -> Iterator[Trajectory]:
    return (each for each in trajectories(graph) if each.trained)


def _origin(call: CapturedCall, masked: str) -> JsonObject:
    start, weights = call.start, [] if call.end is None else call.end.weights
    known = {"masked": masked, "logprobs_are": start.logprobs, "weights": weights}
    return {**known, "model": start.model, "is_subagent": start.is_subagent}


def _weights(call: CapturedCall, at: int) -> list[tuple[str | int | None, int, int]]:
    return [] if call.end is None else [(name, at + start, at + end) for name, start, end in call.end.weights]


def _known_logprobs(text: str) -> list[float] | None:
    """Return the log-probabilities of a call if all are known: the forms of others have no place for a missing one."""
    values = unpack_logprobs(text).tolist()
    return values if values and all(value == value for value in values) else None


def history(call: CapturedCall) -> list[JsonObject]:
    """Return the texts of the turns in the prompt of ``call``; none where they were not kept."""
    pieces = [call.start.turns or []]
    node = call
    while node.start.follows and node.base is not None:
        node = node.base
        answer = node.end.turn if node.end is not None else None
        pieces.append([*(node.start.turns or []), *([] if answer is None else [answer])])
    return [turn for piece in reversed(pieces) for turn in piece]


def _text(turn: JsonObject, kind: str) -> str:
    return "".join(part["text"] for part in turn["parts"] if part["type"] == kind)


def _message(turn: JsonObject) -> JsonObject:
    """Return a turn as a message of Chat Completions; the results of tools are one text."""
    text = _text(turn, "text") + _text(turn, "result")
    message: JsonObject = {"role": turn["role"], "content": text}
    if thought := _text(turn, "reasoning"):
        message["reasoning_content"] = thought
    calls = [part for part in turn["parts"] if part["type"] == "call"]
    if calls:
        message["tool_calls"] = [
            {"id": each["id"], "type": "function",
             "function": {"name": each["name"], "arguments": each["arguments"]}}
            for each in calls
        ]  # fmt: skip
    if results := [part["id"] for part in turn["parts"] if part["type"] == "result"]:
        message["tool_call_id"] = results[0]
    return message


_SOURCES = {"system": "system", "developer": "system", "assistant": "agent"}


def _client_steps(turns: Iterable[JsonObject], before: list[JsonObject]) -> list[JsonObject]:
    """Return the client's ``turns`` as steps; results of tools are added to the last step of the agent."""
    steps: list[JsonObject] = []
    for turn in turns:
        results = [part for part in turn["parts"] if part["type"] == "result"]
        asked = before[-1] if before and not steps and before[-1]["source"] == "agent" else None
        if results and asked is not None:
            known = {each["tool_call_id"] for each in asked.get("tool_calls", ())}
            observed = asked.setdefault("observation", {"results": []})["results"]
            observed += [
                {"source_call_id": part["id"] if part["id"] in known else None, "content": part["text"]}
                for part in results
            ]
            continue
        source = _SOURCES.get(turn["role"], "user")
        steps.append({"source": source, "message": _text(turn, "text") + _text(turn, "result")})
    return steps


def _agent_step(call: CapturedCall, masked: str) -> JsonObject:
    start, end = call.start, call.end
    turn: JsonObject = {"parts": []} if end is None or end.turn is None else end.turn
    metrics = {
        "prompt_tokens": call.prompt_length,
        "completion_tokens": len(call.completion),
        "prompt_token_ids": call.prompt.tolist(),
        "completion_token_ids": call.completion.tolist(),
        "cached_tokens": None if end is None else end.cached,
        "logprobs": None if end is None else _known_logprobs(end.logprobs),
        "extra": {"logprobs_are": start.logprobs},
    }
    calls = [
        {
            "tool_call_id": part["id"],
            "function_name": part["name"],
            "arguments": _arguments(part["arguments"]),
        }
        for part in turn["parts"]
        if part["type"] == "call"
    ]
    return {
        "source": "agent",
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(start.at)),
        "model_name": start.model,
        "message": _text(turn, "text"),
        **({"reasoning_content": thought} if (thought := _text(turn, "reasoning")) else {}),
        **({"tool_calls": calls} if calls else {}),
        "metrics": {name: value for name, value in metrics.items() if value is not None},
        "llm_call_count": 1,
        "extra": {"call": call.id, "masked": masked, "finish": "" if end is None else end.finish},
    }


def _arguments(text: str) -> JsonObject:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}
