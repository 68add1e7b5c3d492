"""`[algorithm]`: what is maximised. Each choice that has numbers of its own is a section with a `kind`; a name alone is
that section with its defaults, so ``loss = "ppo"`` is ``loss = {kind = "ppo"}``.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Literal, Self, assert_never

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from stretto.trainer.config import CriticConfig
from stretto.trainer.objective import corrections, decoupled_ppo, kl, surrogates
from stretto.trainer.objective.aggregation import Aggregation
from stretto.trainer.objective.corrections import Correction
from stretto.trainer.objective.decoupled_ppo import Anchor
from stretto.trainer.objective.estimators import GAE, Estimator, GroupNormalised, named
from stretto.trainer.objective.kl import Divergence
from stretto.trainer.objective.losses import Objective
from stretto.trainer.objective.m2po import m2po_mask
from stretto.trainer.objective.shaping import Shaping
from stretto.trainer.objective.surrogates import Surrogate

ClipLow = Annotated[float, Field(gt=0, le=1, description="ratios below 1 - clip_low are clipped")]
ClipHigh = Annotated[float, Field(gt=0, description="ratios above 1 + clip_high are clipped")]
Ratio = Annotated[float, Field(gt=1)]
_ANCHOR = (
    "the policy around which the trust region lies; recomputed: before this step (decoupled); "
    "interpolated: the same, estimated from versions; behavior: the one that sampled (not decoupled)"
)
Around = Annotated[Anchor, Field(description=_ANCHOR)]


class _Section(BaseModel, extra="forbid", frozen=True, ser_json_inf_nan="constants"):
    pass


class DecoupledPPO(_Section):
    """PPO's clip around the policy before the step (AReaL, equation 5)."""

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    anchor: Literal["recomputed", "interpolated"] = Field("recomputed", description=_ANCHOR)
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2


class PPO(_Section):
    """PPO's clip around the policy that sampled."""

    kind: Literal["ppo"] = "ppo"
    anchor: Literal["behavior"] = Field("behavior", description=_ANCHOR)
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2


class DualClip(_Section):
    """PPO's clip, and a floor where the advantage is negative."""

    kind: Literal["dual_clip"] = "dual_clip"
    anchor: Around = "recomputed"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    clip_negative: Ratio = Field(3.0, description="largest ratio of a token with a negative advantage")


class GSPO(_Section):
    """PPO's clip with one ratio per completion."""

    kind: Literal["gspo"] = "gspo"
    anchor: Around = "recomputed"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


class CISPO(_Section):
    """The policy gradient, weighed by the clipped ratio."""

    kind: Literal["cispo"] = "cispo"
    anchor: Around = "recomputed"
    clip_low: ClipLow = 1.0
    clip_high: ClipHigh = 4.0


class SAPO(_Section):
    """A soft gate in place of the clip."""

    kind: Literal["sapo"] = "sapo"
    anchor: Around = "recomputed"
    positive: float = Field(1.0, gt=0, description="temperature where the advantage is positive")
    negative: float = Field(1.05, gt=0, description="temperature elsewhere")


class M2PO(_Section):
    """No clip; the farthest tokens are left out until the second moment is small enough."""

    kind: Literal["m2po"] = "m2po"
    anchor: Literal["behavior"] = Field("behavior", description=_ANCHOR)
    threshold: float = Field(0.04, gt=0, description="largest mean of (log ratio)^2 over the tokens in the quadrants")


class TOPR(_Section):
    """The policy gradient, tapered by the completion's ratio where the advantage is negative."""

    kind: Literal["topr"] = "topr"
    anchor: Literal["behavior"] = Field("behavior", description=_ANCHOR)


class PolicyGradient(_Section):
    """REINFORCE."""

    kind: Literal["policy_gradient"] = "policy_gradient"
    anchor: Around = "recomputed"


LossConfig = Annotated[
    DecoupledPPO | PPO | DualClip | GSPO | CISPO | SAPO | M2PO | TOPR | PolicyGradient,
    Field(discriminator="kind"),
    BeforeValidator(named),
]


class Mask(_Section):
    """Tokens whose weight is outside the bounds get weight 0 (IcePop). The default leaves every weight as it is."""

    kind: Literal["mask"] = "mask"
    low: float = Field(0.0, ge=0, lt=1, description="smallest weight anchor / behavior")
    high: Ratio = Field(math.inf, description="largest weight anchor / behavior")


class Truncate(_Section):
    """Weights above the bound become the bound (TIS)."""

    kind: Literal["truncate"] = "truncate"
    high: Ratio = Field(2.0, description="largest weight anchor / behavior")


class Uncorrected(_Section):
    """Every weight is 1: the anchor is taken for the policy that sampled."""

    kind: Literal["none"] = "none"


class KPop(_Section):
    """Tokens about which the two policies disagree get weight 0."""

    kind: Literal["kpop"] = "kpop"
    threshold: float = Field(0.1, gt=0, description="largest binary divergence, in nats")


