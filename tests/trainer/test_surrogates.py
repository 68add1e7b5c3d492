"""Promises: each surrogate by hand, value and gradient; each has the policy gradient on the anchor. A-3PO's
interpolation lies between the two policies. M2PO's choice is the largest within the threshold; tokens that are pulled
back towards the anchor stay; the order of the tokens, hence the packing, makes no difference."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto.trainer.objective import decoupled_ppo, surrogates
from stretto.trainer.objective.decoupled_ppo import interpolated
from stretto.trainer.objective.surrogates import Surrogate, m2po_mask
from stretto.trainer.objective.tokens import LossTokens
from tests.tolerances import FEW, near, rounding
from tests.trainer.packed_tokens import logs, tokens

PPO: Surrogate = partial(decoupled_ppo.ppo, clip_low=0.2, clip_high=0.2)
ALL: dict[str, Surrogate] = {
    "ppo": PPO,
    "dual_clip": partial(surrogates.dual_clip, clip_low=0.2, clip_high=0.2, clip_negative=3.0),
    "gspo": partial(surrogates.gspo, clip_low=0.2, clip_high=0.2),
    "cispo": partial(surrogates.cispo, clip_low=1.0, clip_high=4.0),
    "sapo": partial(surrogates.sapo, positive=1.0, negative=1.05),
    "topr": surrogates.topr,
    "m2po": surrogates.m2po,
    "dro": partial(surrogates.dro, beta=0.05),
    "policy_gradient": surrogates.policy_gradient,
}
ROWS = st.lists(st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.floats(-3, 3)), min_size=1, max_size=8)


def gradient(surrogate: Surrogate, policy: Tensor, given: LossTokens) -> list[float]:
    policy = policy.detach().requires_grad_()
    surrogate(policy, given).objective.sum().backward()
    assert policy.grad is not None
    return policy.grad.tolist()


def columns(rows: list[tuple[float, float, float]]) -> tuple[Tensor, Tensor, list[float]]:
    policy, anchor, scores = zip(*rows, strict=True)
    return torch.tensor(policy), torch.tensor(anchor), list(scores)


MEAN, SIGMOID, TWO, QUARTER = math.sqrt(1.1), 1 / (1 + math.exp(-2)), math.log(2), math.log(0.25)
#: Surrogate, policy, tokens, and by hand: the objective, its gradient, the ratio, and which tokens are bounded.
BY_HAND: list[tuple[Surrogate, Tensor, LossTokens, list[float], list[float], list[float] | None, list[bool] | None]] = [
    # u = 1.25 and 2, A = 1 and -3: min(1.25, 1.2) is clipped, min(-6, -3.6) is not; d(u A) / d log policy = u A
    (PPO, logs(0.5, 0.2), tokens([1, -3], logs(0.4, 0.1)), [1.2, -6.0], [0.0, -6.0], [1.25, 2.0], [True, False]),
    # two bounds: u = 1.8 is clipped to 1.5; u = 0.6 to 0.9: min(-0.6, -0.9)
    (partial(decoupled_ppo.ppo, clip_low=0.1, clip_high=0.5), logs(0.9, 0.3), tokens([1, -1], logs(0.5, 0.5)),
     [1.5, -0.9], [0.0, 0.0], [1.8, 0.6], [True, True]),
    # A = -2: u = 4 gives -8, below 3 * -2; u = 2.5 gives -5, above it; A = 2, u = 4 is clipped to 1.2 as ever
    (ALL["dual_clip"], logs(0.8, 0.5, 0.8), tokens([-2, -2, 2], logs(0.2, 0.2, 0.2)),
     [-6.0, -5.0, 2.4], [0.0, -5.0, 0.0], [4.0, 2.5, 4.0], [True, False, True]),
    # answer 1: u = 4 and 1, geometric mean 2, A = 1 clipped to 1.2; answer 2: u = 0.5, A = -1: min(-0.5, -0.8)
    (ALL["gspo"], logs(0.8, 0.5, 0.2), tokens([1, 1, -1], logs(0.2, 0.5, 0.4), lengths=[2, 1]),
     [1.2, 1.2, -0.8], [0.0] * 3, [2.0, 2.0, 0.5], [True] * 3),
    # inside the trust region: s = sqrt(1.1 * 1), and both tokens get s A / 2, twice (once for each place it stands)
    (ALL["gspo"], logs(0.44, 0.5), tokens([2, 2], logs(0.4, 0.5)),
     [2 * MEAN] * 2, [2 * MEAN] * 2, [MEAN] * 2, [False] * 2),
    # equation 13 on the anchor: s = 1, each token gets its own A, also if they cancel in the answer's mean
    (ALL["gspo"], logs(0.4, 0.5), tokens([1, -1], logs(0.4, 0.5)), [1.0, -1.0], [1.0, -1.0], [1.0] * 2, [False] * 2),
    # s = sqrt(4 * 1) = 2: A = 1 is clipped at 1.2, A = -1 is not
    (ALL["gspo"], logs(0.8, 0.5), tokens([1, -1], logs(0.2, 0.5)), [1.2, -2.0], [0.0, -2.0], [2.0] * 2, [True, False]),
    # u = 2 and 8, the second clipped to 5, and still there; A = -1 and 2
    (ALL["cispo"], logs(0.4, 0.8), tokens([-1, 2], logs(0.2, 0.1)),
     [-2 * math.log(0.4), 10 * math.log(0.8)], [-2.0, 10.0], [2.0, 8.0], [False, True]),
    # u = 2, A = 1, tau = 2: 2 sigmoid(2); u = 1, A = -3, tau = 4: sigmoid(0) * 4 / 4 * -3; df/du = 4 sigmoid (1 - it)
    (partial(surrogates.sapo, positive=2.0, negative=4.0), logs(0.4, 0.5), tokens([1, -3], logs(0.2, 0.5)),
     [2 * SIGMOID, -1.5], [2 * 4 * SIGMOID * (1 - SIGMOID), -3.0], [2.0, 1.0], [False] * 2),
    # answers of two tokens: u = 2 * 0.1 = 0.2 and A = -1: taper 0.2; u = 2 * 3 = 6 and A = -1: taper 1; A = 1: taper 1
    (surrogates.topr, logs(0.4, 0.05, 0.4, 0.9, 0.4, 0.05),
     tokens([-1] * 4 + [1] * 2, logs(0.2, 0.5, 0.2, 0.3, 0.2, 0.5), lengths=[2, 2, 2]),
     [a * math.log(p) for a, p in zip((-0.2, -0.2, -1, -1, 1, 1), (0.4, 0.05, 0.4, 0.9, 0.4, 0.05), strict=True)],
     [-0.2, -0.2, -1.0, -1.0, 1.0, 1.0], None, [False, False, True, True, False, False]),
    # log u = log 2 and log 1/4, beta = 0.5: the second token is pulled back to the anchor although A = 0
    (partial(surrogates.dro, beta=0.5), logs(0.4, 0.1), tokens([1, 0], logs(0.2, 0.4)),
     [math.log(0.4) - 0.25 * TWO**2, -0.25 * QUARTER**2], [1 - 0.5 * TWO, -0.5 * QUARTER], [2.0, 0.25], None),
    # the first is left out
    (surrogates.m2po, logs(0.5, 0.2), tokens([1, -3], logs(0.4, 0.1), kept=[False, True]),
     [0.0, -6.0], [0.0, -6.0], None, [True, False]),
    (surrogates.policy_gradient, logs(0.5, 0.2), tokens([2, -1], logs(0.1, 0.1)),
     [2 * math.log(0.5), -math.log(0.2)], [2.0, -1.0], [5.0, 2.0], None),
]  # fmt: skip


@pytest.mark.parametrize(("surrogate", "policy", "given", "objective", "slope", "ratio", "bounded"), BY_HAND)
def test_each_surrogate_by_hand(
    surrogate: Surrogate,
    policy: Tensor,
    given: LossTokens,
    objective: list[float],
    slope: list[float],
    ratio: list[float] | None,
    bounded: list[bool] | None,
) -> None:
    terms = surrogate(policy, given)
    assert terms.objective.tolist() == near(objective)
    assert gradient(surrogate, policy, given) == near(slope)
    assert ratio is None or terms.ratio.tolist() == near(ratio)
    assert bounded is None or terms.bounded.tolist() == bounded


@given(ROWS, st.floats(-3, 3))
def test_where_an_answers_tokens_are_worth_the_same_gspo_is_its_equation_7(
    rows: list[tuple[float, float, float]], score: float
) -> None:
    policy, anchor, _ = columns(rows)
    leaf = policy.double().requires_grad_()
    ratio = (leaf - anchor).mean().exp()
    (len(rows) * torch.minimum(ratio * score, ratio.clamp(0.8, 1.2) * score)).backward()
    assert leaf.grad is not None
    given = tokens([score] * len(rows), anchor)
    assert gradient(ALL["gspo"], policy, given) == near(leaf.grad.tolist(), FEW + len(rows), size=3 * math.exp(4))


def test_sapo_fades_away_from_the_anchor_where_ppo_stops() -> None:
    far = [abs(gradient(ALL["sapo"], logs(p), tokens([1.0], logs(0.1)))[0]) / (p / 0.1) for p in (0.1, 0.2, 0.4, 0.8)]
    assert far[0] == near(1)
    assert far == sorted(far, reverse=True)


def test_without_its_tether_dro_is_the_policy_gradient_and_foreign_numbers_leave_it_finite() -> None:
    free, given = partial(surrogates.dro, beta=0.0), tokens([2.0, -1.0], torch.tensor([-1e38, -0.1]))
    assert gradient(free, logs(0.5, 0.2), given) == [2.0, -1.0]
    assert all(map(math.isfinite, gradient(ALL["dro"], logs(0.5, 0.2), given)))


def test_a_token_that_m2po_leaves_out_may_overflow() -> None:
    given = tokens([1.0, 1.0], torch.tensor([-400.0, -1.0]), kept=[False, True])
    assert gradient(surrogates.m2po, torch.tensor([-0.1, -1.0]), given) == [0.0, 1.0]


def test_m2po_refuses_to_choose_within_a_micro_batch() -> None:
    with pytest.raises(ValueError, match="whole minibatch"):
        surrogates.m2po(logs(0.5), tokens([1.0], logs(0.4)))


@pytest.mark.parametrize("name", ALL)
@given(rows=ROWS)
def test_on_the_anchor_every_surrogate_has_the_policy_gradient(
    name: str, rows: list[tuple[float, float, float]]
) -> None:
    policy, _, scores = columns(rows)
    # one advantage for a whole answer: GSPO is about sequences
    scores = [scores[0]] * len(scores)
    given = tokens(scores, policy, kept=[True] * len(rows))
    assert gradient(ALL[name], policy, given) == near(scores)
    assert ALL[name](policy, given).ratio.tolist() == near([1.0] * len(rows))


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"dro"}))
def test_a_token_without_an_advantage_has_no_gradient(name: str) -> None:
    given = tokens([0.0, 0.0], logs(0.5, 0.1), kept=[True, True])
    assert [abs(g) for g in gradient(ALL[name], logs(0.2, 0.4), given)] == [0.0, 0.0]


EXACT = rounding(size=9)


def test_the_interpolation_by_hand() -> None:
    # staleness 0, 1, 3: shares 0, 1/2, 3/4 of the way from -2 to -1
    got = interpolated(torch.full((3,), -1.0), torch.full((3,), -2.0), torch.tensor([0.0, 1.0, 3.0]))
    assert got.tolist() == [-2.0, -1.5, -1.25]


@given(st.floats(-9, 0), st.floats(-9, 0), st.integers(0, 50))
def test_it_lies_between_the_two_and_nears_the_policy_with_age(policy: float, behavior: float, staleness: int) -> None:
    ages = torch.tensor([float(staleness), float(staleness + 1)])
    younger, older = interpolated(torch.full((2,), policy), torch.full((2,), behavior), ages).tolist()
    low, high = min(policy, behavior), max(policy, behavior)
    assert low - EXACT <= younger <= high + EXACT
    assert abs(older - policy) <= abs(younger - policy) + EXACT


CHOICES = st.lists(st.tuples(st.floats(-1, 1), st.sampled_from([-1.0, 0.0, 2.0])), max_size=12)


def test_the_choice_by_hand() -> None:
    # (log u)^2 of those in the quadrants: 0.01 0.04 0.25; means of the smallest: 0.01, 0.025, 0.1. The last pulls back.
    log_ratio = torch.tensor([0.1, -0.2, 0.5, -0.9])
    scores = torch.tensor([1.0, -1.0, 1.0, 1.0])
    assert m2po_mask(log_ratio, scores, threshold=0.04).tolist() == [True, True, False, True]
    assert m2po_mask(log_ratio, scores, threshold=0.02).tolist() == [True, False, False, True]
    assert m2po_mask(log_ratio, scores, threshold=0.2).tolist() == [True] * 4
    for unreachable in (0.001, 1e-9, 0.0):
        assert m2po_mask(log_ratio, scores, threshold=unreachable).tolist() == [False, False, False, True]


def test_equal_moments_stay_or_leave_together() -> None:
    log_ratio, scores = torch.tensor([0.1, 0.3, 0.3]), torch.ones(3)
    # with one of the two the mean would be 0.05
    assert m2po_mask(log_ratio, scores, threshold=0.05).tolist() == [True, False, False]


def test_on_the_anchor_and_without_tokens_everything_stays() -> None:
    assert m2po_mask(torch.zeros(3), torch.ones(3), threshold=0.01).tolist() == [True] * 3
    assert m2po_mask(torch.zeros(0), torch.zeros(0), threshold=0.01).tolist() == []


@given(CHOICES, st.sampled_from([0.01, 0.04, 0.3]))
def test_what_stays_keeps_the_threshold_and_one_more_would_not(rows: list[tuple[float, float]], most: float) -> None:
    log_ratio, scores = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    kept = m2po_mask(log_ratio, scores, threshold=most)
    inside = log_ratio * scores > 0
    assert kept[~inside].all()
    moments = log_ratio.square()
    stay, leave = moments[kept & inside], moments[inside & ~kept]
    if len(stay):
        assert float(stay.mean()) <= most + rounding()
    if len(leave):
        assert stay.max().item() < leave.min().item() if len(stay) else True
        assert float(torch.cat([stay, leave[leave == leave.min()]]).mean()) > most - rounding()


@given(CHOICES, st.integers(0, 9))
def test_the_order_makes_no_difference(rows: list[tuple[float, float]], seed: int) -> None:
    log_ratio, scores = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    kept = m2po_mask(log_ratio, scores, threshold=0.04)
    assert torch.equal(m2po_mask(log_ratio[order], scores[order], threshold=0.04), kept[order])
