"""Checksums of the tensors in a server worker's memory, which can be summed over shards.

    worker    every part of a tensor in its memory ─► count, plain sum, placed sum   the workers' add up
    adapter   the tensor as it was published       ─► the same                       equal, or the tensor is another one

A sum runs over the 64-bit words of a tensor, or over its numbers where rows have no whole words: `plain` adds them,
`placed` adds each times its position, both modulo 2^64. A flipped bit changes the plain sum; a swap of two numbers
changes the placed one. Sums of parts add up to that of the whole, so shards of several workers, fused layers and GPU
memory need no copy, and workers need not know of each other. Zeros count without their sign.

Where a layer computes from a packed copy, as on a CPU, the layer itself is run: its outputs for the columns of the
identity are its weights, to the last bit, since every product is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_MODULUS = 1 << 64
_WORD = 8
#: Bytes of a row that make whole words for up to 64 workers.
_ROW = 64 * _WORD
_BLOCK = 1 << 24  # bytes
_COLUMNS = 256  # of the identity, at once
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Sums:
    """Sums of the parts so far; `unit`: bytes per summand."""

    dtype: str
    unit: int
    count: int = 0
    plain: int = 0
    placed: int = 0

    def __str__(self) -> str:
        return f"{self.dtype} {self.unit} {self.count} {self.plain} {self.placed}"

    @classmethod
    def parse(cls, text: str) -> Sums:
        """Inverse of `str`.

        Raises:
            ValueError: the text is malformed.
        """
        dtype, unit, count, plain, placed = text.split()
        return cls(dtype, int(unit), int(count), int(plain), int(placed))

    def add(self, other: Sums) -> None:
        """Add the sums that another worker has of its parts of the same tensor.

        Raises:
            ValueError: data type or bytes per summand differ.
        """
        if (self.dtype, self.unit) != (other.dtype, other.unit):
            raise ValueError(f"{self} and {other} are not of one tensor")
        self.count += other.count
        self.plain = (self.plain + other.plain) % _MODULUS
        self.placed = (self.placed + other.placed) % _MODULUS

    def are(self, whole: Sums) -> bool:
        """Whether they are the sums of the whole tensor, or of several copies of it."""
        copies, rest = divmod(self.count, max(1, whole.count))
        times = (copies * whole.plain % _MODULUS, copies * whole.placed % _MODULUS)
        return copies > 0 and not rest and (self.plain, self.placed) == times

    def take(self, block: Tensor, row: int, column: int, width: int) -> None:
        """Add a block [rows, columns] that begins at (row, column) of a tensor with `width` numbers per row."""
        if not block.numel():
            return
        plain, unit, size = block.detach() + 0, self.unit, block.element_size()  # -0 becomes 0
        words = plain.contiguous().view(_INTEGERS[unit])
        rows, columns = words.sum(1, dtype=torch.int64), words.sum(0, dtype=torch.int64)
        across = width * size // unit
        down = (row + torch.arange(len(rows), device=rows.device)) * across
        along = column * size // unit + torch.arange(len(columns), device=rows.device)
        self.count += block.numel()
        self.plain = (self.plain + int(rows.sum())) % _MODULUS
        self.placed = (self.placed + int((down * rows).sum()) + int((along * columns).sum())) % _MODULUS

    def add_padding(self, *blocks: Tensor) -> None:
        """Add blocks beyond the tensor; only zeros leave the sums unchanged."""
        self.plain = (self.plain + sum(int(block.count_nonzero()) for block in blocks)) % _MODULUS


def sums_of(tensor: Tensor) -> Sums | None:
    """Sums of a whole tensor; None if it is not floating-point."""
    found = _empty(tensor.dtype, tensor.shape)
    if found is not None:
        for row, block in _blocks(_matrix(tensor)):
            found.take(block, row, 0, block.shape[1])
    return found


def held(
    model: nn.Module, shapes: Mapping[str, Sequence[int]], advanced: Callable[[int], object] = lambda size: None
) -> dict[str, str]:
    """Sums of each published tensor in a worker's model, by name; unreadable ones are left out.

    Args:
        shapes: shapes of the published tensors. What a layer has beyond them is padding, which has to be zero.
        advanced: called with the number of bytes of each part that was read.
    """
    found: dict[str, Sums] = {}
    with torch.inference_mode():
        for name, module in model.named_modules():
            for part in _parts(name, module):
                sums = found.get(part.name) or _empty(part.dtype, shapes.get(part.name, ()))
                if sums is not None:
                    found[part.name] = sums
                    height, width = _size(shapes[part.name])
                    for row, column, block in part.blocks():
                        down, along = height - part.row - row, width - part.column - column
                        sums.take(block[: max(0, down), : max(0, along)], part.row + row, part.column + column, width)
                        sums.add_padding(block[max(0, down) :], block[: max(0, down), max(0, along) :])
                        advanced(block.nbytes)
    return {name: str(sums) for name, sums in found.items()}


@dataclass
class _Part:
    """Rows of a layer's memory that belong to one published tensor, and their position in it."""

    name: str
    dtype: torch.dtype
    row: int
    column: int
    blocks: Callable[[], Iterator[tuple[int, int, Tensor]]]


