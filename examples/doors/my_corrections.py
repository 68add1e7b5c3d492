"""A correction: weights are clamped to an interval, and none becomes 0.

[algorithm]
correction = { kind = "my_corrections:between", low = 0.5, high = 2.0 }
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stretto.trainer.objective.corrections import Weights
from stretto.trainer.objective.decoupled_ppo import behavior_weight
from stretto.trainer.objective.tokens import LossTokens

Low = Annotated[float, Field(gt=0, le=1, description="smaller weights become this")]
High = Annotated[float, Field(ge=1, description="larger weights become this")]


def between(tokens: LossTokens, *, low: Low = 0.5, high: High = 2.0) -> Weights:
    """Clamp the weights to `low` … `high`."""
    weight = behavior_weight(tokens)
    return Weights(weight.clamp(low, high), (weight < low) | (weight > high))
