"""Muon: steps that are nearly orthogonal, whatever the size of the gradient, wherever the momentum is."""

import pytest
import torch
from torch import nn

from stretto.trainer.optimizer import Muon, orthogonal
from tests.trainer.staging import staged


def test_singular_values_come_near_one_and_vectors_stay() -> None:
    torch.manual_seed(1)
    matrices = torch.randn(3, 12, 40) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    found = orthogonal(matrices)
    low, high = torch.linalg.svdvals(found).aminmax()
    assert low > 0.6
    assert high < 1.25
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    core = left.mT @ found @ right.mT
    torch.testing.assert_close(core, core.diagonal(dim1=-2, dim2=-1).diag_embed(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(8, 24), (24, 8), (8, 8)])
def test_a_step_agrees_with_that_of_torch_in_bfloat16(rows: int, columns: int) -> None:
    torch.manual_seed(2)
    ours, theirs = (nn.Parameter(torch.zeros(rows, columns)) for _ in range(2))
    muon, other = (
        Muon([ours], on_host=rows > columns),
        torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0, momentum=0.95),
    )
    for _ in range(3):
        gradient = torch.randn(rows, columns)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        with staged() as through:
            muon.step(0.02)
        assert sum(through) == ours.nbytes
        other.step()
        assert ours.grad is None
    moved, expected = ours.detach(), theirs.detach()
    assert float((moved - expected).norm() / expected.norm()) < 0.03  # the error of bfloat16


def test_matrices_of_one_shape_move_as_if_they_were_alone() -> None:
    torch.manual_seed(3)
    together = [nn.Parameter(torch.randn(6, 10)) for _ in range(3)]
    alone = [nn.Parameter(one.detach().clone()) for one in together]
    for one, other in zip(together, alone, strict=True):
        one.grad = torch.randn(6, 10)
        other.grad = one.grad.clone()
    Muon(together).step(0.1)
    for other in alone:
        Muon([other]).step(0.1)
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other)
