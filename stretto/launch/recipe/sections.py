"""Sections of a recipe that belong to no single room: model, sampling, evaluation."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from stretto.core.records import COLDEST, LONGEST_STOP, MOST_STOPS, Sampling
from stretto.model.hf.config import BuildConfig
from stretto.trainer.config import as_tuple


class ModelConfig(BaseModel, extra="forbid", frozen=True):
    """The first policy: a Hugging Face folder, or a new model with random weights."""

    path: str | None = Field(None, description="Hugging Face folder, relative to the recipe's folder")
    build: BuildConfig | None = Field(None, description="architecture and alphabet of a new model")

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.path is None) == (self.build is None):
            raise ValueError("give either model.path or [model.build]")
        return self


StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP, pattern=r"^[^\uFFFD]*$")]


class SamplingConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """The sampling of completions; engine and trainer compute the same distribution.

    Temperature, then top_k, then top_p, then min_p; log-probabilities are of the remaining distribution.
    """

    max_tokens: int = Field(256, ge=1, description="most tokens of a completion")
    temperature: float = Field(1.0, ge=COLDEST, le=10, description="divides the logits")
    top_p: float = Field(1.0, gt=0, le=1, description="smallest set of likeliest tokens whose probability reaches this")
    top_k: int = Field(0, ge=0, description="number of likeliest tokens; 0: all")
    min_p: float = Field(
        0.0, ge=0, le=1, description="least probability of a token, as a fraction of the likeliest one's"
    )
    stop: Annotated[tuple[StopText, ...], BeforeValidator(as_tuple)] = Field(
        (),
        max_length=MOST_STOPS,
        description="texts that end a completion, beside the end-of-sequence token",
    )

    def record(self, stop_token_ids: tuple[int, ...]) -> Sampling:
        """The setting as a record for requests and the trainer."""
        return Sampling(stop_token_ids=stop_token_ids, **self.model_dump())


class EvaluationConfig(BaseModel, extra="forbid", frozen=True):
    """Held-out accuracy, sampled as in training but with a fixed seed: at the start, at the end and between."""

    prompts: int = Field(512, ge=1, description="held-out prompts of each evaluation")
    every: int = Field(0, ge=0, description="training steps between evaluations; 0: at the start and the end only")
    seed: int = Field(20_250_530, ge=0, description="seed of the sampling, the same for all evaluations")
