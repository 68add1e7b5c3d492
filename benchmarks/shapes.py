"""Models of two sizes with random weights, built when needed: enough to measure speed."""

from __future__ import annotations

from pathlib import Path

from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig

_ALPHABET = "".join(chr(0x4E00 + number) for number in range(1022))  # 1,024 tokens with padding and end

SHAPES = {
    "3.4M": BuildConfig(
        hidden_size=256,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate_size=768,
        context_length=2048,
        alphabet=_ALPHABET,
    ),
    "48M": BuildConfig(
        hidden_size=512,
        layers=15,
        heads=8,
        kv_heads=4,
        head_dim=64,
        intermediate_size=1536,
        context_length=2048,
        alphabet=_ALPHABET,
    ),
}


def make(name: str, folder: Path) -> Path:
    """Build a model of that shape as a Hugging Face folder."""
    path = folder / name
    if not path.exists():
        build_policy(SHAPES[name], path, seed=1)
    return path
