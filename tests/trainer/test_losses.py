"""Promises: each correction by hand; without bounds all of them are the plain weight; where the anchor is the policy
that sampled none of them does anything; a masked weight may be infinite.

Of the loss that they are part of: equation 5 by hand; PPO is its special case; weight and anchor have no gradient; a
token that a correction takes out stays in the mean; what is added is added; micro-batches add up to the minibatch.
"""

import math
from dataclasses import replace
from functools import partial
from itertools import cycle, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto.trainer.objective import corrections, decoupled_ppo, kl, surrogates
from stretto.trainer.objective.corrections import Correction
from stretto.trainer.objective.losses import DIAGNOSTICS, Objective, evaluate
from stretto.trainer.objective.tokens import LossTokens, Sequences
from tests.tolerances import FEW, assert_close, near
from tests.trainer.packed_tokens import logs, tokens
from tests.trainer.test_surrogates import ALL

LOGS = st.lists(st.tuples(st.floats(-4, -0.01), st.floats(-4, -0.01)), min_size=1, max_size=8)


def pair(anchor: Tensor, behavior: Tensor, lengths: list[int] | None = None) -> LossTokens:
    return tokens([1.0] * len(anchor), anchor, behavior=behavior, lengths=lengths)


def test_a_mask_by_hand() -> None:
    given = pair(logs(0.4, 0.1, 0.9, 0.3), logs(0.2, 0.5, 0.1, 0.2))  # w = 2, 0.2, 9, 1.5
    weights = corrections.mask(given, low=0.5, high=5.0)
    assert weights.weight.tolist() == near([2.0, 0.0, 0.0, 1.5])
    assert weights.corrected.tolist() == [False, True, True, False]
    assert corrections.mask(given, low=0.0, high=5.0).weight.tolist() == near([2.0, 0.2, 0.0, 1.5])


def test_an_infinite_weight_is_masked_too() -> None:
    weights = corrections.mask(pair(torch.tensor([-0.1]), torch.tensor([-400.0])), low=0.0, high=5.0)
    assert weights.weight.tolist() == [0.0]


def test_a_truncation_by_hand() -> None:
    weights = corrections.truncate(pair(logs(0.4, 0.1, 0.9), logs(0.2, 0.5, 0.1)), high=2.5)
    assert weights.weight.tolist() == near([2.0, 0.2, 2.5])
    assert weights.corrected.tolist() == [False, False, True]


def test_without_a_correction_every_weight_is_one() -> None:
    weights = corrections.uncorrected(pair(logs(0.4, 0.2), logs(0.2, 0.2)))  # w = 2, 1
    assert weights.weight.tolist() == [1.0, 1.0]
    assert weights.corrected.tolist() == [True, False]


def test_kpop_by_hand() -> None:
    # rare: p = 0.002, q = 0.001, twice as likely: D(p||q) = 0.002 ln 2 + 0.998 ln(0.998 / 0.999) = 0.0004
    # likely: p = 0.99, q = 0.5, twice as likely too: D(q||p) = 0.5 ln(0.5 / 0.99) + 0.5 ln(0.5 / 0.01) = 1.6
    given = pair(logs(0.002, 0.99), logs(0.001, 0.5))
    assert corrections.kpop(given, threshold=0.1).weight.tolist() == near([2.0, 0.0])
    forward = 0.99 * math.log(0.99 / 0.5) + 0.01 * math.log(0.01 / 0.5)
    backward = 0.5 * math.log(0.5 / 0.99) + 0.5 * math.log(0.5 / 0.01)
    assert forward < backward
    assert corrections.kpop(given, threshold=backward + 1e-3).weight.tolist() == near([2.0, 1.98])
    assert corrections.kpop(given, threshold=backward - 1e-3).corrected.tolist() == [False, True]
    # the divergence the other way round counts as much
    assert corrections.kpop(pair(logs(0.5), logs(0.99)), threshold=backward - 1e-3).corrected.tolist() == [True]


def test_kpop_bears_tokens_that_are_certain() -> None:
    weights = corrections.kpop(pair(torch.tensor([0.0, 0.0]), torch.tensor([0.0, -50.0])), threshold=0.1)
    assert weights.weight.tolist() == [1.0, 0.0]


