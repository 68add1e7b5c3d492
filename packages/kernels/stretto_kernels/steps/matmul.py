"""Linear layers that use the fastest matmul kernel for a weight on this CPU, which is chosen by measurement.

`use_onednn` only replaces the class of a model's linear layers; parameters, names and saved files stay the same. For
trainers, oneDNN's float32 products are differentiable; on some CPUs forward and backward passes are up to twice as fast
as with MKL.

    linear     torch's matmul: MKL for float32, oneDNN for bfloat16
    onednn     oneDNN, on the weight as it is
    columns    torch's matmul, on a column-major weight
    packed     oneDNN, on a copy of the weight in oneDNN's own layout
    panels     the compiled loop of `stretto_kernels.panels`, on a copy of the weight in its layout
    widened    for bfloat16: torch's float32 matmul on a column-major float32 copy of the weight

A measurement takes milliseconds per shape. Results are cached for the user by processor, cores, threads, torch version
and dtype. Kernels round differently, so processes that must agree bitwise share one record, a file of their run. The
first process measures while the others wait for the file's lock. Recorded choices are never measured again, not even by
a resumed run or a replay.

Axes: T token, K input width, N output width.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto_kernels.choices import RUN_SECONDS, locked, read_choices, write_choices
from stretto_kernels.compiled import computes
from stretto_kernels.panels import KINDS, PAIRED, in_panels, multiply_panels

log = logging.getLogger(__name__)

Shape = tuple[int, int]
Name = Literal["linear", "onednn", "columns", "packed", "panels", "widened"]

#: Kernels for a trainer. Its weights change in every step, and must keep their layout for saving and sharding.
TRAINING: tuple[Name, ...] = ("onednn",)
#: Kernels for a weight that other modules read too, such as a tied embedding; they do not change its layout.
SHARED: tuple[Name, ...] = ("onednn", "packed", "panels", "widened")
GENERATION: tuple[Name, ...] = ("onednn", "columns", "packed", "panels", "widened")
#: Kernels that compute with a copy of the weight.
COPIED: tuple[Name, ...] = ("packed", "panels", "widened")

FILE = "kernels.json"
_TOKENS = (1, 16, 64, 256)  # of a step of generation
_TRAINED = (64, 256, 1024, 4096)  # of a micro-batch
_MOST_MULTIPLICATIONS = 1 << 26  # larger products are not measured; the largest one measured stands for them
_FEWEST_MULTIPLICATIONS = 3 << 18  # shapes whose product for 256 tokens has fewer multiplications are not measured
_COLD_BYTES = 4 << 20  # a step reads each weight from beyond the core's own cache
_ROUNDS = 2
#: Least gain of a kernel that is chosen; a copy of the weight costs memory and time.
_GAINS = {"onednn": 1.05, "columns": 1.03, "packed": 1.15, "panels": 1.03, "widened": 1.15}
#: Parts of a choice's name that earlier versions did not write, the newest first.
_NEWER = (re.compile(" in training"), re.compile(r" \(family \d+, model \d+\)| in pairs"))
_CPU = torch.device("cpu")


class KernelChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The kernel for a weight shape, as files keep it. `fewest`: least number of tokens for which it is used; for fewer
    tokens ``linear`` is used. `gain`: speedup over ``linear``, geometric mean over the numbers of tokens measured."""

    kernel: Name = "linear"
    fewest: int = 1
    gain: float = 1.0


def unrecorded(shapes: Iterable[Shape], dtype: torch.dtype, kernels: Sequence[Name]) -> dict[Shape, KernelChoice]:
    """Choose kernels without measurement, for runs without a record: oneDNN for float32 products of at least 786,432
    multiplications; none for other dtypes. It is a `Chooser`; `kernels` is ignored."""
    if not fits("onednn", dtype):
        return {}
    return {shape: KernelChoice("onednn", math.ceil(_FEWEST_MULTIPLICATIONS / math.prod(shape))) for shape in shapes}


