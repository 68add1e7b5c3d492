"""Promises, each against the plain transformers model:

- tokens at temperature 0 are those of `generate`; behaviour log-probabilities are the full forward's, to rounding;
- the same request gives the same tokens alone, in a full batch, and in an engine with fewer slots;
- after an update every token carries the version whose weights sampled it, across any number of interruptions;
- a request that cannot be served is refused with the field that is wrong; torn weights are never loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from stretto.core.errors import RefusedRequest, TornPublication
from stretto.core.records import Completion, GenerateRequest, Sampling, StopReason
from stretto.engine.native.engine import NativeEngine
from tests.engine.answering import (
    EOS,
    assert_each_token_follows_its_version,
    drain,
    engine_of,
    expected_logprobs,
    finish,
    request,
    shaken,
    weights,
)
from tests.tolerances import EXACT


def test_greedy_answers_are_those_of_transformers_generate(folder: Path, plain: PreTrainedModel) -> None:
    requests = [request(f"p{length}", prompt=length, temperature=0.0) for length in (1, 2, 7, 30, 70)]
    ended = finish(engine_of(folder), *requests)
    generate: Any = plain.generate
    for wanted in requests:
        prompt = torch.tensor([wanted.prompt_token_ids])
        expected = generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=EOS, pad_token_id=0)
        assert list(ended[wanted.id, 0].token_ids) == expected[0, prompt.shape[1] :].tolist()


def test_behavior_logprobs_are_those_of_the_full_forward(folder: Path, plain: PreTrainedModel) -> None:
    requests = [request(f"r{i}", prompt=2 + 5 * i, seeds=range(3), max_tokens=5 + 20 * (i % 4)) for i in range(10)]
    ended = finish(engine_of(folder, max_prefill_tokens=32), *requests)
    assert len(ended) == 30
    for wanted in requests:
        for member in range(3):
            completion = ended[wanted.id, member]
            expected = expected_logprobs({0: plain}, wanted, completion)
            assert np.abs(np.subtract(completion.behavior_logprobs, expected)).max() < EXACT


def test_a_request_has_the_same_tokens_alone_and_in_a_full_batch_and_with_other_slots(folder: Path) -> None:
    requests = [request(f"r{i}", prompt=3 + i, seeds=(i, i + 100)) for i in range(12)]
    together = finish(engine_of(folder, slots=24), *requests)
    squeezed = finish(engine_of(folder, slots=3), *requests)
    alone: dict[tuple[str, int], Completion] = {}
    by_itself = engine_of(folder)
    for wanted in requests:
        alone |= finish(by_itself, wanted)
    assert {key: c.token_ids for key, c in together.items()} == {key: c.token_ids for key, c in alone.items()}
    assert {key: c.token_ids for key, c in together.items()} == {key: c.token_ids for key, c in squeezed.items()}


def test_siblings_differ_by_their_seed_alone(folder: Path) -> None:
    ended = finish(engine_of(folder), request("a", seeds=(5, 6, 5)))
    assert ended["a", 0].token_ids == ended["a", 2].token_ids != ended["a", 1].token_ids


def test_an_answer_ends_with_its_stop_token_or_with_its_budget_or_with_the_context(folder: Path) -> None:
    everything = tuple(range(22))
    ended = finish(
        engine_of(folder),
        request("stop", stop_token_ids=everything),
        request("budget", stop_token_ids=(), max_tokens=7),
        request("context", prompt=185, stop_token_ids=(), max_tokens=50),
    )
    assert (len(ended["stop", 0].token_ids), ended["stop", 0].stop_reason) == (1, StopReason.STOP)
    assert (len(ended["budget", 0].token_ids), ended["budget", 0].stop_reason) == (7, StopReason.LENGTH)
    assert (len(ended["context", 0].token_ids), ended["context", 0].stop_reason) == (192 - 185, StopReason.LENGTH)


def test_a_stop_token_at_the_end_of_the_budget_is_a_stop(folder: Path) -> None:
    ended = finish(engine_of(folder), request("a", stop_token_ids=tuple(range(22)), max_tokens=1))
    assert ended["a", 0].stop_reason is StopReason.STOP


@pytest.mark.parametrize("slots", [4, 16])
def test_after_interruptions_each_token_follows_the_weights_of_its_version(
    folder: Path, plain: PreTrainedModel, slots: int
) -> None:
    models = {0: plain, 3: shaken(plain, 3), 4: shaken(plain, 4), 9: shaken(plain, 9)}
    engine = engine_of(folder, slots=slots, max_prefill_tokens=64)
    requests = [request(f"r{i}", prompt=4 + 3 * i, seeds=(i, i + 50), stop_token_ids=()) for i in range(8)]
    for wanted in requests:
        engine.add(wanted)
    ended: list[Completion] = []
    for version in (3, 4, 9):
        for _ in range(11):
            ended += engine.step()
        engine.update(version, weights(models[version]))
        engine.check_integrity()
    ended += drain(engine).values()
    assert len(ended) == 16
    assert_each_token_follows_its_version(models, requests, ended)
    assert all(completion.interrupted >= len(set(completion.versions)) - 1 for completion in ended)
    assert max(completion.interrupted for completion in ended) >= 2
    health = engine.health()
    assert health.interrupted == sum(completion.interrupted for completion in ended)
    assert health.recomputed > 0


def test_keeping_the_cache_recomputes_nothing_and_still_stamps_the_version(
    folder: Path, plain: PreTrainedModel
) -> None:
    engine = engine_of(folder, on_update="keep")
    engine.add(request("a", stop_token_ids=(), max_tokens=10))
    for _ in range(4):
        engine.step()
    engine.update(1, weights(shaken(plain, 1)))
    completion = drain(engine)["a", 0]
    assert completion.versions == (0,) * 4 + (1,) * 6
    assert completion.interrupted == 1
    assert engine.health().recomputed == 0


def test_an_update_with_equal_weights_changes_no_token(folder: Path, plain: PreTrainedModel) -> None:
    wanted = request("a", seeds=(1, 2, 3))
    undisturbed = finish(engine_of(folder), wanted)
    engine = engine_of(folder)
    engine.add(wanted)
    ended = {
        (c.request, c.member): c for version in range(1, 6) for c in [*engine.step(), *_update(engine, version, plain)]
    }
    ended |= drain(engine)
    assert {key: c.token_ids for key, c in ended.items()} == {key: c.token_ids for key, c in undisturbed.items()}


def _update(engine: NativeEngine, version: int, model: PreTrainedModel) -> list[Completion]:
    engine.update(version, weights(model))
    return []


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
    ended = drain(engine)
    assert sorted(ended) == [("b", 0), ("b", 1), ("b", 2)]
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


def test_counters_add_up(folder: Path) -> None:
    engine = engine_of(folder, slots=16)
    ended = finish(engine, request("a", prompt=9, seeds=range(4)), request("b", prompt=5, seeds=range(2)))
    health = engine.health()
    assert health.generated == sum(len(completion.token_ids) for completion in ended.values())
    assert health.prefilled == 9 + 5  # once per prompt, not once per answer
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
        (request("a", stop_token_ids=(22,)), "sampling.stop_token_ids: token 22; 0 to 21"),
        (request("a", stop_token_ids=(1,) * 257), "sampling.stop_token_ids: 257 tokens; at most 256"),
        (request("a", seeds=(1,) * 65_537), "seeds: 65,537 seeds; at most 65,536 completions to one request"),
        (GenerateRequest(id="a", prompt_token_ids=(), seeds=(1,), sampling=Sampling(max_tokens=1)), "no token"),
        (GenerateRequest(id="a", prompt_token_ids=(2, 22), seeds=(1,), sampling=Sampling(max_tokens=1)), "token 22"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_its_field(
    folder: Path, wrong: GenerateRequest, message: str
) -> None:
    engine = engine_of(folder)
    with pytest.raises(RefusedRequest) as error:
        engine.add(wrong)
    assert message in str(error.value)
    assert engine.idle


def test_broken_weights_are_an_error_and_not_an_answer(folder: Path, plain: PreTrainedModel) -> None:
    engine = engine_of(folder)
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights(plain).items()}
    engine.update(1, broken)
    engine.add(request("a"))
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.step()