def test_a_sequence_mask_by_hand() -> None:
    # answer 1: w = 4 and 0.25, geometric mean 1: stays; answer 2: w = 2 and 1.125, geometric mean 1.5: leaves
    given = pair(logs(0.8, 0.1, 0.4, 0.45), logs(0.2, 0.4, 0.2, 0.4), lengths=[2, 2])
    weights = corrections.sequence_mask(given, low=0.8, high=1.4)
    assert weights.weight.tolist() == near([4.0, 0.25, 0.0, 0.0])
    assert weights.corrected.tolist() == [False, False, True, True]
    assert corrections.sequence_mask(given, low=0.8, high=1.6).corrected.tolist() == [False] * 4
    assert corrections.sequence_mask(given, low=0.999, high=1.6).corrected.tolist() == [False] * 4


WIDE: dict[str, Correction] = {
    "mask": partial(corrections.mask, low=0.0, high=math.inf),
    "truncate": partial(corrections.truncate, high=math.inf),
    "kpop": partial(corrections.kpop, threshold=math.inf),
    "sequence_mask": partial(corrections.sequence_mask, low=0.0, high=math.inf),
}
NARROW: dict[str, Correction] = {
    "none": corrections.uncorrected,
    "mask": partial(corrections.mask, low=0.999, high=1.001),
    "truncate": partial(corrections.truncate, high=1.001),
    "kpop": partial(corrections.kpop, threshold=1e-6),
    "sequence_mask": partial(corrections.sequence_mask, low=0.999, high=1.001),
}


@pytest.mark.parametrize("name", WIDE)
@given(rows=LOGS)
def test_without_bounds_it_is_the_plain_weight(name: str, rows: list[tuple[float, float]]) -> None:
    anchor, behavior = (torch.tensor(column) for column in zip(*rows, strict=True))
    weights = WIDE[name](pair(anchor, behavior))
    assert torch.equal(weights.weight, (anchor - behavior).exp())
    assert not weights.corrected.any()


@pytest.mark.parametrize("name", NARROW)
@given(rows=LOGS)
def test_where_the_anchor_sampled_there_is_nothing_to_correct(name: str, rows: list[tuple[float, float]]) -> None:
    anchor = torch.tensor([row[0] for row in rows])
    weights = NARROW[name](pair(anchor, anchor))
    assert weights.weight.tolist() == [1.0] * len(rows)
    assert not weights.corrected.any()


DECOUPLED = Objective(
    surrogate=partial(decoupled_ppo.ppo, clip_low=0.2, clip_high=0.2),
    correction=partial(corrections.mask, low=0.0, high=math.inf),
)
ROWS = st.lists(st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.floats(-3, 3)), min_size=1, max_size=8)

SIZE = 3 * math.exp(4)  # of the largest term of `ROWS`: an advantage and a ratio


def diagnostics(sums: torch.Tensor) -> dict[str, float]:
    return dict(zip(DIAGNOSTICS, sums.tolist(), strict=True))


def test_equation_5_by_hand() -> None:
    # token 1: w = 0.4 / 0.2 = 2, u = 0.5 / 0.4 = 1.25, A = 1:  min(1.25, 1.2) * 2 = 2.4, clipped
    # token 2: w = 0.1 / 0.2 = 0.5, u = 0.2 / 0.1 = 2, A = -3: min(-6, -3.6) * 0.5 = -3.0, not clipped
    given = tokens([1.0, -3.0], logs(0.4, 0.1), behavior=logs(0.2, 0.2), scale=0.25)
    loss = evaluate(DECOUPLED, logs(0.5, 0.2), given)
    assert loss.value.item() == near(-(2.4 - 3.0) / 4)
    assert loss.kl_reference is None
    seen = diagnostics(loss.sums)
    assert (seen["clipped"], seen["capped"], seen["ratio"]) == (1, 0, near(3.25))
    assert seen["behavior_weight"] == near(2.5)
    # x = policy / behavior = 2.5 and 1: (1.5 - ln 2.5) + 0
    assert seen["kl_behavior"] == near(1.5 - math.log(2.5))
    assert seen["outlier"] == 1  # 2.5 is outside of [1/2, 2]
    assert (seen["weight"], seen["square"]) == (near(3.5), near(7.25))  # (3.5)^2 / (2 * 7.25): 84 % of two tokens


