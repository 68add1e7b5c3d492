"""The settings of the reward service."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, Field, model_validator

from stretto.rewards.built_in import BUILT_IN, timeout_of
from stretto.rewards.functions import LARGEST_REWARD
from stretto.rewards.judge import JudgeConfig
from stretto.sandbox.config import SandboxConfig

_AFTER_PROGRAMS = 15.0  #: seconds in which a sandbox that failed is started again


class RewardsConfig(BaseModel, extra="forbid", frozen=True):
    """Section ``[rewards]`` of a recipe."""

    function: str = Field(
        default="final_answer",
        min_length=1,
        description="A built-in reward (final_answer, exact_match, last_number, math, code, judge, reasoning_gym), "
        "or 'package.module:function'.",
    )
    path: str | None = Field(
        default=None,
        description="Folder in which the module of `function` is looked for first, before the folder that stretto is "
        "started from; left out: the recipe's folder, if the module is there.",
    )
    workers: int = Field(default=1, ge=1, le=256, description="Processes that judge completions.")
    timeout: float | None = Field(
        default=None,
        gt=0,
        le=3600,
        description="Seconds one completion may take; then its worker is killed. Left out: the reward's own limit, 1 s "
        "for most.",
    )
    memory_gib: float = Field(
        default=16.0,
        ge=0.25,
        allow_inf_nan=False,
        description="GiB of memory of one worker, and of each process that the reward starts: beyond it the reward "
        "gets a MemoryError. Importing torch takes 0.25.",
    )
    right: float = Field(
        default=1.0,
        ge=-LARGEST_REWARD,
        le=LARGEST_REWARD,
        description="Reward of a right completion. A reward beyond ±1e6 is no verdict: the completion is undecided.",
    )
    wrong: float = Field(
        default=0.0, ge=-LARGEST_REWARD, le=LARGEST_REWARD, description="Reward of a wrong completion."
    )
    max_consecutive_undecided: int = Field(
        default=256, ge=1, description="Undecided completions in a row that end the run: the reward is broken."
    )
    start_timeout: float = Field(
        default=60.0, gt=0, description="Seconds a worker may take to start and to import the reward."
    )
    recycle_after: int = Field(
        default=10_000,
        ge=1,
        description="Completions after which a worker is replaced, which ends leaks of the reward.",
    )
    patience: float = Field(
        default=600.0, gt=0, description="Seconds a caller waits for its verdicts, the queue included."
    )

    code: SandboxConfig = SandboxConfig()
    judge: JudgeConfig = JudgeConfig()

    @property
    def seconds_per_completion(self) -> float:
        """The hard limit for one completion: the recipe's, else that of the reward."""
        return timeout_of(self.function) if self.timeout is None else self.timeout

    @property
    def section(self) -> str:
        """The section of a built-in that has one, as JSON."""
        configured = self.function in BUILT_IN and BUILT_IN[self.function].configured
        section: BaseModel | None = getattr(self, self.function) if configured else None
        return "{}" if section is None else section.model_dump_json()

    @model_validator(mode="after")
    def _a_judge_can_be_asked_in_time(self) -> Self:
        if self.function == "judge" and not (self.judge.address and self.judge.model):
            raise ValueError('function = "judge" needs judge.address and judge.model')
        if self.function == "judge" and self.seconds_per_completion <= self.judge.seconds:
            found = (
                f"timeout ({self.seconds_per_completion:g}) must be more than judge.seconds ({self.judge.seconds:g})"
            )
            raise ValueError(found)
        return self

    @model_validator(mode="after")
    def _right_is_worth_more(self) -> Self:
        if self.right <= self.wrong:
            raise ValueError(f"right ({self.right:g}) must be greater than wrong ({self.wrong:g})")
        return self

    @model_validator(mode="after")
    def _a_program_ends_before_its_worker(self) -> Self:
        needed = self.code.completion_seconds + _AFTER_PROGRAMS
        if self.function == "code" and self.seconds_per_completion < needed:
            raise ValueError(
                f"timeout ({self.seconds_per_completion:g}) must leave room for code.completion_seconds: "
                f"{needed:g} or more"
            )
        return self
