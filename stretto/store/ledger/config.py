"""The settings of the store."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class StoreConfig(BaseModel, extra="forbid", frozen=True):
    """Section ``[store]`` of a recipe."""

    keep_payloads: Literal["all", "trained", "none"] = Field(
        default="all",
        description="Whose tokens, log-probabilities and text stay in the ledger; none: as long as a crash would need "
        "them, until they are behind the oldest checkpoint.",
    )
    flush_seconds: float = Field(
        default=0.25,
        ge=0,
        le=60,
        description="The ledger writes with the first group that is issued so long after its last writing.",
    )
    sample_seconds: float = Field(
        default=20.0,
        ge=0,
        le=86_400,
        description="Seconds between completions that are shown while training and kept in samples.jsonl; 0: none.",
    )
    keep_checkpoints: int = Field(
        default=2,
        ge=2,
        description="How many of the newest checkpoints are kept; while one is written, another is needed.",
    )
