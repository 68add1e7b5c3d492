"""Records whose unimportant parts are always the same."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.core.records import (
    Batch,
    Completion,
    Group,
    Outcome,
    Prompt,
    Segment,
    StopReason,
    Trajectory,
    Update,
    Verdict,
    trajectory_id,
)

PROMPT = Prompt(id="17", token_ids=(5, 12, 8, 13), text="3+8=", answer="11")


class Make:
    """Builds records whose unimportant parts are always the same."""

    prompt = PROMPT

    @staticmethod
    def trajectory(group: str, member: int = 0, versions: Sequence[int] = (0, 0), right: bool = True) -> Trajectory:
        completion = Completion(
            group,
            member,
            Segment.of(
                token_ids=tuple(range(4, 4 + len(versions))),
                behavior_logprobs=tuple(-0.25 * (t + 1) for t in range(len(versions))),
                versions=tuple(versions),
                interrupted=len(set(versions)) - 1 if versions else 0,
                stop_reason=StopReason.STOP,
            ),
        )
        outcome = Outcome.RIGHT if right else Outcome.WRONG
        verdict = Verdict(outcome=outcome, reward=1.0 if right else 0.0)
        return Trajectory(id=trajectory_id(group, member), segments=(completion.segment,), verdict=verdict, text="11")

    @staticmethod
    def group(name: str, *trajectories: Trajectory, admitted_version: int = 0) -> Group:
        return Group(id=name, prompt=PROMPT, admitted_version=admitted_version, trajectories=trajectories)

    @staticmethod
    def batch(step: int, *groups: Group, version: int | None = None, oldest_trainable: int = 0) -> Batch:
        at = step - 1 if version is None else version
        return Batch(step=step, version=at, groups=groups, oldest_trainable=oldest_trainable)

    @staticmethod
    def update(step: int) -> Update:
        return Update(step=step, version=step, trained_tokens=4, masked_tokens=0, metrics={"loss": 0.5})
