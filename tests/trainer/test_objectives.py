"""Promises of every objective that a recipe can compose, on a real model: a training step is the equation written out
answer by answer, without packing, and differentiated by autograd; and the packing never changes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.records import Sampling
from stretto.trainer.batch.packing import minibatches
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

RECIPES: dict[str, Mapping[str, object]] = {
    "decoupled PPO": {},
    "decoupled PPO, interpolated": {"loss": {"kind": "decoupled_ppo", "anchor": "interpolated"}},
    "PPO": {"loss": {"kind": "ppo", "clip_low": 0.3, "clip_high": 0.6}},
    "dual clip": {"loss": {"kind": "dual_clip", "clip_negative": 1.3}},
    "GSPO": {"loss": {"kind": "gspo", "anchor": "behavior", "clip_high": 0.5}, "aggregation": "sequence_mean"},
    "decoupled GSPO": {"loss": "gspo"},
    "CISPO": {"loss": {"kind": "cispo", "anchor": "behavior", "clip_high": 1.0}},
    "SAPO": {"loss": {"kind": "sapo", "anchor": "behavior"}},
    "M2PO": {"loss": {"kind": "m2po", "threshold": 0.5}},
    "TOPR": {"loss": "topr"},
    "DRO": {"loss": {"kind": "dro", "beta": 0.4}},
    "policy gradient": {"loss": "policy_gradient"},
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
TOKENWISE = {"advantages": {"kind": "gae", "gamma": 0.9, "lam": 0.9}}
LOSSES = ("dual_clip", "gspo", "cispo", "sapo", "m2po", "topr", "dro", "policy_gradient", "ppo")
#: Of a token, of a whole answer, and of a choice among the tokens of a minibatch; the others are of a token as well,
#: and their equations are held above.
DAILY_LOSSES = ("dual_clip", "gspo", "m2po", "topr")
#: What sums over an answer, a minibatch or a batch; the terms of other recipes are of a token, and those of a packed
#: row are held to their equations above, which know no packing.
DAILY_PACKINGS = ("decoupled PPO", "GSPO", "M2PO", "Dr. GRPO", "geometric rejection", "GAE", "KL and entropy")


def each(names: Iterable[str], daily: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in daily else [pytest.mark.long]) for name in names]


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
        log_ratio = (known.policy.detach() - known.behavior).tolist()
        pairs = zip(log_ratio, known.scores.tolist(), strict=True)
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


class Plain:
    """A trainer without packing."""

    def __init__(self, model: PreTrainedModel, config: AlgorithmConfig) -> None:
        self.model, self._reference, self._config = model, elsewhere(tiny()), config
        self._optimizer = adamw(model)

    def train(self, version: int) -> None:
        samples = samples_of(batch(version), self._config, LONGEST).samples
        with torch.no_grad():
            proximal = [sample_logprobs(self.model, sample)[0] for sample in samples]
            compared = samples if self._config.reference else ()
            reference = [sample_logprobs(self._reference, sample)[0] for sample in compared]
        for part in minibatches([len(sample.token_ids) for sample in samples], 3):
            known = [self._known(samples[i], proximal[i], reference[i] if reference else None) for i in part]
            loss = written_out(self._config, known, len(samples) / 3)
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.7)
            self._optimizer.step()

    def _known(self, sample: Sample, proximal: Tensor, reference: Tensor | None) -> Known:
        policy, entropy = sample_logprobs(self.model, sample)
        behavior, scores = torch.tensor(sample.behavior_logprobs), torch.tensor(sample.advantages)
        return Known(policy, entropy, behavior, proximal, reference, torch.tensor(sample.staleness), scores)


def trainer(config: AlgorithmConfig, tokens: int, minibatches: int = 3) -> Trainer:
    settings = CONFIG.model_copy(update={"micro_batch_tokens": tokens, "minibatches": minibatches})
    reference = ReferencePolicy(elsewhere(tiny()), settings, SAMPLING) if config.reference else None
    return Trainer(tiny(), settings, config, SAMPLING, reference=reference)


@cache
def first_step_of_the_default() -> Tensor:
    """One matrix after it."""
    one = trainer(AlgorithmConfig(), 24)
    one.train(batch(0))
    return next(iter(one.learner.model.parameters())).detach()


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_is_the_equation_written_out(name: str) -> None:
    """Every recipe differs from the default: otherwise this would pass on a part that is never reached."""
    config = AlgorithmConfig.model_validate(RECIPES[name])
    plain, packed = Plain(tiny(), config), trainer(config, 24)
    plain.train(0)
    packed.train(batch(0))
    weight = next(iter(packed.learner.model.parameters()))
    assert torch.equal(weight, first_step_of_the_default()) == (config == AlgorithmConfig())
    plain.train(1)
    packed.train(batch(1))
    assert_same(packed.learner.model, plain.model, steps=2 * 3)


@pytest.mark.parametrize("loss", each(LOSSES, DAILY_LOSSES))
def test_so_it_is_where_every_token_has_an_advantage_of_its_own(loss: str) -> None:
    config = AlgorithmConfig.model_validate(TOKENWISE | {"loss": loss})
    assert any(len(set(sample.advantages)) > 1 for sample in samples_of(batch(0), config, LONGEST).samples)
    packed, plain = trainer(config, 24), Plain(tiny(), config)
    packed.train(batch(0))
    plain.train(0)
    assert_same(packed.learner.model, plain.model, steps=3)


def gradients(one: Trainer) -> list[Tensor]:
    """Those of the first optimizer step, as AdamW's first moments hold them: a tenth of each, clipped."""
    return [state["exp_avg"] * 10 for state in one.learner.adamw.state.values()]


@pytest.mark.parametrize("name", each(RECIPES, DAILY_PACKINGS))
def test_the_packing_changes_no_gradient(name: str) -> None:
    config = AlgorithmConfig.model_validate(RECIPES[name])
    together, alone = trainer(config, 10_000, minibatches=1), trainer(config, 1, minibatches=1)
    seen = [one.train(batch(0)).metrics for one in (together, alone)]
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients(together))
    assert_close(gradients(together), gradients(alone), BACKWARD)
    assert seen[0]["loss"] == near(seen[1]["loss"], BACKWARD, size=LOGITS)
    assert seen[0]["grad_norm"] == near(seen[1]["grad_norm"], BACKWARD)
    assert seen[0]["capped_fraction"] == seen[1]["capped_fraction"]
