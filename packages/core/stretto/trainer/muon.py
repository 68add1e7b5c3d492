"""Muon: an optimizer whose step is the orthogonalized momentum of a matrix (Jordan et al., 2024, "Muon: an optimizer
for hidden layers in neural networks"). The step of a matrix with more rows than columns is scaled by the square root of
rows / columns.

torch's Muon computes in bfloat16, which is emulated on processors without such instructions and then takes half of a
small model's step. Here all matrices of one shape are multiplied together, in their own dtype.

Axes: M matrix of one shape, R rows, C columns, R <= C.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from stretto.trainer.parallel.moments import to_device, to_host
from stretto.trainer.parallel.ranks import zeros_on_host

_FIRST, _THIRD, _FIFTH = 3.4445, -4.7750, 2.0315  # coefficients of the polynomial that moves singular values to 1
_TIMES = 5  # iterations
_TINY = 1e-7
_MOMENTUM = 0.95


class Muon:
    """Muon over matrices, with Nesterov momentum and without weight decay."""

    def __init__(self, matrices: Iterable[Tensor], *, on_host: bool = False) -> None:
        """`on_host`: keep the momentum in host memory."""
        zeros = zeros_on_host if on_host else torch.zeros_like
        self._matrices = [(matrix, zeros(matrix)) for matrix in matrices]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update every matrix that has a gradient, and clear the gradient, so that an optimizer that runs afterwards
        skips the matrix."""
        of_shape: defaultdict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for matrix, held in self._matrices:
            if matrix.grad is not None:
                momentum = to_device(held, matrix.device).lerp_(matrix.grad, 1 - _MOMENTUM)
                to_host(momentum, held)
                rows, columns = matrix.shape
                of_shape[rows, columns].append((matrix, matrix.grad.lerp(momentum, _MOMENTUM)))
        for (rows, columns), found in of_shape.items():
            moves = torch.stack([move for _, move in found])
            steps = orthogonal(moves.mT).mT if rows > columns else orthogonal(moves)
            for (matrix, _), step in zip(found, steps, strict=True):
                matrix.grad = None
                matrix.add_(step, alpha=-learning_rate * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrices_MRC: Tensor) -> Tensor:
    """Orthogonalize matrices [M, R, C] by Newton-Schulz iterations: the results have the same singular vectors, and
    singular values near 1."""
    found: Tensor = matrices_MRC / (matrices_MRC.norm(dim=(-2, -1), keepdim=True) + _TINY)
    for _ in range(_TIMES):
        square = found @ found.mT
        change = torch.baddbmm(square, square, square, beta=_THIRD, alpha=_FIFTH)
        found = torch.baddbmm(found, change, found, beta=_FIRST)
    return found
