"""The `[rollout]` section of a recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from stretto.doors.door import Door, Section

#: Filters that a recipe names in `rollout.filter`. The other functions of `rollout.filters` have keys of their own.
FILTERS = Door(
    key="rollout.filter",
    what="filter",
    arguments=("group",),
    built_in={"zero_variance": "stretto.rollout.filters:zero_variance"},
    section=Section,
    words=("none",),
    several=True,
)
#: Admission policies that a recipe names in `rollout.pacing`.
PACINGS = Door(
    key="rollout.pacing",
    what="admission policy",
    arguments=(),
    built_in={"continuous": "stretto.rollout.pacing:Continuous", "rounds": "stretto.rollout.pacing:InRounds"},
    section=Section,
    words=("auto",),
)
BeyondBound = Literal["train", "wait", "mask", "expire"]


def _whole_or_infinite(value: float) -> float:
    if not math.isinf(value) and value != int(value):
        raise ValueError("must be a whole number of versions, or inf")
    return value


class RolloutConfig(BaseModel, extra="forbid", frozen=True, ser_json_inf_nan="strings"):
    """Admission and batching of prompts. Counts are of groups (one prompt with its completions) unless stated
    otherwise."""

    batch_size: int = Field(32, ge=1, description="groups that one training step consumes (B)")
    group_size: int = Field(8, ge=1, description="completions sampled for one prompt (G)")
    max_in_flight: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        32,
        description="groups generated or scored at the same time; auto: raised while the engines have room for more, "
        "lowered when completions are preempted or wait",
    )
    max_in_flight_min: int = Field(8, ge=1, description='smallest number that max_in_flight = "auto" chooses')
    max_in_flight_max: int = Field(256, ge=1, description='largest number that max_in_flight = "auto" chooses')
    max_staleness: Annotated[float, Field(ge=0), AfterValidator(_whole_or_infinite)] | Literal["auto"] = Field(
        4.0,
        description="versions allowed between sampling and training (eta); 0 is synchronous, inf is no bound; auto: "
        "raised while the measured mismatch of the policies allows it, lowered when it does not",
    )
    staleness_min: int = Field(1, ge=0, le=1024, description='smallest bound that max_staleness = "auto" chooses')
    staleness_max: int = Field(8, ge=0, le=1024, description='largest bound that max_staleness = "auto" chooses')
    beyond_bound: BeyondBound = Field("mask", description="what happens to tokens beyond max_staleness")
    filter: Annotated[str | Section | tuple[str | Section, ...], FILTERS] = Field(
        "none",
        description="groups that are not trained on; zero_variance: all rewards of the group are equal; a list of "
        "several (docs/how_to/doors/filter.md)",
    )
    pacing: Annotated[str | Section, PACINGS] = Field(
        "auto",
        description="when groups start; continuous: each as soon as equation 3 allows it; rounds: together; auto: as "
        "engine.batching (docs/how_to/doors/pacing.md)",
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

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.staleness_min > self.staleness_max:
            found = f"staleness_min = {self.staleness_min} is more than staleness_max = {self.staleness_max}"
            raise ValueError(f"{found}; lower the first or raise the second")
        if self.max_in_flight_min > self.max_in_flight_max:
            found = f"max_in_flight_min = {self.max_in_flight_min} is more than max_in_flight_max = "
            raise ValueError(f"{found}{self.max_in_flight_max}; lower the first or raise the second")
        return self

    @property
    def filters(self) -> tuple[str | Section, ...]:
        """The filters named by `filter`, without "none"; each a name, or a section if the filter has options."""
        named = self.filter if isinstance(self.filter, tuple) else (self.filter,)
        return tuple(one for one in named if one != "none")

    @property
    def staleness_bounds(self) -> tuple[float, float]:
        """Smallest and largest possible staleness bound, in versions; equal if it is fixed, inf without a bound."""
        if self.max_staleness == "auto":
            return self.staleness_min, self.staleness_max
        return self.max_staleness, self.max_staleness

    @property
    def in_flight_bounds(self) -> tuple[int, int]:
        """Smallest and largest possible number of groups in flight; equal if it is fixed."""
        if self.max_in_flight == "auto":
            return self.max_in_flight_min, self.max_in_flight_max
        return self.max_in_flight, self.max_in_flight


def contradictions(config: RolloutConfig, prefix: str = "") -> Iterator[str]:
    """Yield a sentence for each pair of settings with which no batch is ever formed: what contradicts what, and what
    helps. `prefix`: stands in front of each key, as "rollout."."""
    if config.group_size == 1 and "zero_variance" in config.filters:
        yield (
            f'{prefix}group_size = 1 and {prefix}filter = "zero_variance" would filter every group; '
            'use a larger group or filter = "none"'
        )
    if config.success_rate_min > config.success_rate_max:
        yield (
            f"{prefix}success_rate_min = {config.success_rate_min:g} is more than "
            f"{prefix}success_rate_max = {config.success_rate_max:g}: no group could be trained on; "
            "lower the first or raise the second"
        )
    if config.min_group_size > config.group_size:
        yield (
            f"{prefix}min_group_size = {config.min_group_size} is more than "
            f"{prefix}group_size = {config.group_size}; lower the first or raise the second"
        )
