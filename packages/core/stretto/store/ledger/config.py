"""The settings of the store."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class StoreConfig(BaseModel, extra="forbid", frozen=True):
    """Section ``[store]`` of a recipe."""

    keep_payloads: Literal["all", "trained", "none"] = Field(
        default="all",
        description="trajectories whose tokens, log-probabilities and text stay in the ledger; none: they are "
        "deleted once no checkpoint needs them for a resume",
    )
    flush_seconds: float = Field(
        default=0.25,
        ge=0,
        le=60,
        description="the ledger is flushed when a group is issued this many seconds after the last flush",
    )
    sample_seconds: float = Field(
        default=20.0,
        ge=0,
        le=86_400,
        description="seconds between sample completions in the log and in samples.jsonl; 0: none",
    )
    keep_checkpoints: int = Field(
        default=2,
        ge=2,
        description="newest checkpoints that are kept; one more exists while it is written",
    )
