"""The attention of a layer: its settings, as kernels need them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Attention settings of a layer; attention is always causal. `scaling`: factor of the scores; None: 1 / sqrt(head
    width). `window`: number of tokens attended to, the query's own included; None: all. `softcap`: scores become
    softcap * tanh(score / softcap); None: unchanged. `dropout`: probability."""

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0

    @classmethod
    def of(cls, requested: Mapping[str, Any]) -> Rule:
        """The rule from the keyword arguments of a transformers attention call."""
        scaling, window, softcap = (requested.get(name) for name in ("scaling", "sliding_window", "softcap"))
        return cls(scaling, window, softcap, requested.get("dropout") or 0.0)
