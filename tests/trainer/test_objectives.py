"""Promises of every objective that a recipe can compose, on a real model: a training step is the equation written out
answer by answer, without packing, and differentiated by autograd; and the packing never changes it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.records import Batch, Sampling
from stretto.trainer.batch.minibatch import minibatches
from stretto.trainer.batch.samples import Sample, samples_of
from stretto.trainer.config import TrainerConfig
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.reference import ReferencePolicy
from stretto.trainer.trainer import Trainer
from tests.tolerances import EPS, LOGITS, RATE, assert_close, near
from tests.trainer.batches import LONGEST, adamw, assert_same, batch, sample_logprobs
from tests.trainer.tiny import BACKWARD, elsewhere, tiny

CONFIG = TrainerConfig(learning_rate=RATE, eps=EPS, minibatches=3, weight_decay=0.1, max_grad_norm=0.7)
SAMPLING = Sampling(max_tokens=LONGEST)

#: Every token has an advantage of its own, on either side of 0.
TOKENWISE: dict[str, Any] = {"advantages": {"kind": "reinforce_pp", "gamma": 0.9}}
RECIPES: dict[str, Mapping[str, object]] = {
    "decoupled PPO": {},
    "decoupled PPO, interpolated": {"loss": {"kind": "decoupled_ppo", "anchor": "interpolated"}},
    "PPO": {"loss": {"kind": "ppo", "clip_low": 0.3, "clip_high": 0.6}, **TOKENWISE},
    "dual clip": {"loss": {"kind": "dual_clip", "clip_negative": 1.3}, **TOKENWISE},
    "GSPO": {"loss": {"kind": "gspo", "anchor": "behavior", "clip_high": 0.5}, "aggregation": "sequence_mean"},
    "decoupled GSPO": {"loss": "gspo", **TOKENWISE},
    "CISPO": {"loss": {"kind": "cispo", "anchor": "behavior", "clip_high": 1.0}, **TOKENWISE},
    "SAPO": {"loss": {"kind": "sapo", "anchor": "behavior"}, **TOKENWISE},
    "M2PO": {"loss": {"kind": "m2po", "threshold": 0.5}, **TOKENWISE},
    "TOPR": {"loss": "topr", **TOKENWISE},
    "DRO": {"loss": {"kind": "dro", "beta": 0.4}, **TOKENWISE},
    "policy gradient": {"loss": "policy_gradient", **TOKENWISE},
    "Dr. GRPO": {"advantages": "group_mean", "aggregation": "fixed_length"},
    "IcePop": {"correction": {"kind": "mask", "low": 0.5, "high": 2.0}},
    "TIS": {"correction": {"kind": "truncate", "high": 1.5}},
    "recomputed PPO": {"correction": "none"},
    "KPop": {"correction": {"kind": "kpop", "threshold": 0.05}},
    "geometric rejection": {"correction": {"kind": "sequence_mask", "low": 0.7, "high": 1.4}},
    "GAE": {"advantages": {"kind": "gae", "gamma": 0.9, "lam": 0.9}},
    "KL by k1": {"reference": {"estimator": "k1", "weight": 0.5}},
    "KL by k2": {"reference": {"estimator": "k2", "weight": 0.5}},
    "KL and entropy": {"reference": {"estimator": "k3", "weight": 0.5}, "entropy_bonus": 0.1},
}
#: What sums over an answer, a minibatch or a batch; the terms of other recipes are of a token, and those of a packed
#: row are held to their equations above, which know no packing.
DAILY_PACKINGS = ("decoupled PPO", "GSPO", "M2PO", "Dr. GRPO", "geometric rejection", "GAE", "KL and entropy")


@dataclass(frozen=True)
class Known:
    """One answer as the equations see it."""

    policy: Tensor  # [n], differentiable
    entropy: Tensor  # [n], differentiable
    behavior: Tensor  # [n]
    proximal: Tensor  # [n]
    reference: Tensor | None  # [n]
    staleness: Tensor  # [n]
    scores: Tensor  # [n]


def anchor(config: AlgorithmConfig, known: Known) -> Tensor:
    match config.loss.anchor:
        case "behavior":
            return known.behavior
        case "recomputed":
            return known.proximal
        case "interpolated":
            d = known.staleness
            return (known.behavior + d * known.policy.detach()) / (d + 1)


def terms(config: AlgorithmConfig, known: Known, kept: Sequence[bool]) -> list[Tensor]:
    """The surrogate of each token of one answer, by its equation."""
    loss: Any = config.loss  # its numbers are those of its function
    base = anchor(config, known)
    u, scores = (known.policy - base).exp(), known.scores.tolist()
    whole = float((known.policy.detach() - base).sum().exp())
    found = []
    for t, a in enumerate(scores):
        match loss.kind:
            case "decoupled_ppo" | "ppo" | "dual_clip" | "gspo":
                x = u[t]
                if loss.kind == "gspo":
                    x = (known.policy - base).mean().exp().detach() * (known.policy[t] - known.policy[t].detach()).exp()
                term = torch.minimum(x * a, x.clamp(1 - loss.clip_low, 1 + loss.clip_high) * a)
                if loss.kind == "dual_clip" and a < 0:
                    term = term.clamp(min=loss.clip_negative * a)
            case "cispo":
                term = min(max(float(u[t].detach()), 1 - loss.clip_low), 1 + loss.clip_high) * a * known.policy[t]
            case "sapo":
                tau = loss.positive if a > 0 else loss.negative
                term = 4 / tau / (1 + (-tau * (u[t] - 1)).exp()) * a
            case "m2po":
                term = u[t] * a * kept[t]
            case "topr":
                term = (min(whole, 1.0) if a < 0 else 1.0) * a * known.policy[t]
            case "dro":
                term = a * known.policy[t] - loss.beta / 2 * (known.policy[t] - base[t]) ** 2
            case "policy_gradient":
                term = a * known.policy[t]
            case _:
                raise AssertionError(f"no equation of {loss.kind!r}")
        found.append(term)
    return found


def weights(config: AlgorithmConfig, known: Known) -> list[float]:
    base = anchor(config, known)
    w = (base - known.behavior).exp().tolist()
    correction: Any = config.correction
    match correction.kind:
        case "mask":
            return [x if correction.low <= x <= correction.high else 0.0 for x in w]
        case "truncate":
            return [min(x, correction.high) for x in w]
        case "none":
            return [1.0] * len(w)
        case "kpop":
            pairs = zip(base.exp().tolist(), known.behavior.exp().tolist(), strict=True)
            far = [max(binary(p, q), binary(q, p)) > correction.threshold for p, q in pairs]
            return [0.0 if away else x for x, away in zip(w, far, strict=True)]
        case "sequence_mask":
            mean = math.prod(w) ** (1 / len(w))
            return w if correction.low <= mean <= correction.high else [0.0] * len(w)
        case _:
            raise AssertionError(f"no equation of {correction.kind!r}")


def binary(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def chosen(config: AlgorithmConfig, part: Sequence[Known]) -> list[list[bool]]:
    """M2PO's choice, greedily, one token after the other: the worst leaves until the mean is small enough."""
    kept = [[True] * len(known.scores) for known in part]
    loss: Any = config.loss
    if loss.kind != "m2po":
        return kept
    inside = []
    for i, known in enumerate(part):
        pairs = zip((known.policy.detach() - known.behavior).tolist(), known.scores.tolist(), strict=True)
        inside += [(x * x, i, t) for t, (x, a) in enumerate(pairs) if x * a > 0]
    inside.sort()
    while inside and sum(m for m, _, _ in inside) / len(inside) > loss.threshold:
        _, i, t = inside.pop()
        kept[i][t] = False
    return kept