def product(left_MK: Tensor, right_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """left · rightᵀ + bias (None: 0), [M, N], by oneDNN. Both matrices may be transposed views."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(left_MK, right_NK, bias_N, "none", [], ""))


def prepare(kernel: str, weight_NK: Tensor, copy: Tensor | None = None) -> Tensor:
    """Copy a weight into the layout of a kernel (a `Name`); returns the weight itself if the kernel needs no copy.
    `copy`: an earlier result for this kernel, whose memory may be reused; None: allocate."""
    if kernel == "panels":
        return in_panels(weight_NK, copy)
    if kernel == "columns":
        return weight_NK.t().contiguous().t()
    if kernel == "packed":
        return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight_NK, _TOKENS[-2]))
    return prepare("columns", weight_NK.float()) if kernel == "widened" else weight_NK


def multiply(kernel: str, x_TK: Tensor, prepared: Tensor, bias_N: Tensor | None, width: int) -> Tensor:
    """x · weightᵀ + bias (None: 0) by a kernel (a `Name`). `prepared`: the weight in the kernel's layout (`prepare`);
    `width`: its number of outputs."""
    if kernel == "panels":
        return multiply_panels(x_TK, prepared, bias_N, width)
    if kernel in ("onednn", "packed"):
        return product(x_TK, prepared, bias_N)
    if kernel == "widened":
        return functional.linear(x_TK.float(), prepared, None if bias_N is None else bias_N.float()).to(x_TK.dtype)
    return functional.linear(x_TK, prepared, bias_N)


class Kernel:
    """A chosen kernel for one weight of this dtype. If the kernel needs a copy of the weight, the copy is kept here and
    renewed when the weight changes."""

    def __init__(self, choice: KernelChoice, dtype: torch.dtype) -> None:
        self.choice, self.dtype = choice, dtype
        self.of_torch = choice.kernel in ("linear", "columns")  # whether it is torch's own matmul
        self._prepared: Tensor | None = None
        self._version = (0, 0)  # the copied weight, and its write count at that time

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x · weightᵀ + bias (None: 0), where `x` has the tokens on its second-to-last axis. Fewer than `choice.fewest`
        tokens use torch's matmul."""
        if x.shape[-2] < self.choice.fewest:
            return functional.linear(x, weight, bias)
        return self.multiply_many(x, weight, bias)

    def multiply_many(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x · weightᵀ + bias (None: 0) by the chosen kernel, for at least `choice.fewest` tokens."""
        kernel, width = self.choice.kernel, weight.shape[0]
        if kernel not in COPIED:
            return multiply(kernel, x, weight, bias, width)
        return multiply(kernel, x, self.prepared(weight), bias, width)

    def prepared(self, weight: Tensor) -> Tensor:
        """The weight in the kernel's layout, copied again if it has changed. Panels keep their memory then."""
        version = (id(weight), weight._version)
        if self._prepared is None or version != self._version:
            self._prepared, self._version = prepare(self.choice.kernel, weight.detach(), self._prepared), version
        return self._prepared

    def holds(self, weight: Tensor) -> bool:
        """Whether the copy of `weight`, which is renewed first if the weight has changed, has the weight's numbers.
        True for a kernel without a copy, and for a weight of another dtype or not on the CPU. Panels are compared by
        the exclusive or of all numbers' bits. So one bit that differs is always found; of 65,536 copies of other
        weights in bfloat16, one is not."""
        kernel = self.choice.kernel
        if kernel not in COPIED or weight.device.type != "cpu" or weight.dtype != self.dtype:
            return True
        copy = self.prepared(weight)
        if kernel == "panels":
            return _parity(copy) == _parity(weight)
        return torch.equal(copy.to_dense(), weight) if kernel == "packed" else torch.equal(copy.t(), weight.t().float())


def _parity(tensor: Tensor) -> int:
    """Exclusive or of the bits of all numbers, in whatever order they lie; zeros change nothing."""
    numbers = tensor.detach().contiguous().view(-1).view(torch.int16 if tensor.itemsize == 2 else torch.int32).numpy()
    whole, combine = len(numbers) * numbers.itemsize // 8 * 8 // numbers.itemsize, np.bitwise_xor.reduce
    together = combine(numbers[:whole].view(np.uint64), keepdims=True).view(numbers.dtype)  # eight bytes are quicker
    return int(combine(together) ^ combine(numbers[whole:]))


def choose(
    shapes: Iterable[Shape],
    dtype: torch.dtype,
    kernels: Sequence[Name],
    record: Path | None = None,
    *,
    machine: str,
    cache: Path,
) -> dict[Shape, KernelChoice]:
    """Choose one of `kernels` for each weight shape [N, K]. A choice comes from the file `record`, else from the file
    `cache`, else from a measurement, and is written to both files (`record` None: to `cache` alone). `machine`:
    processor and cores, which choices are kept by. A file that cannot be written, or whose lock is not free within 20
    s (`record`: within an hour), is only read, with a warning. Shapes too small to matter are left out, and all if no
    kernel `fits`."""
    offered = [kernel for kernel in kernels if fits(kernel, dtype)]
    place = f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    worth = [shape for shape in shapes if _TOKENS[-1] * math.prod(shape) >= _FEWEST_MULTIPLICATIONS and offered]
    kind = f"{dtype} in pairs" if PAIRED in KINDS and dtype is torch.bfloat16 else dtype
    use = f"{' '.join(offered)}{' in training' if _tokens(offered) is _TRAINED else ''}"
    names = {shape: f"{place}: {kind}, {shape[0]} x {shape[1]}, {use}" for shape in worth}
    if not names and record is None:
        return {}
    files = {cache: None} if record is None else {record: RUN_SECONDS, cache: None}  # all processes in this order
    with ExitStack() as locks:
        written = [file for file, seconds in files.items() if locks.enter_context(locked(file, seconds))]
        cached = read_choices(cache, KernelChoice)
        recorded = read_choices(record, KernelChoice) if record is not None else {}
        chosen = {
            shape: next((recorded[one] for one in _names(name) if one in recorded), None)
            or cached.get(name)
            or measure(shape, dtype, offered)
            for shape, name in names.items()
        }
        for file in written:
            _add(file, {names[shape]: choice for shape, choice in chosen.items()})
    return chosen


def _tokens(kernels: Sequence[Name]) -> tuple[int, ...]:
    """Numbers of tokens for which kernels are measured: those of micro-batches for `TRAINING`, else of generation."""
    return _TRAINED if tuple(kernels) == TRAINING else _TOKENS


def _names(name: str) -> Iterator[str]:
    """The name of a choice, as this version writes it and as earlier ones wrote it."""
    yield name
    for newer in _NEWER:
        yield (name := newer.sub("", name))


def fits(kernel: str, dtype: torch.dtype) -> bool:
    """Whether this CPU supports the kernel for weights of `dtype`."""
    if kernel in ("onednn", "packed") and not torch.backends.mkldnn.is_available():
        return False
    if kernel == "packed" and dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if kernel == "panels":
        return computes(_CPU, dtype)
    wanted = {"columns": (torch.float32,), "onednn": (torch.float32,), "widened": (torch.bfloat16,)}
    return dtype in wanted.get(kernel, (torch.float32, torch.bfloat16))


@torch.inference_mode()
def measure(shape: Shape, dtype: torch.dtype, kernels: Sequence[Name]) -> KernelChoice:
    """Time the kernels for a few numbers of tokens, which takes milliseconds; returns the fastest kernel and the number
    of tokens from which on it is used, or ``linear`` if none gains enough. `shape`: [N, K] of the weight."""
    tokens = _tokens(kernels)
    copies = max(1, min(8, _COLD_BYTES // (math.prod(shape) * dtype.itemsize)))
    plain = [torch.randn(shape).to(dtype) for _ in range(copies)]
    weights = {kernel: [prepare(kernel, weight) for weight in plain] for kernel in ("linear", *kernels)}
    counts = [count for count in tokens if count == tokens[0] or count * math.prod(shape) <= _MOST_MULTIPLICATIONS]
    seconds = [_seconds(torch.randn(count, shape[1]).to(dtype), weights, shape[0]) for count in counts]
    seconds += [seconds[-1]] * (len(tokens) - len(counts))

    def gain(kernel: Name, fewest: int) -> float:
        times = zip(tokens, seconds, strict=True)
        logs = (math.log(one["linear"] / one[kernel]) for count, one in times if kernel == "columns" or count >= fewest)
        return math.exp(sum(logs) / len(tokens))

    offers = [KernelChoice(kernel, fewest, round(gain(kernel, fewest), 3)) for kernel in kernels for fewest in counts]
    best = max(offers, key=lambda offer: (offer.gain / _GAINS[offer.kernel], -offer.fewest))
    return best if best.gain >= _GAINS[best.kernel] else KernelChoice()


def _seconds(x_TK: Tensor, weights: Mapping[Name, list[Tensor]], width: int) -> dict[Name, float]:
    """Seconds that each kernel takes to multiply `x_TK` by all its prepared weights, the best of two measurements."""
    # With one thread the CPU time of the thread is measured, which does not depend on other work.
    clock: Callable[[], float] = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(weights, math.inf)
    for turn, kernel in itertools.product(range(_ROUNDS + 1), weights):
        start = clock()
        for weight in weights[kernel]:
            multiply(kernel, x_TK, weight, None, width)
        if turn:  # the first call compiles
            best[kernel] = min(best[kernel], clock() - start)
    return best


def _add(file: Path, chosen: dict[str, KernelChoice]) -> None:
    """Add choices to a file; those of names that it has already stay. A failure is logged."""
    known = read_choices(file, KernelChoice)
    if chosen.keys() <= known.keys() and file.exists():
        return
    try:
        write_choices(file, chosen | known)
    except OSError as error:
        log.warning("the choice of kernels is not kept in %s: %s", file, error)


#: Chooses one of the kernels for each weight shape.
Chooser = Callable[[Sequence[Shape], torch.dtype, Sequence[Name]], dict[Shape, KernelChoice]]

_PLACES = ("cpu", "meta")  # devices of layers to replace; models on the meta device are filled later, on the CPU


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        return product(x_TK, weight_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_TK, weight_NK = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_TN = grad_TN.contiguous()
        grad_x = product(grad_TN, weight_NK.t().contiguous()) if needs_x else None
        grad_weight = weight_gradient(grad_TN, x_TK) if needs_weight else None
        return grad_x, grad_weight, grad_TN.sum(0) if needs_bias else None


def weight_gradient(grad_TN: Tensor, x_TK: Tensor) -> Tensor:
    """gradᵀ · x, [N, K], by oneDNN, which is faster if the wider operand is on the right."""
    if grad_TN.shape[1] <= x_TK.shape[1]:
        return product(grad_TN.t(), x_TK.t())
    return product(x_TK.t(), grad_TN.t()).t()


class OneDnnLinear(nn.Linear):
    """A linear layer that uses its chosen `kernel` on the CPU. It works like `nn.Linear` on other devices, for other
    dtypes, for few tokens, under autocast, and while gradients are enabled if the kernel is not ``onednn``."""

    kernel: Kernel

    def forward(self, x: Tensor) -> Tensor:
        tokens, kernel = x.numel() // self.in_features, self.kernel
        if kernel.of_torch or tokens < kernel.choice.fewest or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        if x.device.type != "cpu" or x.dtype != kernel.dtype or self.weight.dtype != kernel.dtype:
            return super().forward(x)
        if not torch.is_grad_enabled():  # avoids autograd's bookkeeping, which matters in a decode step
            return kernel.multiply_many(x, self.weight, self.bias)
        if kernel.choice.kernel != "onednn":
            return super().forward(x)
        y = _Linear.apply(x.reshape(tokens, self.in_features), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return cast(Tensor, y).view(*x.shape[:-1], self.out_features)


def use_onednn(model: nn.Module, kernels: Sequence[Name], chooser: Chooser) -> int:
    """Make every plain `nn.Linear` of the model on the CPU, or the meta device, use its fastest kernel, in place;
    returns the number of changed layers.

    `kernels`: kernels to choose from. If ``columns`` is among them, weights may change their memory layout. `chooser`:
    chooses a kernel for each weight shape; shapes that it leaves out use torch's.
    """
    layers = [
        module for module in model.modules() if type(module) is nn.Linear and module.weight.device.type in _PLACES
    ]
    readers = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    kinds: dict[tuple[torch.dtype, tuple[Name, ...]], list[nn.Linear]] = {}
    for layer in layers:
        offered = [kernel for kernel in kernels if kernel in SHARED or readers[id(layer.weight)] == 1]
        kinds.setdefault((layer.weight.dtype, tuple(offered)), []).append(layer)
    for (dtype, offer), alike in kinds.items():
        chosen = chooser(sorted({(one.out_features, one.in_features) for one in alike}), dtype, offer)
        for layer in alike:
            choice = chosen.get((layer.out_features, layer.in_features), KernelChoice())
            if choice.kernel == "columns":
                layer.weight.data = prepare("columns", layer.weight.data)
            layer.__class__ = OneDnnLinear
            cast(OneDnnLinear, layer).kernel = Kernel(choice, dtype)
    return len(layers)


@contextmanager
def plain(model: nn.Module) -> Iterator[dict[int, Kernel]]:
    """Context manager: the layers that `use_onednn` changed are plain `nn.Linear` during the block. Yields their
    kernels by ``id`` of the weight."""
    layers: list[nn.Linear] = [module for module in model.modules() if isinstance(module, OneDnnLinear)]
    kernels = {id(layer.weight): cast(OneDnnLinear, layer).kernel for layer in layers}
    try:
        for layer in layers:
            layer.__class__ = nn.Linear
        yield kernels
    finally:
        for layer in layers:
            layer.__class__ = OneDnnLinear
