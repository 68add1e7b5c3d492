"""The settings of the store, and of the token files (`series/tokens.py`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field


class StoreConfig(BaseModel, extra="forbid", frozen=True):
    """Section ``[store]`` of a recipe: what a run folder keeps, and how often the ledger is flushed."""

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


#: Bytes per sampled token in the token files: three columns of float32 and one of uint8.
TOKEN_BYTES = 13
GIB = 1 << 30


class TokensConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Settings of the per-token training data; part of section ``[logging]``."""

    tokens: Literal["all", "none"] | Annotated[int, Field(ge=1)] = Field(
        "all",
        description="steps for which per-token training data are kept: all, none, or every n-th",
    )
    tokens_gib: float = Field(1.0, gt=0, description="most GiB of per-token data; the oldest steps are deleted first")

    def keeps(self, step: int) -> bool:
        """Whether per-token data of this step are written."""
        return self.tokens == "all" or (self.tokens != "none" and step % self.tokens == 0)

    def most_bytes(self, tokens: int) -> int:
        """Most bytes of the token files of a run that trains on this many `tokens`: of those that it keeps, at most
        `tokens_gib`; 0 if the recipe keeps none."""
        if self.tokens == "none":
            return 0
        every = 1 if self.tokens == "all" else self.tokens
        return min(int(self.tokens_gib * GIB), tokens * TOKEN_BYTES // every)
