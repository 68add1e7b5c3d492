"""Test a filter or pacing policy on made-up groups before a run. A fault is a phrase that follows the name of the
filter or policy in a message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stretto.core.records import Group, Outcome, Prompt, Segment, StopReason, Trajectory, Verdict, trajectory_id
from stretto.rollout.config import PACINGS, RolloutConfig
from stretto.rollout.filters import Filter
from stretto.rollout.pacing import Pacing, pacing_of


def filter_faults(refuses: Filter) -> Iterator[str]:
    """Call a filter on made-up groups and yield the faults of its results. Errors raised by the filter pass through."""
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
    """A group with one trajectory per reward, the last of them truncated."""
    ends = [StopReason.STOP] * (len(rewards) - 1) + [StopReason.LENGTH]
    trajectories = []
    for member, (reward, end) in enumerate(zip(rewards, ends, strict=True)):
        segment = Segment.of((4, 4, 2), (-0.1, -0.7, -0.02), (6, 6, 7), stop_reason=end)
        verdict = Verdict(Outcome.RIGHT if reward else Outcome.WRONG, reward)
        trajectories.append(Trajectory(trajectory_id("0.17.0", member), (segment,), verdict, "11"))
    return Group("0.17.0", Prompt("17", (5, 12, 8, 13), "3+8=", "11"), 6, tuple(trajectories), 4.0)


def pacing_faults(config: RolloutConfig) -> Iterator[str]:
    """Create and call the recipe's pacing policy, and yield the faults found. Errors raised by it pass through."""
    if not callable(getattr(PACINGS.bound(config.pacing)(), "opens", None)):
        yield "has no method opens(may_start, in_flight) (docs/how_to/doors/pacing.md)"
        return
    policy = pacing_of(config, in_rounds=False)
    for may_start, in_flight in ((True, 0), (True, 1), (False, 1), (False, 0)):
        opens = policy.opens(may_start, in_flight)
        if not isinstance(opens, bool):
            yield f"returned {opens!r} for opens({may_start}, {in_flight}), and not whether a group starts"
            return


def admits_early(policy: Pacing) -> bool:
    """Whether a policy starts a group although equation 3 or `max_in_flight` forbids it."""
    return any(policy.opens(False, in_flight) for in_flight in (0, 1, 2))
