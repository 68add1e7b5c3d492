"""`Trainer.forward_backward` beside plain torch.

- Value and gradient of each loss are those of an independent computation on transformers' own forward, to 1e-5, however
  the data is packed; a function of the user's too.
- Gradients of several calls add up; targets may be other tokens than those of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from tests.verbs.plain import plain_logprobs, plain_model

Term = Callable[[Tensor, Tensor, Tensor], Tensor]
TOLERANCE = 1e-5


def plain(folder: Path, data: Sequence[stretto.Datum], term: Term, aggregation: str) -> tuple[float, dict[str, Tensor]]:
    model, total = plain_model(folder), torch.zeros(())
    for datum in data:
        columns = (torch.tensor(column) for column in (datum.weights, datum.logprobs, datum.advantages))
        weights, behavior, advantages = columns
        kept = weights != 0
        part = term(plain_logprobs(model, datum)[kept], behavior[kept], advantages[kept])
        total = total + (part.mean() / len(data) if aggregation == "sequence_mean" else part.sum())
    if aggregation == "token_mean":
        total = total / sum(len(datum.trained) for datum in data)
    total.backward()  # type: ignore[no-untyped-call]
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def likelihood(now: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    return -now


def ppo(now: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    ratio = (now - behavior).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def importance(now: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    return -(now - behavior).exp() * advantages


def cispo(now: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    return -(now - behavior).exp().clamp(0, 5).detach() * advantages * now


def gspo(now: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    ratio = (now - behavior).mean().exp().detach() * (now - now.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)


def decoupled(now: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    return -(now.detach() - behavior).exp() * (now - now.detach()).exp() * advantages


def own(logprobs: Sequence[Tensor], data: Sequence[stretto.Datum]) -> tuple[Tensor, Mapping[str, float]]:
    parts = [
        (ppo(now, torch.tensor(one.logprobs), torch.tensor(one.advantages)) * torch.tensor(one.weights)).sum()
        for now, one in zip(logprobs, data, strict=True)
    ]
    return torch.stack(parts).sum(), {"sequences": len(parts)}


UNCLIPPED = {"kind": "ppo", "clip_low": 1.0, "clip_high": 1e9}
LOSSES: list[tuple[Any, Term, str]] = [
    ("cross_entropy", likelihood, "token_mean"),
    ("cross_entropy", likelihood, "sum"),
    ("ppo", ppo, "token_mean"),
    (UNCLIPPED, importance, "sum"),
    ({"kind": "cispo", "anchor": "behavior"}, cispo, "token_mean"),
    ({"kind": "gspo", "anchor": "behavior", "clip_low": 0.1, "clip_high": 0.1}, gspo, "sequence_mean"),
    ("decoupled_ppo", decoupled, "token_mean"),
    (own, ppo, "sum"),
]


def gradients(trainer: stretto.Trainer) -> dict[str, Tensor]:
    return {name: p.grad for name, p in trainer._learner.model.named_parameters() if p.grad is not None}


def largest_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Of the numbers of a gradient, beside the largest of them."""
    scale = max(1.0, *(float(one.abs().max()) for one in expected.values()))
    return max(float((found[name] - expected[name]).abs().max()) for name in expected) / scale


@pytest.mark.parametrize("capacity", [4096, 12], ids=["together", "one_by_one"])
@pytest.mark.parametrize(("loss", "term", "aggregation"), LOSSES, ids=str)
def test_a_loss_is_that_of_plain_torch(
    folder: Path, data: list[stretto.Datum], loss: Any, term: Term, aggregation: str, capacity: int
) -> None:
    trainer = stretto.Trainer(folder, micro_batch_tokens=capacity)
    found = trainer.forward_backward(data, loss, aggregation=aggregation)
    value, expected = plain(folder, data, term, aggregation)
    assert found.loss == pytest.approx(value, abs=TOLERANCE)
    made = gradients(trainer)
    assert made.keys() == expected.keys()
    assert largest_error(made, expected) < TOLERANCE
    model = plain_model(folder)
    for datum, logprobs in zip(data, found.logprobs, strict=True):
        assert logprobs == pytest.approx(plain_logprobs(model, datum).tolist(), abs=TOLERANCE)


def test_gradients_of_several_calls_add_up(folder: Path, data: list[stretto.Datum]) -> None:
    whole, parts = stretto.Trainer(folder), stretto.Trainer(folder)
    whole.forward_backward(data, "cross_entropy", aggregation="sum")
    for half in (data[:2], data[2:]):
        parts.forward_backward(half, "cross_entropy", aggregation="sum")
    assert largest_error(gradients(parts), gradients(whole)) < TOLERANCE


def test_targets_may_be_other_tokens_than_those_of_the_sequence(folder: Path) -> None:
    datum = stretto.Datum((2, 3, 4, 5), (9, 9, 5, 7), (1.0, 0.5, 0.0, 2.0))
    trainer, model = stretto.Trainer(folder), plain_model(folder)
    expected = plain_logprobs(model, datum).detach()
    found = trainer.forward_backward([datum], "cross_entropy", aggregation="sum")
    assert found.logprobs[0] == pytest.approx(expected.tolist(), abs=TOLERANCE)
    assert found.loss == pytest.approx(-float((expected * torch.tensor(datum.weights)).sum()), abs=TOLERANCE)


def test_a_proximal_policy_of_before_anchors_later_steps(folder: Path, data: list[stretto.Datum]) -> None:
    trainer = stretto.Trainer(folder, learning_rate=1e-2)
    before = trainer.forward(data)
    trainer.forward_backward(data, "decoupled_ppo")
    trainer.optim_step()
    later = trainer.forward_backward(data, "decoupled_ppo", proximal=before)
    ratios = [
        now - then
        for datum, one, start in zip(data, later.logprobs, before.logprobs, strict=True)
        for at, (now, then) in enumerate(zip(one, start, strict=True))
        if datum.weights[at]
    ]
    assert later.metrics["ratio_mean"] == pytest.approx(float(torch.tensor(ratios).exp().mean()), abs=1e-4)
    assert abs(later.metrics["ratio_mean"] - 1) > 1e-4