def _parts(name: str, module: Any) -> Iterator[_Part]:
    for kind, parameter in module.named_parameters(recurse=False):
        at, last = name.rpartition(".")[::2]
        if packed := kind == "weight" and _is_packed(last, module):
            dtype, columns = module.params_dtype, module.input_size_per_partition
        elif parameter.numel() and parameter.dim() <= 2:
            dtype, columns = parameter.dtype, _size(parameter.shape)[1]
        else:
            continue
        sharded = kind == "weight" and getattr(module, "input_size", columns) > columns
        for layer, start, end, row in _slices(last, module, -1 if packed else len(parameter)):
            reader = _reader(module, parameter, packed=packed, start=start, end=end)
            place = ".".join(filter(None, (at, layer, kind)))
            yield _Part(place, dtype, row, _rank(module) * columns if sharded else 0, reader)


def _slices(last: str, module: Any, rows: int) -> list[tuple[str, int, int, int]]:
    """Parts of a layer's rows: published layer, first and last row here, and position of the first row there."""
    rank = _rank(module)
    if hasattr(module, "shard_indices"):  # a vocabulary, padded
        own = module.shard_indices
        return [(last, 0, own.num_org_elements, own.org_vocab_start_index)]
    if last in _FUSED and len(getattr(module, "output_sizes", ())) == len(_FUSED[last]):
        heads = getattr(module, "num_kv_head_replicas", 1)
        shards = [size // getattr(module, "tp_size", 1) for size in module.output_sizes]
        ends = [sum(shards[: at + 1]) for at in range(len(shards))]
        ranks = [rank, *[rank // heads] * (len(shards) - 1)]
        parts = zip(_FUSED[last], shards, ends, ranks, strict=True)
        return [(layer, end - size, end, size * place) for layer, size, end, place in parts]
    own_rows = getattr(module, "output_size_per_partition", rows)
    sharded = own_rows < getattr(module, "output_size", own_rows)
    return [(last, 0, own_rows if rows < 0 else rows, rank * own_rows if sharded else 0)]


def _reader(
    module: Any, parameter: Tensor, *, packed: bool, start: int, end: int
) -> Callable[[], Iterator[tuple[int, int, Tensor]]]:
    def in_memory() -> Iterator[tuple[int, int, Tensor]]:
        for row, block in _blocks(_matrix(parameter)[start:end]):
            yield row, 0, block

    def by_its_outputs() -> Iterator[tuple[int, int, Tensor]]:
        size = module.input_size_per_partition
        for column in range(0, size, _COLUMNS):
            count = min(_COLUMNS, size - column)
            identity = torch.zeros(count, size, dtype=module.params_dtype, device=parameter.device)
            identity[:, column : column + count].fill_diagonal_(1)
            yield 0, column, module.quant_method.apply(module, identity, None)[:, start:end].t()

    return by_its_outputs if packed else in_memory


def _is_packed(last: str, module: Any) -> bool:
    """Whether the layer computes from a packed copy of its weights; embedding tables do not."""
    copies = hasattr(module, "cpu_linear") or getattr(module, "use_intel_amx_backend", False)
    return bool(copies) and (last == "lm_head" or not hasattr(module, "shard_indices"))


def _rank(module: Any) -> int:
    return int(getattr(module, "tp_rank", 0))


def _empty(dtype: torch.dtype, shape: Sequence[int]) -> Sums | None:
    if dtype not in _TYPES or not shape:
        return None
    return Sums(_TYPES[dtype], _WORD if _size(shape)[1] * dtype.itemsize % _ROW == 0 else dtype.itemsize)


def _size(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns; a vector has one column."""
    width = shape[-1] if len(shape) > 1 else 1
    return math.prod(shape) // max(1, width), width


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(_size(tensor.shape))


def _blocks(matrix: Tensor) -> Iterator[tuple[int, Tensor]]:
    step = max(1, _BLOCK // max(1, matrix.shape[1] * matrix.element_size()))
    for row in range(0, len(matrix), step):
        yield row, matrix[row : row + step]
