"""The settings of a gateway."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class GatewayConfig(BaseModel):
    """What one gateway serves at most.

    Example: ``GatewayConfig(sessions=64, turns=200)``
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sessions: int = Field(default=4096, ge=1, description="Open sessions; further ones are refused until some end.")
    turns: int = Field(default=1024, ge=1, description="Turns of one session.")
    turn_seconds: float = Field(default=600.0, gt=0, description="Longest wait for one turn.")
    body_bytes: int = Field(default=16 << 20, ge=1024, description="Longest body of a request.")
