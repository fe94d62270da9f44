"""Long sessions on each protocol: every prompt begins with the last one and what was sampled for it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from server.serving import body
from singletree.training.exports import count_trained

from .test_capture import PATHS, ask, capturing, graph_of


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
async def test_a_thousand_turns_do_not_drift(path: str, tmp_path: Path, capsys: Any) -> None:
    """Twenty-five sessions of forty turns: random words, and some reasoning."""
    draw = random.Random(path)
    count = {"continued": 0, "drifted": 0}
    shares = []
    async with capturing(tmp_path) as served:
        for number in range(25):
            sent = body(path, "[[gen:30:1]] go")
            history: list[Any] = sent["input" if path == "/v1/responses" else "messages"]
            if path == "/v1/responses":
                history = sent["input"] = [{"role": "user", "content": history}]
            for _ in range(40):
                answer = json.loads(await ask(served, f"/sessions/s{number}{path}", sent))
                history += _answered(path, answer)
                words = f"[[gen:{draw.randint(1, 60)}:{draw.randint(1, 9)}]]"
                wanted = draw.choice((words, words, "[[script:answer]]"))
                history.append({"role": "user", "content": f"{wanted} {draw.random()}"})
            found = count_trained(await graph_of(served, tmp_path, f"s{number}"))
            shares.append(found["share_in_one_trajectory"])
            for name in count:
                count[name] += found[name]
    with capsys.disabled():
        print(f"\n{path}: {count}, {min(shares):.1%} in one trajectory")
    assert count == {"continued": 25 * 39, "drifted": 0}
    assert min(shares) == 1.0


def _answered(path: str, answer: Any) -> list[Any]:
    """The answer as a client sends it back."""
    if path == "/v1/messages":
        return [{"role": "assistant", "content": answer["content"]}]
    return answer["output"] if path == "/v1/responses" else [answer["choices"][0]["message"]]
