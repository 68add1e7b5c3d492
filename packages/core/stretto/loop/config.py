"""Deadlines and restart budgets of a run."""

from __future__ import annotations

from pydantic import BaseModel, Field


class DeadlinesConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Deadlines in seconds for the events below, and restart budgets. A wait that exceeds its deadline fails with an
    error that names who waited, and for what; it ends the run, unless the role it waited for can be replaced."""

    start: float = Field(
        180.0, gt=0, description="a role to load its model and to be ready; restarts with any progress"
    )
    warm_start: float = Field(3600.0, gt=0, description="the whole supervised warm start")
    answer: float = Field(
        600.0, gt=0, description="an engine to send the next completion; restarts with each new token"
    )
    load: float = Field(120.0, gt=0, description="an engine or server to load a version; restarts with any progress")
    pull: float = Field(
        600.0, gt=0, description="another machine to download a version, or the model; restarts with any progress"
    )
    step: float = Field(1800.0, gt=0, description="the trainer to finish one step")
    batch: float = Field(1800.0, gt=0, description="the next batch to be complete")
    save: float = Field(600.0, gt=0, description="the trainer to write a checkpoint or a policy")
    stop: float = Field(6.0, gt=0, le=60, description="a clean stop to finish the step in progress")
    hung: float = Field(10.0, gt=0, description="a role's process to send the next heartbeat; then it is killed")
    still: float = Field(300.0, gt=0, description="the run to make any progress; then it ends")
    trainer_restarts: int = Field(3, ge=0, description="how often the trainer may be replaced within `restart_window`")
    engine_restarts: int = Field(5, ge=0, description="how often one engine may be replaced within `restart_window`")
    restart_window: float = Field(
        3600.0, gt=0, description="seconds for which replacements are counted; a role with more of them ends the run"
    )

    @property
    def longest_pull(self) -> float:
        """Seconds that the conductor waits for the download of another machine. Longer than `pull`, the machine's own
        deadline, so that the machine reports its error first."""
        return 1.5 * self.pull
