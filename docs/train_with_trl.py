"""One GRPO update of a model on sessions that a singletree server captured, with TRL: docs/training.md explains it.

    python docs/train_with_trl.py URL MODEL_FOLDER

It needs trl, torch and transformers, which are no dependencies of singletree, and a server with ``--capture`` and the
same model at URL.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

TURNS = 2
ROLLOUTS = 4


def send(url: str, body: dict[str, Any]) -> Any:
    """Return what the server answers to ``body``, sent by POST."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def harness(base_url: str, task: str) -> float:
    """Work on ``task`` with the model at ``base_url``, and return the reward.

    A real harness is started here instead, such as ``claude -p TASK`` with ANTHROPIC_BASE_URL, or codex with a provider
    of this base URL. Nothing else of it has to change.
    """
    messages = [{"role": "user", "content": task}]
    words: list[str] = []
    for _ in range(TURNS):
        body = {"model": "*", "messages": messages, "max_tokens": 24, "temperature": 1.0}
        answer = send(f"{base_url}/v1/chat/completions", body)["choices"][0]["message"]
        words += (answer["content"] or "").split()
        messages += [answer, {"role": "user", "content": "Say more."}]
    return len({word.lower() for word in words}) / max(1, len(words))  # how few words it repeats


def rollout(url: str, task: str) -> dict[str, Any]:
    """Return one session as TRL takes it: its first trajectory, which has the scored answer."""
    session = send(f"{url}/sessions", {"metadata": {"task": task}})["session_id"]
    reward = harness(f"{url}/sessions/{session}", task)
    send(f"{url}/sessions/{session}/complete", {"reward": reward})
    with urllib.request.urlopen(f"{url}/sessions/{session}/traces?form=trl", timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)[0]
    if found["reward"] is None:
        raise SystemExit(f"the session {session} may lack something: GET {url}/sessions/{session}")
    return found


def main(url: str, model: str) -> None:
    """Make one update and print what TRL reports of it."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        found = [rollout(url, prompt) for prompt in prompts]
        fields = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward")
        return {name: [each[name] for each in found] for name in fields}

    def reward_of(completions: list[str], reward: list[float], **_: Any) -> list[float]:
        return reward

    settings = GRPOConfig(
        output_dir="trained",
        max_steps=1,
        per_device_train_batch_size=ROLLOUTS,
        num_generations=ROLLOUTS,
        max_completion_length=256,
        learning_rate=1e-5,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
    )
    data = Dataset.from_dict({"prompt": ["Name three colors."] * ROLLOUTS})
    trainer = GRPOTrainer(
        model=model, args=settings, train_dataset=data, reward_funcs=reward_of, rollout_func=rollouts
    )
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    changed = sum(not value.equal(before[name]) for name, value in trainer.model.named_parameters())
    print(f"{changed} of {len(before)} tensors changed")
    print(json.dumps(next(row for row in trainer.state.log_history if "loss" in row), indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
