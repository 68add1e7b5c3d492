"""Groups that are not worth a training step."""

from __future__ import annotations

from collections.abc import Callable

from stretto.core.records import Group


def every_group(group: Group) -> str | None:
    """Nothing is filtered."""
    return None


def zero_variance(group: Group) -> str | None:
    """Equal rewards mean equal advantages, hence no gradient (DAPO, arXiv 2503.14476, dynamic sampling)."""
    rewards = {trajectory.reward for trajectory in group.trajectories}
    return f"all rewards are {rewards.pop():g}" if len(rewards) == 1 else None


#: Name in the recipe -> the reason why a group is refused, or None when it may be trained on.
FILTERS: dict[str, Callable[[Group], str | None]] = {"none": every_group, "zero_variance": zero_variance}