def test_a_masked_token_leaves_the_objective_and_stays_in_the_mean() -> None:
    objective = replace(DECOUPLED, correction=partial(corrections.mask, low=0.0, high=1.5))
    policy = logs(0.4, 0.3).requires_grad_()
    loss = evaluate(objective, policy, tokens([1.0, 1.0], logs(0.4, 0.3), behavior=logs(0.2, 0.3), scale=0.5))
    loss.value.backward()
    assert loss.value.item() == near(-1 / 2)
    assert diagnostics(loss.sums)["capped"] == 1
    assert policy.grad is not None
    assert policy.grad.tolist() == near([0.0, -0.5])


def test_a_masked_token_has_no_gradient_where_the_ratio_is_an_answers() -> None:
    gspo = partial(surrogates.gspo, clip_low=0.2, clip_high=0.2)
    objective = Objective(gspo, partial(corrections.mask, low=0.0, high=1.5))
    policy = logs(0.4, 0.3).requires_grad_()
    evaluate(
        objective, policy, tokens([1.0, -1.0], logs(0.4, 0.3), behavior=logs(0.2, 0.3), scale=0.5)
    ).value.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.0, 0.5]


@pytest.mark.parametrize(
    ("surrogate", "correction", "estimator"),
    [(*pair, one) for pair, one in zip(product(ALL, WIDE), cycle([kl.k1, kl.k2, kl.k3]), strict=False)],
)
def test_probabilities_e120_apart_make_finite_losses(surrogate: str, correction: str, estimator: kl.Divergence) -> None:
    """Of policy, anchor, and the policies that sampled and are referred to: each alone far from the rest, both ways."""
    near, far = torch.full((2,), -0.5), torch.full((2,), -120.5)
    cases = [
        [far if place == odd else near for place in range(4)]
        if low
        else [near if place == odd else far for place in range(4)]
        for odd in range(4)
        for low in (True, False)
    ]
    policy, anchor, behavior, reference = [torch.cat(column) for column in zip(*cases, strict=True)]
    scores = [1.0, -1.0] * len(cases)
    objective = Objective(ALL[surrogate], WIDE[correction], divergence=estimator, divergence_weight=0.1)
    for lengths in ([2] * len(cases), [1] * len(scores)):
        leaf = policy.clone().requires_grad_()
        given = tokens(
            scores, anchor, behavior=behavior, lengths=lengths, kept=[True] * len(scores), reference=reference
        )
        loss = evaluate(objective, leaf, given)
        loss.value.backward()
        assert leaf.grad is not None
        assert all(seen.isfinite().all() for seen in (loss.value, loss.sums, leaf.grad))


def with_nan(count: int) -> torch.Tensor:
    """The first of `count` is a NaN; from 16 on, torch computes several at once."""
    return torch.tensor([math.nan, *[-0.5] * (count - 1)])


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("correction", WIDE)
@pytest.mark.parametrize("surrogate", ALL)
def test_what_is_not_a_number_is_not_one_in_the_gradient(surrogate: str, correction: str, count: int) -> None:
    """So the optimizer step is not taken, and its trajectories are named."""
    policy = torch.full((count,), -0.5).requires_grad_()
    given = tokens([-1.0] * count, policy.detach(), behavior=with_nan(count), kept=[True] * count)
    evaluate(Objective(ALL[surrogate], WIDE[correction]), policy, given).value.backward()
    assert policy.grad is not None
    assert policy.grad[0].isnan()


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("surrogate", sorted(ALL.keys() - {"policy_gradient"}))
def test_an_anchor_that_is_not_a_number_is_noticed_too(surrogate: str, count: int) -> None:
    policy = torch.full((count,), -0.5).requires_grad_()
    given = tokens([-1.0] * count, with_nan(count), kept=[True] * count)
    ALL[surrogate](policy, given).objective.sum().backward()
    assert policy.grad is not None
    assert policy.grad[0].isnan()


