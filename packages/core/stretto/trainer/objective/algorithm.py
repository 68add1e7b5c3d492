"""`[algorithm]` of a recipe: the objective. Each choice with parameters is a section with a `kind`. A bare name means
the section with its defaults: ``loss = "ppo"`` is ``loss = {kind = "ppo"}``. The sections are built from the parameters
of functions (`doors.door`), which may be the user's: ``loss = {kind = "my_losses:clipped", clip = 0.3}``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from stretto.doors.door import Section
from stretto.trainer.config import CriticConfig
from stretto.trainer.objective import kl
from stretto.trainer.objective.advantages import Shaping
from stretto.trainer.objective.aggregation import Aggregation
from stretto.trainer.objective.corrections import CORRECTIONS
from stretto.trainer.objective.estimators import ESTIMATORS, EstimatorSection
from stretto.trainer.objective.kl import Divergence
from stretto.trainer.objective.surrogates import LOSSES, LossSection


class ReferenceConfig(BaseModel, extra="forbid", frozen=True, ser_json_inf_nan="constants"):
    """A KL penalty towards a reference policy. The trainer holds that policy's weights too, unless it is the trained
    policy with its adapters disabled."""

    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of KL(policy || reference)")
    weight: float = Field(1e-3, ge=0, allow_inf_nan=False, description="weight of the divergence")
    into: Literal["loss", "reward"] = Field(
        "loss", description="loss: a term of its own; reward: each token's reward is lowered, before the advantages"
    )
    path: str | None = Field(None, description="Hugging Face folder; none: the policy that the run starts from")


class AlgorithmConfig(BaseModel, extra="forbid", frozen=True, ser_json_inf_nan="constants"):
    """The objective: the loss, the advantages, and the reference policy."""

    loss: Annotated[LossSection, LOSSES] = Field(
        LOSSES("decoupled_ppo"), description="surrogate objective that is maximised, with its trust region"
    )
    correction: Annotated[Section, CORRECTIONS] = Field(
        CORRECTIONS("mask"), description="weights of tokens that another policy sampled"
    )
    aggregation: Aggregation = Field(
        "token_mean",
        description="token_mean: over all tokens; sequence_mean: over completions, of their means; "
        "fixed_length: over completions, of their sums over sampling.max_tokens",
    )
    advantages: Annotated[EstimatorSection, ESTIMATORS] = Field(
        ESTIMATORS("group"), description="estimator of the advantages"
    )
    shaping: Shaping = Field(Shaping(), description="changes to the rewards before advantages are computed")
    reference: ReferenceConfig | None = Field(
        None, description="the reference policy of the KL term; left out: none is loaded"
    )
    entropy: bool = Field(False, description="measure the policy's entropy (costs time, changes nothing)")
    entropy_bonus: float = Field(0.0, ge=0, allow_inf_nan=False, description="weight of the mean entropy in J")

    def divergence(self, into: Literal["loss", "reward"]) -> Divergence | None:
        """The KL estimator (`objective.kl`) if the recipe adds the divergence to `into`; None if it adds it to the
        other, or has no reference policy."""
        reference = self.reference
        return getattr(kl, reference.estimator) if reference is not None and reference.into == into else None

    @property
    def critic(self) -> CriticConfig | None:
        """Settings of the critic; None if the advantages use no critic."""
        critic: CriticConfig | None = getattr(self.advantages, "critic", None)
        return critic

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.loss.anchor == "behavior" and self.correction != CORRECTIONS("mask"):
            raise ValueError(
                f'loss "{self.loss.kind}" is anchored at the policy that sampled, so every weight anchor / behavior is '
                f'1 and correction "{self.correction.kind}" does nothing; choose a loss with anchor = "recomputed", or '
                'remove the correction (correction = "mask" leaves every weight as it is)'
            )
        return self
