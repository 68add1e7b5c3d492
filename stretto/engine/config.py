"""The `[engine]` section of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class EngineConfig(BaseModel, extra="forbid", frozen=True):
    """How answers are generated."""

    count: int = Field(1, ge=1, le=1024, description="engine processes")
    threads: int = Field(1, ge=1, le=256, description="torch threads of each engine")
    slots: int = Field(128, ge=1, le=65_536, description="answers decoded together by one engine")
    cache_tokens: int = Field(
        1_048_576,
        ge=64,
        description="tokens (prompt + max_tokens, summed over the answers decoded together) whose keys and values may "
        "be kept; an answer waits until it fits",
    )
    on_update: Literal["recompute", "keep"] = Field(
        "recompute", description="what becomes of the KV cache of running answers when weights are loaded"
    )
    load_interval: float = Field(
        0.0,
        ge=0,
        le=600,
        description="seconds that an engine goes on with the answers under way before it is interrupted again; of the "
        "versions published meanwhile it loads the newest; an engine without answers loads at once",
    )
    max_prefill_tokens: int = Field(
        4096, ge=1, description="tokens of prompts, or of interrupted answers, computed per step; whole sequences"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs; auto: CUDA if present")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="numbers of weights and cache")
    transport: Literal["unix", "tcp"] = Field("unix", description="wire to the conductor on one machine")
    base_port: int = Field(8300, ge=1, le=65_535, description="first port when transport is tcp")
