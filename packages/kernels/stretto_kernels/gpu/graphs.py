"""CUDA graphs of decode steps: captured once per set of shapes, and replayed with other inputs.

A decode step is hundreds of small kernels, and launching them takes longer than running them. A CUDA graph launches all
of them at once, with the shapes and addresses of its capture. So shapes are rounded to few sizes (`captured_size`), and
inputs are copied to the captured addresses::

    numpy arrays  ->  one buffer on the device, split into tensors  ->  replay  ->  the same output tensor every time

All other tensors must keep their addresses. Parameters do, since new weights are copied into them.
"""

from __future__ import annotations

import logging
import warnings
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

#: From this size on, the middle between two powers of two is a size too.
_FIRST_MIDDLE = 16


def captured_size(rows: int) -> int:
    """Round a number of rows up to a size for which graphs are captured: a power of two, or from 16 on also the middle
    between two powers of two.

    >>> sorted({captured_size(rows) for rows in range(1, 200)})
    [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    """
    power = 1 << (rows - 1).bit_length()
    middle = power // 4 * 3
    return middle if power > _FIRST_MIDDLE and rows <= middle else power


#: Captures a function without arguments, which reads and writes fixed tensors. Returns a function that replays it and
#: returns the same output tensor, with new content, each time. The captured function may be called a few times.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


@dataclass(frozen=True)
class Inputs:
    """Device tensors (`parts`) that share one `buffer`, filled by a single copy."""

    buffer: Tensor
    parts: tuple[Tensor, ...]

    @classmethod
    def like(cls, arrays: Sequence[Ints], device: torch.device) -> Inputs:
        """Allocate int64 tensors of zeros with the shapes of these arrays, as parts of one buffer."""
        # Two numbers are 16 bytes: Triton recompiles a kernel for pointers of lower alignment.
        sizes = [-(-array.size // 2) * 2 for array in arrays]
        buffer = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        cuts = zip(buffer.split(sizes), arrays, strict=True)
        return cls(buffer, tuple(part[: array.size].view(array.shape) for part, array in cuts))

    def fill(self, arrays: Sequence[Ints]) -> Inputs:
        """Copy arrays of the same shapes into the tensors, without waiting for the device; returns itself."""
        # torch reuses pinned memory only after the copies that read it.
        held = torch.empty(len(self.buffer), dtype=torch.int64, pin_memory=self.buffer.is_cuda)
        numbers, end = held.numpy(), 0
        for array in arrays:
            numbers[end : end + array.size] = array.ravel()
            end += -(-array.size // 2) * 2
        self.buffer.copy_(held, non_blocking=True)
        return self


class Graphs:
    """Calls a function of int64 tensors by replaying graphs. The function is captured when a set of input shapes is
    first seen.

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
        """The result of the function for these arrays, by a CUDA graph, which is captured at the first call with their
        shapes and replayed. It is valid until the next call with the same shapes.

        Args:
            function: must be the same computation in all calls with the same shapes.
            arrays: its arguments, which it gets as device tensors.
        """
        shapes = tuple(array.shape for array in arrays)
        if shapes not in self._captured:
            inputs = Inputs.like(arrays, self._device).fill(arrays)
            self._captured[shapes] = (inputs, self._capture(partial(function, *inputs.parts)))
        inputs, replay = self._captured[shapes]
        inputs.fill(arrays)
        return replay()


class CudaCapture:
    """Captures CUDA graphs that share one memory pool (a `Capture`). The function is called before the capture too.

    A function that synchronises with the GPU, as a mixture of experts may, cannot be captured. Then a warning is
    logged, and this and all later functions are called directly.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._refused = False

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if self._refused:
            return function
        with self._apart():  # compiles kernels, and lets libraries allocate memory, before the capture
            function()
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

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Context manager: run the block on the stream of captures, after all earlier work of the current stream and
        before all later work."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Context manager: calls that synchronise with the GPU raise, so that they are found before a capture, which they
    would break."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
