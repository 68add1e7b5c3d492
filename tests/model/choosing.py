"""A choice of kernels that does not depend on a measurement."""

from collections.abc import Sequence

import torch

from stretto_kernels.steps.matmul import Chooser, KernelChoice, Name, Shape


def always(kernel: Name, fewest: int = 1) -> Chooser:
    """Whatever is offered, choose this."""

    def chooser(shapes: Sequence[Shape], dtype: torch.dtype, kernels: Sequence[Name]) -> dict[Shape, KernelChoice]:
        return {shape: KernelChoice(kernel if kernel in kernels else "linear", fewest) for shape in shapes}

    return chooser
