"""Loss tokens for tests, from probabilities that can be worked with by hand."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.trainer.objective.tokens import LossTokens, Sequences


def logs(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities).log()


def tokens(
    advantages: Sequence[float],
    anchor: Tensor,
    *,
    behavior: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    kept: Sequence[bool] | None = None,
    reference: Tensor | None = None,
    scale: float = 1.0,
) -> LossTokens:
    """Tokens of answers of these lengths (default: one answer), sampled by the anchor unless `behavior` is given."""
    return LossTokens(
        behavior_logprobs=anchor if behavior is None else behavior,
        anchor_logprobs=anchor,
        advantages=torch.tensor(advantages, dtype=torch.float32),
        scale=torch.full((len(advantages),), scale),
        sequences=Sequences.of(torch.tensor(lengths or [len(advantages)])),
        kept=None if kept is None else torch.tensor(kept),
        reference_logprobs=reference,
    )