class SequenceMask(_Section):
    """Completions whose geometric mean weight is outside the bounds get weight 0."""

    kind: Literal["sequence_mask"] = "sequence_mask"
    low: float = Field(0.99, ge=0, lt=1, description="smallest geometric mean of anchor / behavior")
    high: Ratio = Field(1.01, description="largest geometric mean of anchor / behavior")


CorrectionConfig = Annotated[
    Mask | Truncate | Uncorrected | KPop | SequenceMask, Field(discriminator="kind"), BeforeValidator(named)
]


class ReferenceConfig(_Section):
    """A penalty for leaving a reference policy, whose weights are in the trainer's memory as well."""

    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of KL(policy || reference)")
    weight: float = Field(1e-3, ge=0, allow_inf_nan=False, description="weight of the divergence")
    into: Literal["loss", "reward"] = Field(
        "loss", description="loss: a term of its own; reward: each token's reward is lowered, before the advantages"
    )
    path: str | None = Field(None, description="Hugging Face folder; none: the policy that the run starts from")


class AlgorithmConfig(_Section):
    """The objective and the advantages."""

    loss: LossConfig = Field(DecoupledPPO(), description="the surrogate that is maximised, and its trust region")
    correction: CorrectionConfig = Field(Mask(), description="weights of tokens that another policy sampled")
    aggregation: Aggregation = Field(
        "token_mean",
        description="token_mean: over all tokens; sequence_mean: over completions, of their means; "
        "fixed_length: over completions, of their sums over sampling.max_tokens",
    )
    advantages: Estimator = Field(GroupNormalised(), description="estimator of the advantages")
    shaping: Shaping = Field(Shaping(), description="changes of the rewards before the advantages")
    reference: ReferenceConfig | None = Field(
        None, description="the reference policy of the KL term; left out: none is loaded"
    )
    entropy: bool = Field(False, description="measure the policy's entropy (costs time, changes nothing)")
    entropy_bonus: float = Field(0.0, ge=0, allow_inf_nan=False, description="weight of the mean entropy in J")

    def divergence(self, into: Literal["loss", "reward"]) -> Divergence | None:
        """The estimator of the divergence from the reference policy, if that is where it belongs."""
        reference = self.reference
        return getattr(kl, reference.estimator) if reference is not None and reference.into == into else None

    @property
    def critic(self) -> CriticConfig | None:
        """The critic that the advantages need, if they need one."""
        return self.advantages.critic if isinstance(self.advantages, GAE) else None

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.loss.anchor == "behavior" and self.correction != Mask():
            raise ValueError(
                f'loss "{self.loss.kind}" is anchored at the policy that sampled, so every weight anchor / behavior is '
                f'1 and correction "{self.correction.kind}" does nothing; choose a loss with anchor = "recomputed", or '
                'remove the correction (correction = "mask" leaves every weight as it is)'
            )
        return self


def objective(config: AlgorithmConfig) -> Objective:
    """The loss that the recipe composes."""
    return Objective(
        surrogate=_surrogate(config.loss),
        correction=_correction(config.correction),
        selection=partial(m2po_mask, threshold=config.loss.threshold) if isinstance(config.loss, M2PO) else None,
        divergence=config.divergence("loss"),
        divergence_weight=config.reference.weight if config.reference else 0.0,
        entropy_bonus=config.entropy_bonus,
    )


def _surrogate(loss: LossConfig) -> Surrogate:
    match loss:
        case DecoupledPPO() | PPO():
            return partial(decoupled_ppo.ppo, clip_low=loss.clip_low, clip_high=loss.clip_high)
        case DualClip():
            return partial(
                surrogates.dual_clip,
                clip_low=loss.clip_low,
                clip_high=loss.clip_high,
                clip_negative=loss.clip_negative,
            )
        case GSPO():
            return partial(surrogates.gspo, clip_low=loss.clip_low, clip_high=loss.clip_high)
        case CISPO():
            return partial(surrogates.cispo, clip_low=loss.clip_low, clip_high=loss.clip_high)
        case SAPO():
            return partial(surrogates.sapo, positive=loss.positive, negative=loss.negative)
        case M2PO():
            return surrogates.m2po
        case TOPR():
            return surrogates.topr
        case PolicyGradient():
            return surrogates.policy_gradient
        case _:
            assert_never(loss)


def _correction(correction: CorrectionConfig) -> Correction:
    match correction:
        case Mask():
            return partial(corrections.mask, low=correction.low, high=correction.high)
        case Truncate():
            return partial(corrections.truncate, high=correction.high)
        case KPop():
            return partial(corrections.kpop, threshold=correction.threshold)
        case Uncorrected():
            return corrections.uncorrected
        case SequenceMask():
            return partial(corrections.sequence_mask, low=correction.low, high=correction.high)
        case _:
            assert_never(correction)
