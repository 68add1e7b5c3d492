"""Promises: each surrogate by hand, value and gradient; each has the policy gradient on the anchor; the identities that
tie them to PPO."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto.trainer.objective import decoupled_ppo, surrogates
from stretto.trainer.objective.surrogates import Surrogate
from stretto.trainer.objective.tokens import LossTokens
from tests.tolerances import FEW, near
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


def test_ppo_by_hand() -> None:
    # u = 1.25 and 2, A = 1 and -3: min(1.25, 1.2) is clipped, min(-6, -3.6) is not
    terms = PPO(logs(0.5, 0.2), given := tokens([1.0, -3.0], logs(0.4, 0.1)))
    assert terms.objective.tolist() == near([1.2, -6.0])
    assert terms.ratio.tolist() == near([1.25, 2.0])
    assert terms.bounded.tolist() == [True, False]
    assert gradient(PPO, logs(0.5, 0.2), given) == near([0.0, -6.0])  # d(u A) / d log policy = u A


def test_the_two_bounds_of_the_clip_are_separate() -> None:
    # u = 1.8 clipped to 1.5; u = 0.6 clipped to 0.9: min(-0.6, -0.9)
    dapo = partial(decoupled_ppo.ppo, clip_low=0.1, clip_high=0.5)
    assert dapo(logs(0.9, 0.3), tokens([1.0, -1.0], logs(0.5, 0.5))).objective.tolist() == near([1.5, -0.9])


@given(ROWS)
def test_with_equal_bounds_dapos_clip_is_grpos(rows: list[tuple[float, float, float]]) -> None:
    policy, anchor, scores = columns(rows)
    ratio, score = (policy - anchor).exp(), torch.tensor(scores)
    grpo = torch.minimum(ratio * score, ratio.clamp(0.8, 1.2) * score)
    assert torch.equal(PPO(policy, tokens(scores, anchor)).objective, grpo)


def test_dual_clip_by_hand() -> None:
    # A = -2: u = 4 gives -8, below 3 * -2; u = 2.5 gives -5, above it; A = 2, u = 4 is clipped to 1.2 as ever
    dual = ALL["dual_clip"]
    given = tokens([-2.0, -2.0, 2.0], logs(0.2, 0.2, 0.2))
    terms = dual(logs(0.8, 0.5, 0.8), given)
    assert terms.objective.tolist() == near([-6.0, -5.0, 2.4])
    assert terms.bounded.tolist() == [True, False, True]
    assert gradient(dual, logs(0.8, 0.5, 0.8), given) == near([0.0, -5.0, 0.0])


@given(ROWS)
def test_a_dual_clip_that_is_never_reached_is_ppo(rows: list[tuple[float, float, float]]) -> None:
    policy, anchor, scores = columns(rows)
    given = tokens(scores, anchor)
    dual = partial(surrogates.dual_clip, clip_low=0.2, clip_high=0.2, clip_negative=math.exp(5))
    assert torch.equal(dual(policy, given).objective, PPO(policy, given).objective)


def test_gspo_by_hand() -> None:
    # answer 1: u = 4 and 1, geometric mean 2, A = 1 clipped to 1.2; answer 2: u = 0.5, A = -1: min(-0.5, -0.8)
    gspo = ALL["gspo"]
    given = tokens([1.0, 1.0, -1.0], logs(0.2, 0.5, 0.4), lengths=[2, 1])
    terms = gspo(logs(0.8, 0.5, 0.2), given)
    assert terms.objective.tolist() == near([1.2, 1.2, -0.8])
    assert terms.ratio.tolist() == near([2.0, 2.0, 0.5])
    assert terms.bounded.tolist() == [True, True, True]
    # inside the trust region: s = sqrt(1.1 * 1), and both tokens get s A / 2, twice (once for each place it stands)
    given = tokens([2.0, 2.0], logs(0.4, 0.5))
    mean = math.sqrt(1.1)
    assert gradient(gspo, logs(0.44, 0.5), given) == near([2 * mean, 2 * mean])


def test_gspo_of_single_tokens_by_hand() -> None:
    # equation 13 on the anchor: s = 1, each token gets its own A, also if they cancel in the answer's mean
    assert gradient(ALL["gspo"], logs(0.4, 0.5), tokens([1.0, -1.0], logs(0.4, 0.5))) == [1.0, -1.0]
    # s = sqrt(4 * 1) = 2: A = 1 is clipped at 1.2, A = -1 is not
    given = tokens([1.0, -1.0], logs(0.2, 0.5))
    assert ALL["gspo"](logs(0.8, 0.5), given).objective.tolist() == near([1.2, -2.0])
    assert gradient(ALL["gspo"], logs(0.8, 0.5), given) == near([0.0, -2.0])


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


@given(ROWS)
def test_on_answers_of_one_token_gspo_is_ppo(rows: list[tuple[float, float, float]]) -> None:
    policy, anchor, scores = columns(rows)
    given = tokens(scores, anchor, lengths=[1] * len(rows))
    assert torch.equal(ALL["gspo"](policy, given).objective, PPO(policy, given).objective)
    assert gradient(ALL["gspo"], policy, given) == near(gradient(PPO, policy, given))


def test_cispo_by_hand() -> None:
    # u = 2 and 8, the second clipped to 5; A = -1 and 2
    cispo = ALL["cispo"]
    given = tokens([-1.0, 2.0], logs(0.2, 0.1))
    terms = cispo(logs(0.4, 0.8), given)
    assert terms.objective.tolist() == near([-2 * math.log(0.4), 10 * math.log(0.8)])
    assert terms.bounded.tolist() == [False, True]
    assert gradient(cispo, logs(0.4, 0.8), given) == near([-2.0, 10.0])  # clipped, and still there


@given(ROWS)
def test_where_nothing_is_clipped_cispo_has_ppos_gradient(rows: list[tuple[float, float, float]]) -> None:
    policy, anchor, scores = columns(rows)
    close = anchor + (policy - anchor).clamp(-0.1, 0.1)
    given = tokens(scores, anchor)
    assert gradient(ALL["cispo"], close, given) == near(gradient(PPO, close, given))


def test_sapo_by_hand() -> None:
    # u = 2, A = 1, tau = 2: 2 sigmoid(2); u = 1, A = -3, tau = 4: sigmoid(0) * 4 / 4 * -3
    sapo = partial(surrogates.sapo, positive=2.0, negative=4.0)
    given = tokens([1.0, -3.0], logs(0.2, 0.5))
    sigmoid = 1 / (1 + math.exp(-2))
    terms = sapo(logs(0.4, 0.5), given)
    assert terms.objective.tolist() == near([2 * sigmoid, -1.5])
    assert not terms.bounded.any()
    # df/du = 4 sigmoid (1 - sigmoid), du / d log policy = u
    assert gradient(sapo, logs(0.4, 0.5), given) == near([2 * 4 * sigmoid * (1 - sigmoid), -3.0])


def test_sapo_fades_away_from_the_anchor_where_ppo_stops() -> None:
    far = [abs(gradient(ALL["sapo"], logs(p), tokens([1.0], logs(0.1)))[0]) / (p / 0.1) for p in (0.1, 0.2, 0.4, 0.8)]
    assert far[0] == near(1)
    assert far == sorted(far, reverse=True)


def test_topr_by_hand() -> None:
    # answers of two tokens: u = 2 * 0.1 = 0.2 and A = -1: taper 0.2; u = 2 * 3 = 6 and A = -1: taper 1; A = 1: taper 1
    policy, anchor = logs(0.4, 0.05, 0.4, 0.9, 0.4, 0.05), logs(0.2, 0.5, 0.2, 0.3, 0.2, 0.5)
    given = tokens([-1.0] * 4 + [1.0] * 2, anchor, lengths=[2, 2, 2])
    terms = surrogates.topr(policy, given)
    assert terms.objective[0].item() == near(-0.2 * math.log(0.4))
    assert terms.bounded.tolist() == [False, False, True, True, False, False]
    assert gradient(surrogates.topr, policy, given) == near([-0.2, -0.2, -1.0, -1.0, 1.0, 1.0])


@given(ROWS)
def test_where_no_advantage_is_negative_topr_is_the_policy_gradient(rows: list[tuple[float, float, float]]) -> None:
    policy, anchor, scores = columns(rows)
    given = tokens([abs(score) for score in scores], anchor)
    got, expected = (surrogate(policy, given).objective for surrogate in (ALL["topr"], ALL["policy_gradient"]))
    assert torch.equal(got, expected)


def test_dro_by_hand() -> None:
    # log u = log 2 and log 1/4, beta = 0.5: the second token is pulled back to the anchor although A = 0
    dro = partial(surrogates.dro, beta=0.5)
    given = tokens([1.0, 0.0], logs(0.2, 0.4))
    terms = dro(logs(0.4, 0.1), given)
    two, quarter = math.log(2), math.log(0.25)
    assert terms.objective.tolist() == near([math.log(0.4) - 0.25 * two**2, -0.25 * quarter**2])
    assert terms.ratio.tolist() == near([2.0, 0.25])
    assert gradient(dro, logs(0.4, 0.1), given) == near([1 - 0.5 * two, -0.5 * quarter])


def test_without_its_tether_dro_is_the_policy_gradient_and_foreign_numbers_leave_it_finite() -> None:
    free, given = partial(surrogates.dro, beta=0.0), tokens([2.0, -1.0], torch.tensor([-1e38, -0.1]))
    assert gradient(free, logs(0.5, 0.2), given) == [2.0, -1.0]
    assert all(map(math.isfinite, gradient(ALL["dro"], logs(0.5, 0.2), given)))


def test_m2po_by_hand() -> None:
    given = tokens([1.0, -3.0], logs(0.4, 0.1), kept=[False, True])
    terms = surrogates.m2po(logs(0.5, 0.2), given)
    assert terms.objective.tolist() == near([0.0, -6.0])
    assert terms.bounded.tolist() == [True, False]
    assert gradient(surrogates.m2po, logs(0.5, 0.2), given) == near([0.0, -6.0])


def test_a_token_that_m2po_leaves_out_may_overflow() -> None:
    given = tokens([1.0, 1.0], torch.tensor([-400.0, -1.0]), kept=[False, True])
    assert gradient(surrogates.m2po, torch.tensor([-0.1, -1.0]), given) == [0.0, 1.0]


def test_m2po_refuses_to_choose_within_a_micro_batch() -> None:
    with pytest.raises(ValueError, match="whole minibatch"):
        surrogates.m2po(logs(0.5), tokens([1.0], logs(0.4)))


@given(ROWS)
def test_where_nothing_is_left_out_m2po_is_ppo_without_a_clip(rows: list[tuple[float, float, float]]) -> None:
    policy, anchor, scores = columns(rows)
    given = tokens(scores, anchor, kept=[True] * len(rows))
    expected = (policy - anchor).exp() * torch.tensor(scores)
    assert torch.equal(surrogates.m2po(policy, given).objective, expected)


def test_the_policy_gradient_by_hand() -> None:
    given = tokens([2.0, -1.0], logs(0.1, 0.1))
    terms = surrogates.policy_gradient(logs(0.5, 0.2), given)
    assert terms.objective.tolist() == near([2 * math.log(0.5), -math.log(0.2)])
    assert terms.ratio.tolist() == near([5.0, 2.0])
    assert gradient(surrogates.policy_gradient, logs(0.5, 0.2), given) == [2.0, -1.0]


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
