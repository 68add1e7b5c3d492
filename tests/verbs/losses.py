"""A loss that another process can import."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import stretto


def likelihood(logprobs: Sequence[Tensor], data: Sequence[stretto.Datum]) -> Tensor:
    return -sum((one * 2).sum() for one in logprobs)  # type: ignore[return-value]
