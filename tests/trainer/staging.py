"""Moments in host memory that go through a device of their own, as beside a GPU, on a processor."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from stretto.trainer import optimizer


@contextmanager
def staged(largest: int | None = None) -> Iterator[list[int]]:
    """Context manager: yields the bytes of each moment that went to the device. `largest`: those of a part of a
    step."""
    through: list[int] = []

    def to_device(held: Tensor, device: torch.device) -> Tensor:
        through.append(held.nbytes)
        return held.clone()

    with pytest.MonkeyPatch.context() as patch:
        for module in (optimizer, optimizer):
            patch.setattr(module, "to_device", to_device)
        if largest is not None:
            patch.setattr(optimizer, "_THROUGH", largest)
        yield through
