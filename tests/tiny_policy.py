"""The smallest policy that is worth a test: 22 tokens (0 padding, 1 end), distributions neither flat nor a point."""

from __future__ import annotations

from stretto.model.hf.config import BuildConfig

TINY = BuildConfig(
    hidden_size=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    context_length=192,
    alphabet="0123456789+-*/=;#?()",
    initializer_range=0.15,
)
