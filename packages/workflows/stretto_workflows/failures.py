"""End a run when the share of failures among its recent trajectories is too large."""

from __future__ import annotations

from collections import deque

from stretto.core.errors import Problem, WorkflowError
from stretto.core.records import Outcome, Trajectory

_COUNTED = 64  # window of trajectories for `max_failed`


class RecentFailures:
    """Ends a run, by an error of `count`, when more than the share `max_failed` of its last 64 trajectories is
    undecided; not before 64 have ended.

    Example: with ``max_failed=0.5`` the 33rd failure among 64 ends the run.
    """

    def __init__(self, max_failed: float, who: str) -> None:
        """Count from now on. `max_failed`: largest share of undecided trajectories. `who`: the part to blame in the
        message, "workflow" or "agent"."""
        self._max_failed, self._who = max_failed, who
        self._failed: deque[bool] = deque(maxlen=_COUNTED)
        self.ended = 0  # trajectories so far: a sign of progress

    def count(self, trajectory: Trajectory) -> None:
        """Count a trajectory, which has failed if its verdict is undecided.

        Raises:
            WorkflowError: more than the allowed share of the last 64 trajectories failed; it quotes the reason of this
                trajectory.
        """
        self.ended += 1
        self._failed.append(trajectory.verdict.outcome is Outcome.UNDECIDED)
        failed = sum(self._failed)
        if len(self._failed) == _COUNTED and failed > self._max_failed * _COUNTED:
            found = f"{failed} of the last {_COUNTED} trajectories failed, the last one: {trajectory.verdict.reason}"
            remedy = f"fix the {self._who}, or allow more with workflow.max_failed"
            raise WorkflowError([Problem("workflow", found, remedy)])
