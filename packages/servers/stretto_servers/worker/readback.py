"""Checksums of the tensors in a server worker's memory, which can be added up over shards.

    worker    each part of a tensor in its memory ─► count, plain sum, placed sum   added up over all workers
    adapter   the published tensor                ─► the same                       must be equal

The summands are the 64-bit words of a tensor, or its numbers if rows do not consist of whole words. `plain` is their
sum, `placed` the sum of each times its position, both modulo 2^64. A flipped bit changes the plain sum, a swap of two
numbers the placed one. Sums of parts add up to the sums of the whole. So shards, fused layers and GPU memory are read
in place, and workers do not communicate. -0 counts as 0.

If a layer computes from a packed copy of its weights, as on a CPU, the layer is run on the columns of the identity
matrix. Its outputs are its weights, bit by bit, because every product is exact.
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
#: If a row has a multiple of this many bytes, its shards consist of whole words for up to 64 workers.
_ROW = 64 * _WORD
_BLOCK = 1 << 24  # bytes
_COLUMNS = 256  # columns of the identity matrix per call of a layer
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Sums:
    """Sums over the parts of one tensor that were added so far, modulo 2^64. `dtype`: data type, as safetensors names
    it. `unit`: bytes per summand. `count`: number of elements. `plain`: sum of the summands, as signed integers.
    `placed`: sum of each summand times its position in the tensor."""

    dtype: str
    unit: int
    count: int = 0
    plain: int = 0
    placed: int = 0

    def __str__(self) -> str:
        return f"{self.dtype} {self.unit} {self.count} {self.plain} {self.placed}"

    @classmethod
    def parse(cls, text: str) -> Sums:
        """Parse the text that `str` makes.

        Raises:
            ValueError: the text is malformed.
        """
        dtype, unit, count, plain, placed = text.split()
        return cls(dtype, int(unit), int(count), int(plain), int(placed))

    def add(self, other: Sums) -> None:
        """Add the sums of another worker's parts of the same tensor.

        Raises:
            ValueError: dtype or unit differ.
        """
        if (self.dtype, self.unit) != (other.dtype, other.unit):
            raise ValueError(f"{self} and {other} are not of one tensor")
        self.count += other.count
        self.plain = (self.plain + other.plain) % _MODULUS
        self.placed = (self.placed + other.placed) % _MODULUS

    def are(self, whole: Sums) -> bool:
        """Whether these are the sums of the same tensor as `whole`, or of several complete copies of it. False if
        nothing was added. Dtype and unit are not compared."""
        copies, rest = divmod(self.count, max(1, whole.count))
        times = (copies * whole.plain % _MODULUS, copies * whole.placed % _MODULUS)
        return copies > 0 and not rest and (self.plain, self.placed) == times

    def take(self, block: Tensor, row: int, column: int, width: int) -> None:
        """Add a block [rows, columns] of a tensor with `width` elements per row. The block begins at (row, column) of
        the tensor, counted in elements."""
        if not block.numel():
            return
        plain, unit, size = block.detach() + 0, self.unit, block.element_size()  # adding 0 makes -0 to 0
        words = plain.contiguous().view(_INTEGERS[unit])
        rows, columns = words.sum(1, dtype=torch.int64), words.sum(0, dtype=torch.int64)
        across = width * size // unit
        down = (row + torch.arange(len(rows), device=rows.device)) * across
        along = column * size // unit + torch.arange(len(columns), device=rows.device)
        self.count += block.numel()
        self.plain = (self.plain + int(rows.sum())) % _MODULUS
        self.placed = (self.placed + int((down * rows).sum()) + int((along * columns).sum())) % _MODULUS

    def add_padding(self, *blocks: Tensor) -> None:
        """Add blocks of padding outside the tensor: each non-zero element adds 1 to `plain`."""
        self.plain = (self.plain + sum(int(block.count_nonzero()) for block in blocks)) % _MODULUS


def sums_of(tensor: Tensor) -> Sums | None:
    """Sums of a whole tensor; None if it has no dimensions or another dtype than float16, bfloat16, float32 and
    float64."""
    found = _empty(tensor.dtype, tensor.shape)
    if found is not None:
        for row, block in _blocks(_matrix(tensor)):
            found.take(block, row, 0, block.shape[1])
    return found


def held(
    model: nn.Module, shapes: Mapping[str, Sequence[int]], advanced: Callable[[int], object] = lambda size: None
) -> dict[str, str]:
    """Sums of the published tensors in a worker's model, as text by name. Tensors that cannot be read are left out.

    Args:
        shapes: shapes of the published tensors. Elements of a layer outside its shape are padding, which must be zero.
        advanced: called after each part with the number of bytes read.
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
    """Part of a layer's memory that belongs to one published tensor, called `name`, at (row, column) of it. `blocks`
    iterates over blocks of the part: row and column within the part, and the numbers."""

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
    """Split a layer's rows by published layer: name of the published layer, first row and end (exclusive) here, and the
    row of the published tensor at which they begin. `last`: last part of the layer's name. `rows`: number of rows, -1
    for a packed layer."""
    rank = _rank(module)
    if hasattr(module, "shard_indices"):  # an embedding or output layer with a padded vocabulary
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
    """Whether a layer computes from a packed copy of its weights. An embedding never does, but the output layer may:
    `last`, the last part of the layer's name, tells them apart."""
    copies = hasattr(module, "cpu_linear") or getattr(module, "use_intel_amx_backend", False)
    return bool(copies) and (last == "lm_head" or not hasattr(module, "shard_indices"))


def _rank(module: Any) -> int:
    return int(getattr(module, "tp_rank", 0))


def _empty(dtype: torch.dtype, shape: Sequence[int]) -> Sums | None:
    if dtype not in _TYPES or not shape:
        return None
    return Sums(_TYPES[dtype], _WORD if _size(shape)[1] * dtype.itemsize % _ROW == 0 else dtype.itemsize)


def _size(shape: Sequence[int]) -> tuple[int, int]:
    """Number of rows and columns of a tensor as a matrix; a vector has one column."""
    width = shape[-1] if len(shape) > 1 else 1
    return math.prod(shape) // max(1, width), width


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(_size(tensor.shape))


def _blocks(matrix: Tensor) -> Iterator[tuple[int, Tensor]]:
    step = max(1, _BLOCK // max(1, matrix.shape[1] * matrix.element_size()))
    for row in range(0, len(matrix), step):
        yield row, matrix[row : row + step]
