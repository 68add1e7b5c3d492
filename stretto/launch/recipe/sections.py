"""The sections of a recipe that belong to no single room: the model, the sampling, the evaluation, the deadlines."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from stretto.core.records import COLDEST, LONGEST_STOP, MOST_STOPS, Sampling
from stretto.model.hf.config import BuildConfig


class ModelConfig(BaseModel, extra="forbid", frozen=True):
    """The policy at the start: a Hugging Face folder, or a new one built from nothing."""

    path: str | None = Field(None, description="Hugging Face folder, relative to the recipe's folder")
    build: BuildConfig | None = Field(None, description="architecture and alphabet of a new model")

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.path is None) == (self.build is None):
            raise ValueError("give either model.path or [model.build]")
        return self


StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP, pattern=r"^[^\uFFFD]*$")]


def _as_tuple(value: object) -> object:
    """TOML has lists; what is not one is left to be refused."""
    return tuple(value) if isinstance(value, list) else value


class SamplingConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """How answers are drawn, for the engine and the trainer alike; there is no second setting.

    Temperature, then top_k, then top_p, then min_p; log-probabilities are of the distribution that is left.
    """

    max_tokens: int = Field(256, ge=1, description="tokens of one answer at most")
    temperature: float = Field(1.0, ge=COLDEST, le=10, description="divides the logits")
    top_p: float = Field(1.0, gt=0, le=1, description="smallest set of likeliest tokens whose probability reaches this")
    top_k: int = Field(0, ge=0, description="this many likeliest tokens; 0: all")
    min_p: float = Field(0.0, ge=0, le=1, description="tokens at least this fraction as likely as the likeliest")
    stop: Annotated[tuple[StopText, ...], BeforeValidator(_as_tuple)] = Field(
        (),
        max_length=MOST_STOPS,
        description="texts that end an answer, beside the end-of-sequence token",
    )

    def record(self, stop_token_ids: tuple[int, ...]) -> Sampling:
        """The same setting as requests and the trainer get it."""
        return Sampling(stop_token_ids=stop_token_ids, **self.model_dump())


class EvaluationConfig(BaseModel, extra="forbid", frozen=True):
    """Held-out accuracy: sampled like the training answers, with a fixed seed, at the start, at the end and between."""

    prompts: int = Field(512, ge=1, description="held-out prompts asked each time")
    every: int = Field(0, ge=0, description="training steps between evaluations; 0: only at the start and the end")
    seed: int = Field(20_250_530, ge=0, description="of the sampling, the same for all evaluations")
