"""Promises: an answer ends with its stop token, its budget or the context; an update stamps what is sampled after it,
and keeps the cache if it is told to; a request that cannot be served is refused with the field that is wrong; torn
weights are never loaded; every token is counted once. Spans are handed out once; those that nobody asks for do not pile
up, and the newest are kept.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from stretto.core.errors import RefusedRequest, TornPublication
from stretto.core.events import MOST_SPANS, BusySpans
from stretto.core.records import GenerateRequest, Sampling, StopReason
from stretto.engine.native.engine import NativeEngine
from tests.engine.answering import drain, engine_of, expected_logprobs, finish, request, shaken, weights
from tests.tolerances import EXACT


def test_an_answer_ends_with_its_stop_token_or_with_its_budget_or_with_the_context(folder: Path) -> None:
    everything = tuple(range(22))
    ended = finish(
        engine_of(folder),
        request("stop", stop_token_ids=everything),
        request("both", stop_token_ids=everything, max_tokens=1),
        request("budget", stop_token_ids=(), max_tokens=7),
        request("context", prompt=185, stop_token_ids=(), max_tokens=50),
        request("last", prompt=191, stop_token_ids=(), max_tokens=8),
    )
    assert (len(ended["stop", 0].token_ids), ended["stop", 0].stop_reason) == (1, StopReason.STOP)
    assert (len(ended["both", 0].token_ids), ended["both", 0].stop_reason) == (1, StopReason.STOP)
    assert (len(ended["budget", 0].token_ids), ended["budget", 0].stop_reason) == (7, StopReason.LENGTH)
    assert (len(ended["context", 0].token_ids), ended["context", 0].stop_reason) == (192 - 185, StopReason.LENGTH)
    assert (len(ended["last", 0].token_ids), ended["last", 0].stop_reason) == (192 - 191, StopReason.LENGTH)


def test_keeping_the_cache_recomputes_nothing_and_stamps_the_version(folder: Path, plain: PreTrainedModel) -> None:
    engine = engine_of(folder, on_update="keep")
    engine.add(request("a", stop_token_ids=(), max_tokens=10))
    for _ in range(4):
        engine.step()
    engine.update(1, weights(shaken(plain, 1)))
    completion = drain(engine)["a", 0]
    assert (completion.versions, completion.interrupted) == ((0,) * 4 + (1,) * 6, 1)
    assert engine.health().recomputed == 0


def test_weights_that_are_not_of_this_model_are_never_loaded(folder: Path, plain: PreTrainedModel) -> None:
    engine = engine_of(folder)
    whole = weights(shaken(plain, 1))
    name = "model.norm.weight"
    lacking = {key: value for key, value in whole.items() if key != name}
    for torn, found in (
        (lacking, "lacks"),
        (whole | {"ghost": torch.zeros(1)}, "unknown"),
        (whole | {name: torch.zeros(3)}, r"model.norm.weight is \(3,\), the model has \(32,\)"),
    ):
        with pytest.raises(TornPublication, match=found):
            engine.update(1, torn)
    assert engine.version == 0
    completion = finish(engine, request("a"))["a", 0]
    expected = expected_logprobs({0: plain}, request("a"), completion)
    assert np.abs(np.subtract(completion.behavior_logprobs, expected)).max() < EXACT


def test_an_older_version_is_refused(folder: Path, plain: PreTrainedModel) -> None:
    engine = engine_of(folder)
    engine.update(5, weights(plain))
    with pytest.raises(RefusedRequest, match="version: 4; at least 5"):
        engine.update(4, weights(plain))


def test_an_aborted_request_leaves_its_rows_and_counts_as_waste(folder: Path) -> None:
    engine = engine_of(folder, slots=4)
    engine.add(request("a", seeds=range(3), stop_token_ids=()))
    engine.add(request("b", seeds=range(3), stop_token_ids=(), max_tokens=5))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    engine.check_integrity()
    assert sorted(drain(engine)) == [("b", 0), ("b", 1), ("b", 2)]
    assert engine.health().wasted == 3 * 3
    assert engine.step() == []


def test_every_sampled_token_is_of_an_answered_an_aborted_or_an_open_request(folder: Path) -> None:
    engine = engine_of(folder, slots=3)
    engine.add(request("a", seeds=range(4), stop_token_ids=(), max_tokens=5))  # the last one waits
    engine.add(request("b", stop_token_ids=(), max_tokens=4))
    answered = 0
    for _ in range(7):
        answered += sum(len(completion.token_ids) for completion in engine.step() if completion.request == "b")
    health = engine.health()
    assert (health.generated, health.unfinished, answered) == (3 * 5 + 2 + 2, 3 * 5 + 2 + 2, 0)
    engine.abort("a")
    health = engine.health()
    assert (health.wasted, health.unfinished) == (3 * 5 + 2, 2)  # three of its answers had ended
    answered += sum(len(completion.token_ids) for completion in drain(engine).values())
    health = engine.health()
    assert (health.wasted, health.unfinished, answered) == (3 * 5 + 2, 0, 4)
    assert health.generated == health.wasted + answered
    assert health.prefilled == 9 + 9 + 9  # once for answers that begin together; the one that had to wait began later
    assert (health.running, health.waiting, health.recomputed, health.updates) == (0, 0, 0, 0)
    assert health.busy_seconds > 0


def test_spans_are_stretches_and_are_handed_out_once(folder: Path, plain: PreTrainedModel) -> None:
    engine = engine_of(folder)
    engine.add(request("a", stop_token_ids=(), max_tokens=12))
    for _ in range(4):
        engine.step()
    engine.update(1, weights(plain))
    drain(engine)
    spans = engine.drain_spans()
    told = [(span.name, span.version) for span in spans]  # a slow machine may cut a stretch in two
    assert list(dict.fromkeys(told)) == [("generate", 0), ("load", 1), ("recompute", 1), ("generate", 1)]
    assert all(span.role == "engine" and span.start <= span.end for span in spans)
    assert engine.drain_spans() == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request("a", prompt=192), "prompt_token_ids: 192 tokens; at most 191"),
        (request("a", seeds=()), "seeds: no seed"),
        (request("a", seeds=(1, -1)), "seeds: -1"),
        (request("a", max_tokens=0), "sampling.max_tokens: 0; at least 1"),
        (request("a", temperature=-0.5), "sampling.temperature: -0.5"),
        (request("a", temperature=float("nan")), "sampling.temperature: nan"),
        (request("a", temperature=float("inf")), "sampling.temperature: inf"),
        (request("a", top_p=float("nan")), "sampling.top_p: nan; greater than 0, at most 1"),
        (request("a", top_p=0.0), "sampling.top_p: 0.0; greater than 0"),
        (request("a", top_p=-0.5), "sampling.top_p: -0.5; greater than 0"),
        (request("a", top_p=1.01), "sampling.top_p: 1.01; greater than 0, at most 1"),
        (request("a", top_k=-1), "sampling.top_k: -1; 0 to 22, the vocabulary"),
        (request("a", top_k=23), "sampling.top_k: 23; 0 to 22, the vocabulary"),
        (request("a", min_p=float("nan")), "sampling.min_p: nan; 0 to 1"),
        (request("a", min_p=-0.1), "sampling.min_p: -0.1; 0 to 1"),
        (request("a", min_p=2.0), "sampling.min_p: 2.0; 0 to 1"),
        (request("a", stop=("",)), "sampling.stop: a text of 0 characters; 1 to 256"),
        (request("a", stop=("7", "a" * 257)), "sampling.stop: a text of 257 characters; 1 to 256"),
        (request("a", stop=("7",) * 100_000), "sampling.stop: 100000 texts; at most 64"),
        (request("a", stop=("7\ufffd",)), "sampling.stop: '7\ufffd'; characters; U+FFFD"),
        (request("a", stop_token_ids=(22,)), "sampling.stop_token_ids: token 22; 0 to 21"),
        (request("a", stop_token_ids=(1,) * 257), "sampling.stop_token_ids: 257 tokens; at most 256"),
        (request("a", seeds=(1,) * 65_537), "seeds: 65,537 seeds; at most 65,536 completions to one request"),
        (GenerateRequest(id="a", prompt_token_ids=(), seeds=(1,), sampling=Sampling(max_tokens=1)), "no token"),
        (GenerateRequest(id="a", prompt_token_ids=(2, 22), seeds=(1,), sampling=Sampling(max_tokens=1)), "token 22"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_its_field(
    engine: NativeEngine, wrong: GenerateRequest, message: str
) -> None:
    with pytest.raises(RefusedRequest) as error:
        engine.add(wrong)
    assert message in str(error.value)
    assert engine.idle


def test_of_spans_that_nobody_asks_for_the_newest_are_kept() -> None:
    stretches = BusySpans("engine-0")
    for version in range(MOST_SPANS + 50):
        stretches.add("generate", float(version), version + 0.5, version)
    assert [span.version for span in stretches.drain()] == list(range(50, MOST_SPANS + 50))
    assert stretches.drain() == []
