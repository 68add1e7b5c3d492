"""The `[rollout]` section of a recipe."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field

BeyondBound = Literal["train", "wait", "mask", "expire"]


def _whole_or_infinite(value: float) -> float:
    if not math.isinf(value) and value != int(value):
        raise ValueError("must be a whole number of versions, or inf")
    return value


class RolloutConfig(BaseModel, extra="forbid", frozen=True, ser_json_inf_nan="strings"):
    """How prompts become batches. Counts are of groups (one prompt with its completions), if not said otherwise."""

    batch_size: int = Field(32, ge=1, description="groups that one training step consumes (B)")
    group_size: int = Field(8, ge=1, description="completions sampled for one prompt (G)")
    max_in_flight: int = Field(32, ge=1, description="groups generated or scored at the same time")
    max_staleness: Annotated[float, Field(ge=0), AfterValidator(_whole_or_infinite)] = Field(
        4, description="versions allowed between sampling and training (eta); 0 is synchronous, inf is no bound"
    )
    beyond_bound: BeyondBound = Field("mask", description="what happens to tokens beyond max_staleness")
    filter: Literal["none", "zero_variance"] = Field(
        "none", description="groups that are not trained on; zero_variance: all rewards of the group are equal"
    )
    success_rate_min: float = Field(0.0, ge=0, le=1, description="least share of right completions to train on a group")
    success_rate_max: float = Field(
        1.0, ge=0, le=1, description="largest share of right completions to train on a group"
    )
    truncated: Literal["train", "filter"] = Field(
        "train", description="completions cut off at sampling.max_tokens; filter: they are not trained on"
    )
    min_group_size: int = Field(1, ge=1, description="decided completions that a group needs to be trained on")
    max_attempts: int = Field(3, ge=1, description="times that one prompt is tried when its groups fail")
    max_failures_in_a_row: int = Field(50, ge=1, description="failed groups in a row after which the run stops")