def test_a_clipped_token_has_no_gradient_however_far_it_is() -> None:
    for surrogate in (ALL["ppo"], ALL["dual_clip"]):
        policy = torch.tensor([-0.5]).requires_grad_()
        evaluate(Objective(surrogate, WIDE["mask"]), policy, tokens([1.0], torch.tensor([-120.5]))).value.backward()
        assert policy.grad == torch.tensor([0.0])


def test_the_gradient_on_the_anchor_is_the_weighted_advantage() -> None:
    # u = 1 exactly: d(w u A)/d(log policy) = w A, here w = 2 and 0.5
    policy = logs(0.4, 0.1).requires_grad_()
    evaluate(DECOUPLED, policy, tokens([1.0, -3.0], policy.detach(), behavior=logs(0.2, 0.2))).value.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == near([-2.0, 1.5])


@given(ROWS)
def test_with_the_anchor_at_the_policy_that_sampled_it_is_ppo(rows: list[tuple[float, float, float]]) -> None:
    policy, behavior, scores = (torch.tensor(column) for column in zip(*rows, strict=True))
    loss = evaluate(DECOUPLED, policy, tokens(scores.tolist(), behavior, scale=1 / 3))
    ratio = (policy - behavior).exp()
    expected = -torch.minimum(ratio * scores, ratio.clamp(0.8, 1.2) * scores).sum() / 3
    assert_close(loss.value, expected, FEW + len(rows), size=SIZE)
    assert diagnostics(loss.sums)["behavior_weight"] == len(rows)


@given(ROWS)
def test_m2po_is_the_same_loss_around_any_anchor(rows: list[tuple[float, float, float]]) -> None:
    """Without a clip w u is policy / behavior, whatever lies between."""
    policy, behavior, scores = (torch.tensor(column) for column in zip(*rows, strict=True))
    objective = replace(DECOUPLED, surrogate=surrogates.m2po)
    kept, between = [True] * len(rows), (policy + behavior) / 2
    one = evaluate(objective, policy, tokens(scores.tolist(), behavior, kept=kept))
    other = evaluate(objective, policy, tokens(scores.tolist(), between, behavior=behavior, kept=kept))
    assert_close(one.value, other.value, FEW + len(rows), size=len(rows) * SIZE)


def test_a_divergence_and_an_entropy_are_averaged_like_the_rest() -> None:
    objective = replace(DECOUPLED, divergence=kl.k2, divergence_weight=10.0, entropy_bonus=4.0)
    given = tokens([0.0, 0.0], logs(0.5, 0.5), reference=logs(0.25, 0.5), scale=0.5)
    entropy = torch.tensor([0.3, 0.1])
    loss = evaluate(objective, logs(0.5, 0.5), given, entropy)
    half = math.log(2) ** 2 / 2
    assert loss.value.item() == near(10 * half / 2 - 4 * 0.4 / 2)
    assert loss.kl_reference is not None
    assert loss.kl_reference.item() == near(half)


def part_of(whole: LossTokens, rows: slice) -> LossTokens:
    scale, anchor = whole.scale[rows], whole.anchor_logprobs[rows]
    return LossTokens(
        anchor, anchor, whole.advantages[rows], scale, Sequences.of(torch.ones(len(scale), dtype=torch.int64))
    )


@given(ROWS, st.integers(0, 8))
def test_the_parts_of_a_minibatch_add_up(rows: list[tuple[float, float, float]], cut: int) -> None:
    policy, behavior, scores = (torch.tensor(column) for column in zip(*rows, strict=True))
    whole = tokens(scores.tolist(), behavior, scale=1 / len(rows))
    together = evaluate(DECOUPLED, policy, whole)
    one, other = (evaluate(DECOUPLED, policy[s], part_of(whole, s)) for s in (slice(None, cut), slice(cut, None)))
    assert_close(together.value, one.value + other.value, FEW + len(rows), size=SIZE)
    assert_close(together.sums, one.sums + other.sums, FEW + len(rows))
