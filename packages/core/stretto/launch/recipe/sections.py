"""Sections of a recipe that belong to no single package: model, sampling, evaluation, logging."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Self

import msgspec
from pydantic import BaseModel, Field, model_validator

from stretto.core.engine import COLDEST, LONGEST_STOP, MOST_STOPS
from stretto.core.errors import UNREADABLE, nearest
from stretto.core.records import Sampling
from stretto.doors.door import AS_TUPLE
from stretto.launch.recipe.extensions import OutletsConfig
from stretto.model.hf.config import BuildConfig
from stretto.rollout.tasks import Source
from stretto.store.config import TokensConfig


class ModelConfig(BaseModel, extra="forbid", frozen=True):
    """Initial policy: a Hugging Face folder, or a new model with random weights."""

    path: str | None = Field(None, description="Hugging Face folder, relative to the recipe's folder")
    build: BuildConfig | None = Field(None, description="architecture and alphabet of a new model")
    special_tokens_in_messages: bool = Field(
        False,
        description="read special tokens that are spelled in chat messages and tool results as tokens; false: as text",
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.path is None) == (self.build is None):
            raise ValueError("give either model.path or [model.build]")
        return self

    def modules(self) -> tuple[str, ...]:
        """Return the names of the transformers modules that the model's architecture needs, to import before roles are
        forked; empty if the architecture is not known."""
        kind = self.build.family if self.build is not None else _kind_in(Path(self.path or ""))
        name = f"transformers.models.{kind}.modeling_{kind}"
        try:
            return (name,) if importlib.util.find_spec(name) is not None else ()
        except (ModuleNotFoundError, ValueError):  # a kind may be any text
            return ()


def _kind_in(folder: Path) -> str:
    """Return the architecture (`model_type`) in a folder's config.json; "" if it has none or cannot be read: another
    check reports that."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, object])
        return str(config.get("model_type", ""))
    except (OSError, *UNREADABLE):
        return ""


StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP, pattern=r"^[^\uFFFD]*$")]


class SamplingConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Sampling of completions; engine and trainer compute the same distribution.

    Temperature applies first, then top_k, top_p, min_p; log-probabilities are of the resulting distribution.
    """

    max_tokens: int = Field(256, ge=1, description="most tokens of a completion")
    temperature: float = Field(1.0, ge=COLDEST, le=10, description="divides the logits")
    top_p: float = Field(1.0, gt=0, le=1, description="smallest set of likeliest tokens whose probability reaches this")
    top_k: int = Field(0, ge=0, description="number of likeliest tokens; 0: all")
    min_p: float = Field(
        0.0, ge=0, le=1, description="least probability of a token, as a fraction of the likeliest one's"
    )
    stop: Annotated[tuple[StopText, ...], AS_TUPLE] = Field(
        (),
        max_length=MOST_STOPS,
        description="texts that end a completion, beside the end-of-sequence token",
    )

    def record(self, stop_token_ids: tuple[int, ...]) -> Sampling:
        """Return the settings as the record that requests and the trainer get. `stop_token_ids`: tokens that end a
        completion, which the tokenizer knows and the recipe does not."""
        return Sampling(stop_token_ids=stop_token_ids, **self.model_dump())


class EvaluationSet(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """A further set of questions, evaluated like the held-out ones."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="name in the log and in metrics.jsonl")
    source: Source = Field(
        description='a source, as in `[[task.sources]]`, such as { data = "aime.jsonl", mapping = "aime" }'
    )
    prompts: int = Field(512, ge=1, description="number of questions, from the first")
    samples: int = Field(1, ge=1, le=1024, description="completions of each prompt")
    every: int = Field(0, ge=0, description="training steps between evaluations")
    minutes: float = Field(0.0, ge=0, description="minutes between evaluations")


class EvaluationConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Held-out accuracy, sampled as in training but with a fixed seed: at the start, at the end and between."""

    prompts: int = Field(512, ge=1, description="held-out prompts of each evaluation")
    samples: int = Field(1, ge=1, le=1024, description="completions of each prompt")
    every: int = Field(0, ge=0, description="training steps between evaluations; 0: at the start and the end only")
    minutes: float = Field(0.0, ge=0, description="minutes between evaluations, beside `every`; 0: by steps alone")
    sets: Annotated[tuple[EvaluationSet, ...], AS_TUPLE] = Field(
        (), description="further sets of questions, tables of `[[evaluation.sets]]`"
    )
    keep_best: bool = Field(False, description="keep the policy of the best evaluation in policy/best")
    patience: int = Field(
        0, ge=0, description="evaluations in a row without a better accuracy after which the run ends; 0: it does not"
    )
    least_gain: float = Field(0.0, ge=0, lt=1, description="least improvement that counts as a better accuracy")
    goal: float = Field(
        0.0, ge=0, le=1, description="accuracy at which the run ends, once `goal_holds` evaluations reach it; 0: none"
    )
    goal_holds: int = Field(2, ge=1, description="evaluations in a row that must reach the goal")
    best_of: str = Field(
        "", description="evaluation set used by keep_best, patience and goal; empty: the held-out questions"
    )
    seed: int = Field(20_250_530, ge=0, description="seed of the sampling, the same for all evaluations")

    @model_validator(mode="after")
    def _sets_fit(self) -> Self:
        names = [one.name for one in self.sets]
        if len(set(names)) < len(names):
            raise ValueError(f"two sets have one name: {', '.join(sorted(names))}")
        if self.best_of and self.best_of not in names:
            raise ValueError(f"best_of = {self.best_of!r} is no set; {nearest(self.best_of, names)}")
        judged = next((one for one in self.sets if one.name == self.best_of), self)
        named = f"patience = {self.patience}" if self.patience else f"goal = {self.goal:g}" if self.goal else ""
        if named and not judged.every and not judged.minutes:
            raise ValueError(
                f"{named} counts evaluations between the start and the end, and there are none; set every or minutes"
            )
        return self


class LoggingConfig(OutletsConfig, TokensConfig, extra="forbid", frozen=True):
    """Per-token data to keep, and the tools that show a run (docs/reference/metrics.md).

    Example: ``LoggingConfig(to=("wandb",), project="arithmetic", tokens="none")``
    """
