"""Promises: a cache that is too small for its answers costs time and nothing else.

- every answer comes out as it does with a large cache: same tokens, log-probabilities to rounding;
- after an update the tokens that were there keep their version, those that come later have the new one;
- the memory of keys and values stays within the budget, also within a limit that changes between two steps; what can
  never fit is refused before it begins;
- the backlog counts a prompt once, and every sampled token that is to be computed again.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from stretto.core.errors import RefusedRequest
from stretto.core.records import Completion
from stretto.engine.native.engine import NativeEngine
from tests.engine.answering import (
    assert_each_token_follows_its_version,
    drain,
    engine_of,
    finish,
    request,
    shaken,
    weights,
)
from tests.tolerances import EXACT

TOKEN_BYTES = 2 * 2 * 1 * 16 * 4  # keys and values, layers, heads, width, float32


def cache_of(folder: Path, tokens: int, **settings: object) -> NativeEngine:
    return engine_of(folder, cache_gib=tokens * TOKEN_BYTES / 2**30, **settings)


def test_answers_of_a_tiny_cache_are_those_of_a_large_one(folder: Path) -> None:
    requests = [
        request(f"r{i}", prompt=3 + 14 * i, seeds=(i, i + 100), stop_token_ids=(), max_tokens=45 + i) for i in range(5)
    ]
    large = engine_of(folder, slots=16)
    expected = finish(large, *requests)
    assert large.health().preempted == 0
    for tokens, prefill in ((192, 4096), (400, 16)):
        tiny = cache_of(folder, tokens, slots=16, max_prefill_tokens=prefill)
        assert_same_answers(finish(tiny, *requests), expected)
        health = tiny.health()
        assert health.preempted > 0
        assert health.recomputed > 0
        assert (health.interrupted, health.generated) == (0, large.health().generated)


def assert_same_answers(
    ended: Mapping[tuple[str, int], Completion], expected: Mapping[tuple[str, int], Completion]
) -> None:
    assert {key: c.token_ids for key, c in ended.items()} == {key: c.token_ids for key, c in expected.items()}
    for key, completion in ended.items():
        assert np.abs(np.subtract(completion.behavior_logprobs, expected[key].behavior_logprobs)).max() < EXACT


def test_memory_stays_within_the_budget_in_every_step(folder: Path) -> None:
    engine = cache_of(folder, 1000, slots=32)
    for i in range(10):
        engine.add(request(f"r{i}", prompt=1 + 14 * i, seeds=(i, i + 50), stop_token_ids=(), max_tokens=30 + i))
    held = []
    while not engine.idle:
        engine.step()
        engine.check_integrity()
        held.append(engine._policy.bytes_allocated)
    assert 900 * TOKEN_BYTES < max(held) <= 1000 * TOKEN_BYTES


def test_memory_stays_within_a_limit_that_changes_between_any_two_steps(folder: Path) -> None:
    requests = [
        request(f"r{i}", prompt=3 + 9 * i, seeds=(i, i + 50), stop_token_ids=(), max_tokens=80 + i) for i in range(5)
    ]
    expected = finish(engine_of(folder, slots=16), *requests)
    engine, random, ended = cache_of(folder, 600, slots=16), np.random.default_rng(7), list[Completion]()
    for wanted in requests:
        engine.add(wanted)
    for _ in range(200):
        limit = int(random.choice([0, 64, 78, 150, 300, 600])) * TOKEN_BYTES
        if random.random() < 0.2:
            engine.limit(limit)
        ended += engine.step()
        engine.check_integrity()
        assert engine.cache_allocated <= engine._cache_bytes
    engine.limit(600 * TOKEN_BYTES)
    assert_same_answers({(c.request, c.member): c for c in ended} | drain(engine), expected)


def test_tokens_keep_their_version_through_preemption_and_updates(folder: Path, plain: PreTrainedModel) -> None:
    models = {0: plain, 1: shaken(plain, 1), 2: shaken(plain, 2)}
    engine = cache_of(folder, 400, slots=8, max_prefill_tokens=128)
    requests = [
        request(f"r{i}", prompt=4 + 3 * i, seeds=(i, i + 50), stop_token_ids=(), max_tokens=70) for i in range(8)
    ]
    for wanted in requests:
        engine.add(wanted)
    ended: list[Completion] = []
    for version in (1, 2):
        for _ in range(35):
            ended += engine.step()
        engine.update(version, weights(models[version]))
        engine.check_integrity()
    ended += drain(engine).values()
    assert len(ended) == 16
    assert engine.health().preempted > 0
    assert_each_token_follows_its_version(models, requests, ended)


def test_keeping_the_cache_on_updates_does_not_keep_it_from_preemption(folder: Path, plain: PreTrainedModel) -> None:
    requests = [request(f"r{i}", prompt=20, seeds=(i,), stop_token_ids=(), max_tokens=60) for i in range(6)]
    engine = cache_of(folder, 300, on_update="keep")
    for wanted in requests:
        engine.add(wanted)
    for _ in range(20):
        engine.step()
    engine.update(1, weights(plain))
    assert len(drain(engine)) == 6
    assert engine.health().preempted > 0


def test_the_backlog_counts_the_tokens_of_every_interrupted_answer(folder: Path, plain: PreTrainedModel) -> None:
    engine = engine_of(folder)
    engine.add(request("r", prompt=10, seeds=(1, 2, 3), stop_token_ids=(), max_tokens=20))
    assert engine.backlog == 10
    for _ in range(4):
        engine.step()
    assert engine.backlog == 0
    engine.update(1, weights(plain))
    assert engine.backlog == 10 + 3 * 4
    engine.add(request("s", prompt=7))
    assert engine.backlog == 10 + 3 * 4 + 7


def test_aborting_a_preempted_answer_forgets_it(folder: Path) -> None:
    engine = cache_of(folder, 256)
    engine.add(request("a", prompt=50, seeds=range(4), stop_token_ids=(), max_tokens=60))
    while not engine.health().preempted:
        engine.step()
    engine.abort("a")
    engine.check_integrity()
    assert engine.idle
    assert finish(engine, request("b"))


def test_an_answer_that_alone_is_too_long_for_the_cache_is_refused_when_it_is_asked_for(folder: Path) -> None:
    engine = cache_of(folder, 128)
    with pytest.raises(RefusedRequest, match=r"sampling.max_tokens: 129 with the prompt; less: the cache holds 128"):
        engine.add(request("a", prompt=9, max_tokens=120))
    assert engine.idle
    assert finish(engine, request("a", prompt=9, max_tokens=119, stop_token_ids=()))
