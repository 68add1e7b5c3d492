"""Promises: a step is captured once for each set of shapes and replayed with the numbers of the moment; sizes are few
and close. On a GPU: a replay does what the function does, and what waits for the GPU is called itself.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto_kernels.gpu.graphs import CudaCapture, Graphs, Inputs, captured_size

CPU = torch.device("cpu")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Again:
    """Captures by keeping the function: a replay calls it again and, like a graph's, gives one tensor every time."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.captured += 1
        output = function()
        return lambda: output.copy_(function())


def weighed(left: Tensor, right: Tensor) -> Tensor:
    return left * 10 + right.sum()


@given(st.integers(1, 100_000))
def test_a_bucket_holds_the_rows_and_is_at_most_half_filled_up(rows: int) -> None:
    assert rows <= captured_size(rows) <= max(2 * rows, 1)
    assert captured_size(captured_size(rows)) == captured_size(rows)
    if rows >= 16:
        assert captured_size(rows) <= 1.5 * rows


def test_inputs_keep_shapes_and_are_filled_in_place() -> None:
    inputs = Inputs.like([np.zeros(3, np.int64), np.zeros((2, 2), np.int64)], CPU)
    places = [part.data_ptr() for part in inputs.parts]
    assert all(place % 16 == places[0] % 16 for place in places)
    inputs.fill([np.array([1, 2, 3]), np.array([[4, 5], [6, 7]])])
    assert [part.tolist() for part in inputs.parts] == [[1, 2, 3], [[4, 5], [6, 7]]]
    assert [part.data_ptr() for part in inputs.parts] == places


def test_each_set_of_shapes_is_captured_once_and_replayed_over_new_numbers() -> None:
    capture = Again()
    graphs = Graphs(capture, CPU)
    first = graphs(weighed, [np.array([1, 2]), np.array([5])])
    assert first.tolist() == [15, 25]
    second = graphs(weighed, [np.array([3, 4]), np.array([6])])
    assert second.tolist() == [36, 46]
    assert first is second
    assert graphs(weighed, [np.array([3, 4, 5]), np.array([6])]).tolist() == [36, 46, 56]
    assert (capture.captured, len(graphs)) == (2, 2)


@on_gpu
def test_a_cuda_graph_replays_the_function() -> None:
    device = torch.device("cuda")
    weight = torch.ones(2, dtype=torch.int64, device=device)
    graphs = Graphs(CudaCapture(device), device)
    calls = 0

    def times(left: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return left * weight

    assert graphs(times, [np.array([1, 2])]).tolist() == [1, 2]
    made = calls
    weight.fill_(7)
    assert graphs(times, [np.array([3, 4])]).tolist() == [21, 28]
    assert calls == made


@on_gpu
def test_what_waits_for_the_gpu_is_called_itself(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cuda")
    graphs = Graphs(CudaCapture(device), device)

    def waiting(left: Tensor) -> Tensor:
        return left * int(left.max())

    assert graphs(waiting, [np.array([1, 2])]).tolist() == [2, 4]
    assert graphs(waiting, [np.array([1, 3])]).tolist() == [3, 9]
    assert "without CUDA graphs" in caplog.text
