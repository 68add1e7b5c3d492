"""Promises: joined parameters keep their values and are joined once; what is joined sees what is copied into them."""

from __future__ import annotations

import torch
from torch import nn

from stretto.model.projections import side_by_side


def test_parameters_become_the_parts_of_one_tensor_and_keep_their_values() -> None:
    parameters = [nn.Parameter(torch.randn(rows, 3)) for rows in (4, 2, 5)]
    before = torch.cat([parameter.detach().clone() for parameter in parameters])
    joined = side_by_side(parameters)
    assert torch.equal(joined, before)
    assert torch.equal(torch.cat([parameter.detach() for parameter in parameters]), before)
    assert [tuple(parameter.shape) for parameter in parameters] == [(4, 3), (2, 3), (5, 3)]
    with torch.no_grad():
        parameters[1].copy_(torch.full((2, 3), 7.0))
    assert joined[4:6].eq(7).all()
    assert joined[:4].equal(before[:4])


def test_parameters_that_are_joined_stay_where_they_are() -> None:
    parameters = [nn.Parameter(torch.randn(rows)) for rows in (4, 2)]
    first = side_by_side(parameters)
    assert side_by_side(parameters).data_ptr() == first.data_ptr()
    other = [parameters[1], parameters[0]]  # in another order they have to be joined anew
    assert side_by_side(other).tolist() == [*parameters[1].tolist(), *parameters[0].tolist()]
