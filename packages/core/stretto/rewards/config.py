"""The settings of the reward service."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from stretto.core.states import LARGEST_REWARD
from stretto.doors.door import AS_TUPLE
from stretto.rewards.built_in import BUILT_IN, timeout_of
from stretto_verify.models import AddressConfig, JudgeConfig, RewardModelConfig
from stretto_verify.sandbox.config import SandboxConfig

_AFTER_PROGRAMS = 15.0  #: seconds for the restart of a failed sandbox


Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], AS_TUPLE]


class RewardPart(BaseModel, extra="forbid", frozen=True):
    """One of several rewards (a table of `functions`). The reward of a completion is the weighted sum of the parts for
    its source. The first of these decides whether the completion is right; one undecided part makes it undecided.

    Example: ``RewardPart(name="form", function="my_rewards:has_box", weight=0.2)``
    """

    function: str = Field(min_length=1, description="as `rewards.function`")
    name: str = Field(
        default="",
        description="name of its metric; left out: the last part of `function`",
        pattern=r"^[A-Za-z0-9_.-]*$",
    )
    weight: float = Field(
        default=1.0,
        ge=-LARGEST_REWARD,
        le=LARGEST_REWARD,
        description="weight in the sum; 0: it is only measured; negative: a penalty",
    )
    sources: Names = Field(
        default=(), description="names of the sources whose completions it judges; left out: all sources"
    )

    @property
    def title(self) -> str:
        """Name of the part: `name`, else what follows the colon in `function`."""
        return self.name or self.function.rpartition(":")[2]


class RewardsConfig(BaseModel, extra="forbid", frozen=True):
    """Section ``[rewards]`` of a recipe."""

    function: str = Field(
        default="final_answer",
        min_length=1,
        description="A built-in reward (final_answer, exact_match, last_number, math, code, judge, "
        "reward_model, reasoning_gym), "
        "or 'package.module:function'.",
    )
    functions: Annotated[tuple[RewardPart, ...], AS_TUPLE] = Field(
        default=(), description="Several rewards in place of `function`: `[[rewards.functions]]`."
    )
    path: str | None = Field(
        default=None,
        description="Folder in which the modules of functions are looked for first, before the folder that stretto is "
        "started from; left out: the recipe's folder, if one is there.",
    )
    workers: int = Field(default=1, ge=1, le=256, description="Processes that judge completions.")
    timeout: float | None = Field(
        default=None,
        gt=0,
        le=3600,
        description="Seconds of processor time one completion may take, or ten times as many by the clock, at most "
        "60 more; then its worker is killed. Left out: the reward's own limit, 1 s for most; of several, the sum of "
        "theirs.",
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
    reward_model: RewardModelConfig = RewardModelConfig()

    @property
    def parts(self) -> tuple[RewardPart, ...]:
        """Rewards to add up: `functions`, or the single `function`."""
        return self.functions or (RewardPart(function=self.function),)

    @property
    def title(self) -> str:
        """Name of the reward as the recipe gives it: the function, or the titles of all parts, joined by " + "."""
        return " + ".join(part.title for part in self.functions) or self.function

    @property
    def deciding(self) -> str:
        """The function that decides whether a completion is right: the first part's; "" if that judges only some
        sources."""
        return "" if self.parts[0].sources else self.parts[0].function

    @property
    def seconds_per_completion(self) -> float:
        """Time limit for one completion in CPU seconds: the recipe's `timeout`, otherwise the sum of the rewards' own
        limits."""
        return self.timeout or sum(timeout_of(part.function) for part in self.parts)

    def alone(self, part: RewardPart) -> Self:
        """Copy the settings with `part` as the only reward."""
        return self.model_copy(update={"function": part.function, "functions": ()})

    def section(self, function: str) -> str:
        """Settings of the reward `function` as JSON: the section of the recipe with its name; ``{}`` if it takes
        none."""
        configured = function in BUILT_IN and BUILT_IN[function].configured
        section: BaseModel | None = getattr(self, function) if configured else None
        return "{}" if section is None else section.model_dump_json()

    def has(self, function: str) -> bool:
        """Whether `function` is the function of a part."""
        return any(part.function == function for part in self.parts)

    @model_validator(mode="after")
    def _the_parts_have_names(self) -> Self:
        if self.functions and self.function != "final_answer":
            raise ValueError(f"give either function ({self.function!r}) or functions, of which each is one reward")
        names = Counter(part.title for part in self.functions)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"two of the functions are called {twice[0]!r}; give each a name of its own")
        if self.functions and not any(part.weight for part in self.functions):
            raise ValueError("all functions have weight 0, so every completion would get the same reward")
        return self

    @property
    def asked(self) -> dict[str, AddressConfig]:
        """Server settings of the rewards in use that ask a server, by section (``judge``, ``reward_model``); empty if
        none does."""
        sections: dict[str, AddressConfig] = {"judge": self.judge, "reward_model": self.reward_model}
        return {name: section for name, section in sections.items() if self.has(name)}

    @model_validator(mode="after")
    def _what_is_asked_can_answer_in_time(self) -> Self:
        for name, section in self.asked.items():
            if not (section.address and section.model):
                raise ValueError(f'function = "{name}" needs {name}.address and {name}.model')
            if self.seconds_per_completion <= section.seconds:
                found = f"timeout ({self.seconds_per_completion:g}) must be more than {name}.seconds"
                raise ValueError(f"{found} ({section.seconds:g})")
        return self

    @model_validator(mode="after")
    def _right_is_worth_more(self) -> Self:
        if self.right <= self.wrong:
            raise ValueError(f"right ({self.right:g}) must be greater than wrong ({self.wrong:g})")
        return self

    @model_validator(mode="after")
    def _a_program_ends_before_its_worker(self) -> Self:
        needed = self.code.completion_seconds + _AFTER_PROGRAMS
        if self.has("code") and self.seconds_per_completion < needed:
            raise ValueError(
                f"timeout ({self.seconds_per_completion:g}) must leave room for code.completion_seconds: "
                f"{needed:g} or more"
            )
        return self
