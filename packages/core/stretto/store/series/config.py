"""The settings of the token files (`tokens.py`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

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
        """Upper bound in bytes for the files of a run that trains this many tokens."""
        if self.tokens == "none":
            return 0
        every = 1 if self.tokens == "all" else self.tokens
        return min(int(self.tokens_gib * GIB), tokens * TOKEN_BYTES // every)
