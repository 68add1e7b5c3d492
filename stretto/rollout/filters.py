"""Filters: a filter names the trajectories of a group that are not trained on, each with its reason.

A filter sees the group as the filters before it have left it. A group with too few trajectories left is replaced: its
place is free, and the next admission draws another prompt. `rollout.config.FILTERS` has those that a recipe names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from stretto.core.records import Group, Outcome, Prompt, Segment, StopReason, Trajectory, Verdict, trajectory_id
from stretto.rollout.config import FILTERS, RolloutConfig

#: A group -> the reason for each trajectory that is refused, by its id.
Filter = Callable[[Group], Mapping[str, str]]


def truncated(group: Group) -> Mapping[str, str]:
    """Completions that were cut off at `sampling.max_tokens`: their reward would be noise (DAPO, arXiv 2503.14476,
    section 3.4, overlong filtering)."""
    cut = (t.id for t in group.trajectories if t.stop_reason is StopReason.LENGTH)
    return dict.fromkeys(cut, "cut off at its length")


def success_rate(group: Group, low: float, high: float) -> Mapping[str, str]:
    """Groups whose share of right completions is below `low` or above `high`: too hard, or too easy."""
    right = sum(t.verdict.outcome is Outcome.RIGHT for t in group.trajectories)
    rate = right / len(group.trajectories)
    return {} if low <= rate <= high else _all(group, f"{right} of {len(group.trajectories)} completions are right")


def zero_variance(group: Group) -> Mapping[str, str]:
    """Equal rewards, those of turns included, mean equal advantages, hence no gradient (DAPO, arXiv 2503.14476, dynamic
    sampling)."""
    rewards = {
        (t.reward, *(segment.reward for segment in t.segments if segment.reward is not None))
        for t in group.trajectories
    }
    return _all(group, f"all rewards are {rewards.pop()[0]:g}") if len(rewards) == 1 else {}


def filters(config: RolloutConfig) -> tuple[Filter, ...]:
    """The filters of the recipe, in their order: those of single completions first, then those of whole groups."""
    chosen: list[Filter] = []
    if config.truncated == "filter":
        chosen.append(truncated)
    if (config.success_rate_min, config.success_rate_max) != (0, 1):
        chosen.append(partial(success_rate, low=config.success_rate_min, high=config.success_rate_max))
    return (*chosen, *map(FILTERS.bound, config.filters))


def filter_faults(refuses: Filter) -> Iterator[str]:
    """A sentence for each way in which a filter is none, tried on made-up groups. It may raise whatever it raises."""
    for rewards in ((1.0, 0.0, 0.0, 1.0), (0.0, 0.0), (1.0,)):
        group = _made_up(rewards)
        ids = {trajectory.id for trajectory in group.trajectories}
        found: object = refuses(group)
        if not isinstance(found, Mapping):
            yield f"returned {type(found).__name__}, and not a reason for each trajectory that is refused, by its id"
        elif strange := [id for id in found if id not in ids]:
            yield f"refuses {strange[0]!r}, which is no trajectory of the group; ids are such as {min(ids)!r}"
        elif bare := [reason for reason in found.values() if not (isinstance(reason, str) and reason)]:
            yield f"gives {bare[0]!r} as a reason, and not a text"


def _made_up(rewards: Sequence[float]) -> Group:
    """A group whose last completion was cut off."""
    ends = [StopReason.STOP] * (len(rewards) - 1) + [StopReason.LENGTH]
    trajectories = []
    for member, (reward, end) in enumerate(zip(rewards, ends, strict=True)):
        segment = Segment((4, 4, 2), (-0.1, -0.7, -0.02), (6, 6, 7), stop_reason=end)
        verdict = Verdict(Outcome.RIGHT if reward else Outcome.WRONG, reward)
        trajectories.append(Trajectory(trajectory_id("0.17.0", member), (segment,), verdict, "11"))
    return Group("0.17.0", Prompt("17", (5, 12, 8, 13), "3+8=", "11"), 6, tuple(trajectories), 4.0)


def refused(group: Group, chosen: tuple[Filter, ...], fewest: int) -> dict[str, str]:
    """The trajectories of the group that are not trained on, each with its reason: all of them, if fewer than `fewest`
    would be left."""
    reasons: dict[str, str] = {}
    for refuses in chosen:
        left = tuple(t for t in group.trajectories if t.id not in reasons)
        if not left:
            break
        reasons |= refuses(_of(group, left))
    left = tuple(t for t in group.trajectories if t.id not in reasons)
    if reasons and len(left) < fewest:
        reasons |= _all(_of(group, left), f"only {len(left)} completions of the group are left")
    return reasons


def _all(group: Group, reason: str) -> dict[str, str]:
    return dict.fromkeys((t.id for t in group.trajectories), reason)


def _of(group: Group, trajectories: tuple[Trajectory, ...]) -> Group:
    return msgspec.structs.replace(group, trajectories=trajectories)
