"""The section `[model.build]` of a recipe: the shape of a new model.

This module imports neither torch nor transformers, so that mistakes in a recipe are reported at once.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

PAD, EOS = "<pad>", "<eos>"


class BuildConfig(BaseModel, extra="forbid", frozen=True):
    """Shape of a new model, and the characters of its tokenizer."""

    family: Literal["qwen3", "qwen2", "llama"] = Field("qwen3", description="architecture, as transformers names it")
    hidden_size: int = Field(64, ge=8, le=16_384, description="width of the residual stream")
    layers: int = Field(3, ge=1, le=256, description="decoder layers")
    heads: int = Field(2, ge=1, le=256, description="query heads")
    kv_heads: int = Field(2, ge=1, le=256, description="key/value heads; divides heads")
    head_dim: int = Field(32, ge=2, le=512, multiple_of=2, description="width of a head")
    intermediate_size: int = Field(192, ge=8, le=65_536, description="width of the MLP")
    context_length: int = Field(512, ge=8, le=1_048_576, description="most tokens of prompt and completion together")
    alphabet: str = Field("0123456789+-*/=;#?() ", min_length=1, description="one token per character")
    tie_embeddings: bool = Field(True, description="use the embedding as the output matrix")
    rope_theta: float = Field(10_000.0, gt=1, allow_inf_nan=False, description="base of the rotary embedding")
    initializer_range: float = Field(0.02, gt=0, le=1, description="standard deviation of the random weights")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}")
        twice = sorted({character for character in self.alphabet if self.alphabet.count(character) > 1})
        if twice:
            raise ValueError(f"alphabet holds {' '.join(map(repr, twice))} more than once")
        return self

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token ids by token: padding is 0, end of sequence 1, then the characters of the alphabet in their order."""
        return {token: at for at, token in enumerate((PAD, EOS, *self.alphabet))}
