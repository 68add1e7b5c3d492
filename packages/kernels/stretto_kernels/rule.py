"""What a layer's attention computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Attention settings of a layer; attention is always causal."""

    scaling: float | None = None  # factor of the scores; None: 1 / sqrt(head width)
    window: int | None = None  # number of tokens attended to, including the query's token; None: all
    softcap: float | None = None  # scores become softcap * tanh(score / softcap); None: unchanged
    dropout: float = 0.0  # probability

    @classmethod
    def of(cls, requested: Mapping[str, Any]) -> Rule:
        """The rule from the keyword arguments of a transformers attention call."""
        scaling, window, softcap = (requested.get(name) for name in ("scaling", "sliding_window", "softcap"))
        return cls(scaling, window, softcap, requested.get("dropout") or 0.0)
