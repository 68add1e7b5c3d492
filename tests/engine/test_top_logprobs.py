"""Promises: a request that asks for them is told the likeliest tokens of each place, of the distribution that was
sampled from, whatever happens to the answer meanwhile; other requests are answered as if nobody had asked.
"""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from stretto.core.errors import RefusedRequest
from stretto.core.records import Segment
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.sampling import Filtered, top_logprobs
from stretto.model.truncation import Truncation
from tests.engine.answering import drain, engine_of, finish, request, shaken, weights
from tests.tolerances import EXACT, LOGITS, rounding

HALF_THIRD = torch.tensor([[0.5, 0.3, 0.2]]).log()


def ranked(counts: list[int], temperature: float, filtered: Filtered | None = None) -> list[list[tuple[int, float]]]:
    rows = len(counts)
    logits = HALF_THIRD.expand(rows, 3)
    found = top_logprobs(logits, np.array(counts), np.full(rows, temperature, np.float32), filtered)
    return [[(token, round(math.exp(logprob), 5)) for token, logprob in row] for row in found]


def test_ranks_by_hand() -> None:
    assert ranked([2, 0, 1], 1.0) == [[(0, 0.5), (1, 0.3)], [], [(0, 0.5)]]
    assert ranked([2], 0.5) == [[(0, round(25 / 38, 5)), (1, round(9 / 38, 5))]]  # squares: 25, 9 and 4 of 38
    assert ranked([2], 0.0) == [[(0, 0.5), (1, 0.3)]]  # those of a greedy completion are at temperature 1
    assert ranked([9], 1.0) == [[(0, 0.5), (1, 0.3), (2, 0.2)]]


def test_tokens_that_a_filter_takes_are_not_among_them() -> None:
    two = Filtered(np.array([1]), Truncation(np.array([2]), np.ones(1), np.zeros(1)))
    assert ranked([3, 3], 1.0, two) == [[(0, 0.5), (1, 0.3), (2, 0.2)], [(0, 0.625), (1, 0.375)]]


def test_they_are_the_full_forwards_through_updates_and_preemption(folder: Path, plain: PreTrainedModel) -> None:
    """A cache for 256 tokens preempts answers; versions of the weights change twice."""
    models = {0: plain, 1: shaken(plain, 1), 2: shaken(plain, 2)}
    engine = engine_of(folder, cache_gib=256 * 256 / 2**30)
    asked = [
        msgspec.structs.replace(
            request(f"r{i}", prompt=4 + 3 * i, seeds=(i, i + 50), stop_token_ids=(), max_tokens=90, temperature=0.8),
            top_logprobs=i,
        )
        for i in range(4)
    ]
    for wanted in asked:
        engine.add(wanted)
    ended = []
    for version in (1, 2):
        for _ in range(12):
            ended += engine.step()
        engine.update(version, weights(models[version]))
    ended += drain(engine).values()
    assert engine.health().preempted > 0
    for completion in ended:
        wanted = asked[int(completion.request[1:])]
        assert len(completion.top_logprobs) == (len(completion.token_ids) if wanted.top_logprobs else 0)
        ids = torch.tensor([[*wanted.prompt_token_ids, *completion.token_ids]])
        with torch.no_grad():
            lines = {v: (model(ids).logits[0] / 0.8).log_softmax(-1) for v, model in models.items()}
        for at, told in enumerate(completion.top_logprobs):
            line = lines[completion.versions[at]][len(wanted.prompt_token_ids) + at - 1]
            values, _ = line.topk(wanted.top_logprobs)
            assert np.abs(np.subtract([logprob for _, logprob in told], values.tolist())).max() < EXACT
            assert all(abs(float(line[token]) - logprob) < EXACT for token, logprob in told)
            sampled = dict(told).get(completion.token_ids[at])
            assert sampled is None or abs(sampled - completion.behavior_logprobs[at]) < rounding(size=LOGITS)


def test_they_keep_to_their_tokens_behind_what_another_engine_sampled(folder: Path) -> None:
    asked = msgspec.structs.replace(request("a", seeds=(1, 2)), top_logprobs=2)
    whole = finish(engine_of(folder), asked)
    begun = whole["a", 0].segment.token_ids[:3]
    prefixes = Segment.of(begun, (-1.0,) * 3, (0,) * 3), Segment()
    found = finish(engine_of(folder), msgspec.structs.replace(asked, prefixes=prefixes))
    assert found["a", 0].top_logprobs[:3] == ((), (), ())
    for member in (0, 1):
        assert len(found["a", member].top_logprobs) == found["a", member].segment.length
        ours, theirs = (np.array(one["a", member].top_logprobs[3:]) for one in (found, whole))
        assert np.abs(ours - theirs).max() < EXACT


def test_who_does_not_ask_is_answered_as_if_nobody_did(folder: Path) -> None:
    first, second = request("a", seeds=(1, 2)), request("b", prompt=5)
    nobody = finish(engine_of(folder), first, second)
    asked = finish(engine_of(folder), first, msgspec.structs.replace(second, top_logprobs=5))
    assert {len(told) for told in asked["b", 0].top_logprobs} == {5}
    silent = {key: msgspec.structs.replace(completion, top_logprobs=()) for key, completion in asked.items()}
    assert silent == nobody
    assert asked["a", 0].top_logprobs == ()


@pytest.mark.parametrize("count", [-1, 21])
def test_a_number_that_is_not_told_is_refused_by_name(engine: NativeEngine, count: int) -> None:
    with pytest.raises(RefusedRequest, match=f"top_logprobs: {count}; 0 to 20"):
        engine.add(msgspec.structs.replace(request("a"), top_logprobs=count))
