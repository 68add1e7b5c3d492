"""`Trainer.forward_backward` beside plain torch.

- Value and gradient of losses are those of an independent computation on transformers' own forward, to 1e-5, however
  the data is packed; a function of the user's too. The equations of all losses are in tests/trainer/test_objectives.py.
- Gradients of several calls add up; targets may be other tokens than those of the sequence, of some data or of all.
- A proximal policy anchors the losses that look at one, and changes nothing of the others.
"""

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import stretto
from tests.tiny_policy import LEARNED, SHORT, build_of_family
from tests.trainer.batches import batch
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
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def likelihood(now: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    return -now


def ppo(now: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    ratio = (now - behavior).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


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


LOSSES: list[tuple[Any, Term, str]] = [
    ("cross_entropy", likelihood, "token_mean"),
    ("cross_entropy", likelihood, "sum"),
    ("ppo", ppo, "token_mean"),
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


@pytest.mark.parametrize(
    ("loss", "term", "aggregation", "capacity"),
    [*((*one, 12) for one in LOSSES), *((*one, 4096) for one in LOSSES[2:4])],
)
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


def test_a_function_sees_all_of_a_batch_whatever_its_name(folder: Path) -> None:
    seen = list[Sequence[stretto.Datum]]()

    def cross_entropy(logprobs: Sequence[Tensor], data: Sequence[stretto.Datum]) -> Tensor:
        seen.append(data)
        return -torch.cat(list(logprobs)).sum()

    def another(logprobs: Sequence[Tensor], data: Sequence[stretto.Datum]) -> Tensor:
        return cross_entropy(logprobs, data)

    for loss in (cross_entropy, another):
        stretto.Trainer(folder).forward_backward(batch(0), loss)
    assert seen[0] == seen[1]
    assert min(min(one.logprobs) for one in seen[0]) < -1 < max(max(one.advantages) for one in seen[0]) != 1


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


@st.composite
def data_of_all_kinds(draw: st.DrawFn) -> list[stretto.Datum]:
    """Data whose targets are the next tokens, others, or three a position; some positions may have no weight."""
    made, tokens = list[stretto.Datum](), st.integers(2, 21)
    for width in draw(st.lists(st.sampled_from([0, 1, 3]), min_size=2, max_size=4)):
        read = draw(st.lists(tokens, min_size=1, max_size=6))
        targets: Any = (*read[1:], draw(tokens))
        if width:
            rows = [draw(st.tuples(*[tokens] * width)) for _ in read]
            targets = tuple(row[0] if width == 1 else row for row in rows)
        weights = tuple(float(draw(st.sampled_from([0, 1, 1]))) for _ in read)
        soft = tuple((weight,) * 3 for weight in weights)
        made.append(stretto.Datum(tuple(read), targets, soft if width == 3 else weights))
    return made


@pytest.fixture(scope="module")
def any_trainer(folder: Path) -> stretto.Trainer:
    return stretto.Trainer(folder)


@settings(max_examples=30, deadline=None)
@given(data=data_of_all_kinds())
def test_every_datum_is_scored_as_it_is_alone_whatever_stands_beside_it(
    any_trainer: stretto.Trainer, data: list[stretto.Datum]
) -> None:
    any_trainer.gradient = [None for _ in any_trainer.gradient]
    together = any_trainer.forward_backward(data, "cross_entropy", aggregation="sum")
    alone = [any_trainer.forward_backward([one], "cross_entropy", aggregation="sum") for one in data]
    assert together.loss == pytest.approx(sum(one.loss for one in alone), rel=TOLERANCE / 10, abs=TOLERANCE)
    for ours, theirs in zip(together.logprobs, alone, strict=True):
        assert ours == pytest.approx(theirs.logprobs[0], abs=TOLERANCE)


def summed(logprobs: Sequence[Tensor], data: Sequence[stretto.Datum]) -> Tensor:
    return -torch.cat(list(logprobs)).sum()


@pytest.mark.parametrize("capacity", [4096, 6], ids=["together", "one_by_one"])
@pytest.mark.parametrize("loss", ["cross_entropy", summed])
def test_a_sequence_may_fill_the_context_of_learned_positions(tmp_path: Path, loss: Any, capacity: int) -> None:
    folder = build_of_family(tmp_path / "opt", "opt", LEARNED, SHORT)
    model, total = plain_model(folder), torch.zeros(())
    data = [stretto.Datum(tuple(range(2, 2 + length)), tuple(range(3, 3 + length))) for length in (16, 15, 3)]
    trainer = stretto.Trainer(folder, micro_batch_tokens=capacity)
    for datum, ours in zip(data, trainer.forward_backward(data, loss, aggregation="sum").logprobs, strict=True):
        theirs = plain_logprobs(model, datum)
        assert ours == pytest.approx(theirs.tolist(), abs=TOLERANCE)
        total = total - theirs.sum()
    total.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert largest_error(gradients(trainer), expected) < TOLERANCE


def soft_data() -> list[stretto.Datum]:
    """Three targets a position, some positions without any weight, one sequence of one token."""
    draw, made = random.Random(7), list[stretto.Datum]()
    for length in (5, 1, 8):
        tokens = tuple(draw.choices(range(2, 22), k=length))
        targets = tuple(tuple(draw.sample(range(2, 22), 3)) for _ in tokens)
        weights = tuple((0.0,) * 3 if at % 3 == 1 else tuple(draw.random() for _ in range(3)) for at in range(length))
        made.append(stretto.Datum(tokens, targets, weights))
    return made


def plain_soft(folder: Path, data: Sequence[stretto.Datum]) -> tuple[float, dict[str, Tensor], list[Tensor], int]:
    """Sum of the weighed cross-entropies, its gradient, the log-probabilities [T, K], positions with a weight."""
    model, total, rows, positions = plain_model(folder), torch.zeros(()), list[Tensor](), 0
    for datum in data:
        weights = torch.tensor(datum.weights)
        logits = model(torch.tensor([datum.token_ids])).logits[0]
        rows.append(logits.log_softmax(-1).gather(1, torch.tensor(datum.targets)))
        total = total - (rows[-1] * weights).sum()
        positions += int((weights != 0).any(1).sum())
    total.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(total.detach()), grads, [row.detach() for row in rows], positions


def soft(logprobs: Sequence[Tensor], data: Sequence[stretto.Datum]) -> Tensor:
    return -sum((now * torch.tensor(one.weights)).sum() for now, one in zip(logprobs, data, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("capacity", [4096, 6], ids=["together", "one_by_one"])
@pytest.mark.parametrize(
    ("loss", "aggregation"), [("cross_entropy", "sum"), ("cross_entropy", "token_mean"), (soft, "sum")]
)
def test_several_targets_of_a_position_are_one_token_with_a_soft_target(
    folder: Path, loss: Any, aggregation: str, capacity: int
) -> None:
    data = soft_data()
    trainer = stretto.Trainer(folder, micro_batch_tokens=capacity)
    value, expected, rows, positions = plain_soft(folder, data)
    scale = 1 / positions if aggregation == "token_mean" else 1.0
    found = trainer.forward_backward(data, loss, aggregation=aggregation)
    assert found.loss == pytest.approx(value * scale, abs=TOLERANCE)
    assert largest_error(gradients(trainer), {name: one * scale for name, one in expected.items()}) < TOLERANCE
    for both in (found, trainer.forward(data)):
        for logprobs, row in zip(both.logprobs, rows, strict=True):
            assert logprobs == pytest.approx(row.flatten().tolist(), abs=TOLERANCE)


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


def test_likelihood_does_not_look_at_a_proximal_policy(folder: Path, data: list[stretto.Datum]) -> None:
    anchored, plain = (stretto.Trainer(folder, learning_rate=1e-1) for _ in range(2))
    before = anchored.forward(data)
    for trainer in (anchored, plain):
        trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step()
    found = anchored.forward_backward(data, "cross_entropy", proximal=before)
    expected = plain.forward_backward(data, "cross_entropy")
    assert before.logprobs != found.logprobs == expected.logprobs
    assert found.loss == expected.loss
    assert largest_error(gradients(anchored), gradients(plain)) == 0.0


def test_completions_are_as_long_as_an_engines_unless_it_is_said(folder: Path, data: list[stretto.Datum]) -> None:
    longest = inspect.signature(stretto.Engine.generate).parameters["max_tokens"].default
    silent = stretto.Trainer(folder)
    told, doubled = (stretto.Trainer(folder, sampling={"max_tokens": most}) for most in (longest, 2 * longest))
    losses = [one.forward_backward(data, "ppo", aggregation="fixed_length").loss for one in (silent, told, doubled)]
    assert losses[0] == losses[1] == pytest.approx(2 * losses[2], rel=1e-6) != 0
