"""The policies: each mode, and how the KV-aware one weighs caches against load."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import get_args

import pytest

from engines.routing_jobs import job, now, recorded, workers
from singletree.engines.engine import Chunk, GenerationJob
from singletree.engines.workers import RouterMode, RoutingOptions, Worker
from singletree.errors import BadConfiguration
from singletree.pictures import PromptPicture
from singletree.routing.kv_policy import KvAwarePolicy, make_kv_policy
from singletree.routing.policy import (
    LOAD_POLICIES,
    Choice,
    MakePolicy,
    RoutingPolicy,
    tokens_to_hold,
    tokens_to_prefill,
)


def make_policy(mode: RouterMode, options: RoutingOptions | None = None) -> RoutingPolicy:
    make: MakePolicy = LOAD_POLICIES.get(mode) or make_kv_policy
    return make(options or RoutingOptions())


def turn(
    policy: RoutingPolicy,
    asked: GenerationJob,
    pool: list[Worker],
    cached: int | None = None,
    *generated: int,
) -> Choice:
    """A whole generation, as the pool reports it."""
    choice = now(policy.choose(asked, pool))
    policy.sent(asked, choice)
    policy.prompt_read(asked, choice, Chunk([1], cached_tokens=cached))
    policy.ended(asked, choice, generated)
    return choice


@pytest.mark.parametrize("mode", get_args(RouterMode))
def test_every_mode_chooses_among_the_engines_that_are_up(mode: RouterMode) -> None:
    pool = workers(4)
    policy = make_policy(mode, RoutingOptions(model="m", random=Random(1)))
    now(policy.start(pool))
    chosen = {turn(policy, job([n] * 64, f"s{n}"), pool[1:3]).worker for n in range(40)}
    assert chosen == set(pool[1:3])
    policy.worker_lost(pool[1])
    assert turn(policy, job([1] * 64, "s1"), pool[2:3]).reason
    now(policy.close())
    now(policy.close())


def test_turns_go_round() -> None:
    pool = workers(3)
    policy = make_policy("round-robin")
    assert [turn(policy, job([1]), pool).worker for _ in range(6)] == pool * 2


@pytest.mark.parametrize(("mode", "share"), [("least-loaded", 1.0), ("power-of-two", 0.5)])
def test_the_less_loaded_engines_are_chosen_more_often(mode: RouterMode, share: float) -> None:
    pool = workers(4)
    pool[1].load.generations = pool[2].load.generations = pool[3].load.generations = 2
    policy = make_policy(mode, RoutingOptions(random=Random(1)))
    counts = Counter(turn(policy, job([1]), pool).worker.name for _ in range(200))
    assert counts[pool[0].name] / 200 >= share * 0.8
    if mode == "power-of-two":
        pool[3].load.generations = 3
        assert pool[3].name not in {turn(policy, job([1]), pool).worker.name for _ in range(100)}


def test_expected_tokens_are_load_up_to_the_limit() -> None:
    assert tokens_to_hold(job([1] * 10)) == 10
    assert tokens_to_hold(job([1] * 10, expected_tokens=50)) == 60
    assert tokens_to_hold(job([1] * 10, expected_tokens=5000)) == 110
    assert [tokens_to_prefill(job([1] * 10), cached) for cached in (None, 4, 99)] == [10, 6, 0]


def test_a_session_stays_where_its_prompt_is_cached() -> None:
    pool, policy = workers(8), KvAwarePolicy("m")
    prompt = [7] * 4000
    first = turn(policy, job(prompt, "s"), pool, 0, *range(100))
    assert first.predicted_cached_tokens == 0
    for _ in range(3):
        prompt = [*prompt, *range(100), *[3] * 500]
        choice = turn(policy, job(prompt, "s"), pool, None, *range(100))
        assert choice.worker is first.worker
        assert choice.predicted_cached_tokens is not None
        assert len(prompt) - 600 <= choice.predicted_cached_tokens + 16 <= len(prompt)
        assert "tokens cached" in choice.reason


def test_load_outweighs_the_cache_when_it_costs_more() -> None:
    pool, policy = workers(2), KvAwarePolicy("m")
    prompt = [7] * 4000
    home = turn(policy, job(prompt, "s"), pool).worker
    (other,) = (each for each in pool if each is not home)
    home.load.prefill_tokens = 3000
    assert now(policy.choose(job(prompt, "s"), pool)).worker is home
    home.load.prefill_tokens = 5000
    choice = now(policy.choose(job(prompt, "s"), pool))
    assert choice.worker is other
    assert "another has" in choice.reason


def test_an_engine_whose_cache_is_full_of_running_generations_is_avoided() -> None:
    pool = workers(2, kv_cache_tokens=10_000)
    policy = KvAwarePolicy("m")
    now(policy.start(pool))
    prompt = [7] * 4000
    home = turn(policy, job(prompt, "s"), pool).worker
    home.load.decode_tokens = 9000
    assert now(policy.choose(job([*prompt, 1], "s"), pool)).worker is not home


def test_replicas_choose_alike_without_shared_state() -> None:
    pool = workers(10)
    one, other = KvAwarePolicy("m"), KvAwarePolicy("m")
    for n in range(50):
        turn(other, job([n + 1000] * 400, f"another-{n}"), pool)
    homes = [now(one.choose(job([5] * 200, f"s{n}"), pool)).worker for n in range(100)]
    assert [now(other.choose(job([5] * 200, f"s{n}"), pool)).worker for n in range(100)] == homes
    assert len(set(homes)) == 10, "sessions spread over all engines"
    without = [now(one.choose(job([5] * 200, f"s{n}"), pool[1:])).worker for n in range(100)]
    moved = [n for n in range(100) if without[n] is not homes[n]]
    assert all(homes[n] is pool[0] for n in moved), "an engine that goes away moves only its own sessions"


def test_a_small_overlap_does_not_decide() -> None:
    pool, policy = workers(4), KvAwarePolicy("m")
    system = [9] * 160
    turn(policy, job([*system, *[1] * 4000], "s"), pool)
    chosen = {turn(policy, job([*system, *[n + 2] * 4000], f"s{n}"), pool).worker for n in range(30)}
    assert chosen == set(pool)


def test_a_tenant_is_not_sent_to_the_cache_of_another() -> None:
    pool, policy = workers(2), KvAwarePolicy("m")
    prompt = [7] * 4000
    turn(policy, job(prompt, "s", cache_salt="one"), pool)
    assert now(policy.choose(job(prompt, "s", cache_salt="two"), pool)).predicted_cached_tokens == 0
    assert now(policy.choose(job(prompt, "s", cache_salt="one"), pool)).predicted_cached_tokens == 3984


def test_an_engine_that_lost_its_cache_is_not_believed_to_have_it() -> None:
    pool, policy = workers(2), KvAwarePolicy("m")
    prompt = [7] * 4000
    home = turn(policy, job(prompt, "s"), pool).worker
    policy.worker_lost(home)
    assert now(policy.choose(job(prompt, "s"), pool)).predicted_cached_tokens == 0
    assert len(policy.index) == 0


def test_a_prompt_that_was_never_read_is_not_cached() -> None:
    pool, policy = workers(2), KvAwarePolicy("m")
    asked = job([7] * 4000, "s")
    choice = now(policy.choose(asked, pool))
    policy.sent(asked, choice)
    policy.ended(asked, choice, [])
    assert now(policy.choose(asked, pool)).predicted_cached_tokens == 0


def test_what_the_engine_reports_corrects_the_prediction() -> None:
    pool, policy = workers(1), KvAwarePolicy("m")
    for n in range(6):
        turn(policy, job([n + 1] * 1600, f"s{n}"), pool, 0)
    cache = policy.cache_of(pool[0]).predicted
    assert turn(policy, job([3] * 1600, "s2"), pool, 0).predicted_cached_tokens == 1584
    assert cache.blocks < 600
    for n in (0, 1):
        assert now(policy.choose(job([n + 1] * 1600, f"s{n}"), pool)).predicted_cached_tokens == 0


def test_vllm_counts_at_the_end_and_only_once() -> None:
    pool, policy = workers(1), KvAwarePolicy("m")
    turn(policy, job([8] * 1600, "old"), pool, 0)
    turn(policy, job([9] * 1600, "s"), pool, 0)
    asked = job([9] * 1600, "s")
    choice = now(policy.choose(asked, pool))
    policy.sent(asked, choice)
    policy.prompt_read(asked, choice, Chunk([1]))
    assert policy.cache_of(pool[0]).predicted.blocks == 200
    policy.prompt_read(asked, choice, Chunk([], "stop", cached_tokens=0))
    assert policy.cache_of(pool[0]).predicted.blocks == 100, "what is older is gone, too"
    policy.ended(asked, choice, [1])


def test_pictures_are_learned_from_the_answer() -> None:
    pool, policy = workers(1), KvAwarePolicy("m")
    asked = job([7] * 64, "s", pictures=(PromptPicture(10, 7, "ab" * 32, "image/png", b""),))
    choice = now(policy.choose(asked, pool))
    policy.sent(asked, choice)
    policy.prompt_read(asked, choice, Chunk([1], cached_tokens=0, picture_tokens=[100]))
    policy.ended(asked, choice, [])
    turn(policy, asked, pool)
    assert now(policy.choose(asked, pool)).predicted_cached_tokens == 160


@pytest.mark.parametrize(
    ("engine", "salt"), [("vllm", "tenant"), ("sglang", "tenant"), ("vllm", ""), ("sglang", "")]
)
def test_events_and_prediction_together_know_every_prompt(engine: str, salt: str) -> None:
    """SGLang publishes salted blocks without their salt: for those, the prediction counts."""
    pool, policy = workers(2), KvAwarePolicy("m")
    stream = policy.follow(pool[0], can_replay=True).stream
    assert stream is not None
    recording = recorded(engine)
    first = int.from_bytes(recording["steps"][0]["frames"][0][-2], "big")
    for frames in recording["replay"][:-1]:
        if int.from_bytes(frames[-2], "big", signed=True) < first:
            stream.replayed(frames)
    stream.replayed([b"", b"", (-1).to_bytes(8, "big", signed=True), b""])
    known = 0
    for step in recording["steps"][:6]:
        if step["salt"] == salt:
            asked = job(step["prompt"], "s", cache_salt=salt)
            choice = turn(policy, asked, pool[:1], step["cached"], *step["generated"])
            assert choice.predicted_cached_tokens == step["cached"]
            known += step["cached"] > 0
        for frames in step["frames"]:
            stream.feed(frames)
    assert stream.synced
    assert known


def test_endpoints_must_fit_the_engines() -> None:
    policy = KvAwarePolicy(kv_events=("tcp://a:1",))
    with pytest.raises(BadConfiguration, match=r"--kv-events has 1 endpoints for 2 engines"):
        now(policy.start(workers(2)))
