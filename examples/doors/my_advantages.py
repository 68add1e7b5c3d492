"""An advantage estimator: completions are compared by their rank in the group, so that outliers weigh no more.

[algorithm]
advantages = { kind = "my_advantages:ranks", scale = 1.0 }
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from stretto.doors.door import declare
from stretto.trainer.objective.estimators import RewardedCompletion

Scale = Annotated[float, Field(gt=0, description="advantage of the best of a large group")]


@declare(compares=True)
def ranks(groups: Sequence[Sequence[RewardedCompletion]], *, scale: Scale = 1.0) -> list[list[float]]:
    """(completions with a smaller reward - completions with a larger reward) / completions of the group."""
    found = []
    for group in groups:
        rewards = [completion.total for completion in group]
        wins = [sum(other < own for other in rewards) - sum(other > own for other in rewards) for own in rewards]
        found.append([scale * one / len(group) for one in wins])
    return found