def written_out(config: AlgorithmConfig, part: Sequence[Known], answers: float) -> Tensor:
    """Minus the objective of a minibatch: a sum over answers of sums over tokens. Of the batch there are `answers` to a
    minibatch."""
    tokens = sum(len(known.scores) for known in part)
    total = torch.zeros(())
    for known, kept in zip(part, chosen(config, part), strict=True):
        divisor = {
            "token_mean": tokens,
            "sequence_mean": answers * len(known.scores),
            "fixed_length": answers * LONGEST,
        }[config.aggregation]
        each = zip(weights(config, known), terms(config, known, kept), strict=True)
        total = total - sum((w * term for w, term in each), start=torch.zeros(())) / divisor
        if config.reference is not None and known.reference is not None:
            x = known.reference - known.policy
            divergence = {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[config.reference.estimator]
            total = total + config.reference.weight * divergence.sum() / divisor
        total = total - config.entropy_bonus * known.entropy.sum() / divisor
    return total


def plain_step(config: AlgorithmConfig, given: Batch) -> PreTrainedModel:
    """A training step without packing."""
    model, other = tiny(), elsewhere(tiny())
    optimizer, samples = adamw(model), samples_of(given, config, LONGEST).samples
    with torch.no_grad():
        proximal = [sample_logprobs(model, sample)[0] for sample in samples]
        reference = [sample_logprobs(other, sample)[0] if config.reference else None for sample in samples]
    for part in minibatches([len(sample.token_ids) for sample in samples], 3):
        known = [known_of(model, samples[i], proximal[i], reference[i]) for i in part]
        optimizer.zero_grad()
        written_out(config, known, len(samples) / 3).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
    return model


def known_of(model: PreTrainedModel, sample: Sample, proximal: Tensor, reference: Tensor | None) -> Known:
    policy, entropy = sample_logprobs(model, sample)
    behavior, scores = torch.tensor(sample.behavior_logprobs), torch.tensor(sample.advantages)
    return Known(policy, entropy, behavior, proximal, reference, torch.tensor(sample.staleness), scores)


def trainer(config: AlgorithmConfig, tokens: int, version: int = 0, minibatches: int = 3) -> Trainer:
    settings = CONFIG.model_copy(update={"micro_batch_tokens": tokens, "minibatches": minibatches})
    reference = ReferencePolicy(elsewhere(tiny()), settings, SAMPLING) if config.reference else None
    return Trainer(tiny(), settings, config, SAMPLING, reference=reference, version=version)


#: Its tokens are of three versions.
GIVEN = batch(2)


def first_matrix(recipe: Mapping[str, object]) -> tuple[PreTrainedModel, Tensor]:
    """The model after a step."""
    one = trainer(AlgorithmConfig.model_validate(recipe), 24, version=2)
    one.train(GIVEN)
    return one.learner.model, next(iter(one.learner.model.parameters())).detach()


@cache
def of_the_default(tokenwise: bool) -> Tensor:
    return first_matrix(TOKENWISE if tokenwise else {})[1]


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_is_the_equation_written_out(name: str) -> None:
    """Every recipe differs from the default: otherwise this would pass on a part that is never reached."""
    recipe = RECIPES[name]
    model, matrix = first_matrix(recipe)
    assert torch.equal(matrix, of_the_default(recipe.items() > TOKENWISE.items())) == (recipe == {})
    assert_same(model, plain_step(AlgorithmConfig.model_validate(recipe), GIVEN), steps=3)


def gradients(one: Trainer) -> list[Tensor]:
    """Those of the first optimizer step, as AdamW's first moments hold them: a tenth of each, clipped."""
    return [state["exp_avg"] * 10 for state in one.learner.adamw.state.values()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DAILY_PACKINGS else [pytest.mark.long]) for name in RECIPES]
)
def test_the_packing_changes_no_gradient(name: str) -> None:
    config = AlgorithmConfig.model_validate(RECIPES[name])
    together, alone = trainer(config, 10_000, minibatches=1), trainer(config, 1, minibatches=1)
    seen = [one.train(batch(0)).metrics for one in (together, alone)]
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients(together))
    assert_close(gradients(together), gradients(alone), BACKWARD)
    assert seen[0]["loss"] == near(seen[1]["loss"], BACKWARD, size=LOGITS)
    assert seen[0]["grad_norm"] == near(seen[1]["grad_norm"], BACKWARD)
    assert seen[0]["capped_fraction"] == seen[1]["capped_fraction"]
