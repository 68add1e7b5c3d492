"""CUDA graphs of decode steps: captured once per shape and replayed over other inputs.

A decode step is hundreds of small kernels, and launching them takes longer than running them. A CUDA graph launches all
of them at once, with the shapes and addresses of its capture. So shapes are rounded to few sizes (`captured_size`), and
inputs are copied to the captured addresses::

    numpy arrays  ->  one buffer on the device, split into tensors  ->  replay  ->  the same output tensor every time

Everything else must keep its address; parameters do, since new weights are copied into them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]

#: From here on there is also a size halfway between two powers of two.
_FIRST_MIDDLE = 16


def captured_size(rows: int) -> int:
    """The next size that is captured: powers of two, and from 16 on also the middle between two of them.

    >>> sorted({captured_size(rows) for rows in range(1, 200)})
    [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    """
    power = 1 << (rows - 1).bit_length()
    middle = power // 4 * 3
    return middle if power > _FIRST_MIDDLE and rows <= middle else power


#: Captures a function of fixed tensors; returns its replay, which returns the same tensor with new content each time.
#: The function may be called a few times for the capture.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


@dataclass(frozen=True)
class Inputs:
    """Device tensors that share one buffer, filled by a single copy."""

    buffer: Tensor
    parts: tuple[Tensor, ...]

    @classmethod
    def like(cls, arrays: Sequence[Ints], device: torch.device) -> Inputs:
        """Allocate tensors with the shapes of these arrays."""
        # Two numbers are 16 bytes: Triton recompiles a kernel for pointers of lower alignment.
        sizes = [-(-array.size // 2) * 2 for array in arrays]
        buffer = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        cuts = zip(buffer.split(sizes), arrays, strict=True)
        return cls(buffer, tuple(part[: array.size].view(array.shape) for part, array in cuts))

    def fill(self, arrays: Sequence[Ints]) -> Inputs:
        """Copy in arrays of the same shapes."""
        parts = (part for array in arrays for part in (array.ravel(), np.zeros(array.size % 2, np.int64)))
        self.buffer.copy_(torch.from_numpy(np.concatenate(list(parts))))
        return self


class Graphs:
    """Replays a function of int64 tensors; captures it when a set of shapes is first seen.

    Example: the second call replays the first one's capture with other numbers::

        graphs = Graphs(CudaCapture(device), device)
        graphs(double, [np.array([1, 2])])   # tensor([2, 4])
        graphs(double, [np.array([3, 4])])   # tensor([6, 8]), in the same memory
    """

    def __init__(self, capture: Capture, device: torch.device) -> None:
        self._capture = capture
        self._device = device
        self._captured: dict[tuple[tuple[int, ...], ...], tuple[Inputs, Callable[[], Tensor]]] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def __call__(self, function: Callable[..., Tensor], arrays: Sequence[Ints]) -> Tensor:
        """The function's result for these arrays, valid until the next call with the same shapes.

        Args:
            function: must compute the same in all calls with the same shapes.
            arrays: its arguments; passed as device tensors.
        """
        shapes = tuple(array.shape for array in arrays)
        if shapes not in self._captured:
            inputs = Inputs.like(arrays, self._device).fill(arrays)
            self._captured[shapes] = (inputs, self._capture(partial(function, *inputs.parts)))
        inputs, replay = self._captured[shapes]
        inputs.fill(arrays)
        return replay()


class CudaCapture:
    """Captures CUDA graphs that share one memory pool.

    A function that synchronises with the GPU, as a mixture of experts may, cannot be captured: this is logged, and the
    function is called directly.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._refused = False

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if self._refused:
            return function
        self._warm_up(function)
        graph = torch.cuda.CUDAGraph()
        try:
            with self._apart(), _no_waiting():
                function()
            # Other threads, such as those loading weights, may use the GPU meanwhile.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                output = function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("decode steps run without CUDA graphs: %s", str(error).partition("\n")[0])
            self._refused = True
            return function

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def _warm_up(self, function: Callable[[], Tensor]) -> None:
        """Call the function a few times, so that kernels are compiled and libraries allocate memory before the
        capture."""
        with self._apart():
            function()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Run the block on the capturing stream, ordered after earlier and before later work."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Make synchronising calls raise, to find them before a capture, which they would leave half done."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
