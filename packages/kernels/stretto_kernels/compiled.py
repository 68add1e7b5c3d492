"""Tools for loops compiled by numba: decorators, access to tensors by address, and shared arithmetic.

A loop gets addresses of tensors instead of arrays, because unpacking an array takes longer than the work of a small
step. Loops support float32, and bfloat16 as 16-bit integers (`halves`). All sums and products are computed in float32.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

_numba: Any
try:
    import numba as _numba
    import numba.core.cgutils
    import numba.core.registry
    import numba.extending  # noqa: F401
except ImportError:  # optional on a machine with a GPU
    _numba = None

#: Whether numba is installed.
AVAILABLE = _numba is not None

_carray: Any = _numba.carray if AVAILABLE else None

F = np.float32
U = np.uint64  # numba treats signed indices as possibly negative, and then does not vectorise

# Sums may be reordered; infinities and NaN keep their meaning.
_OPTIONS = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}


#: numba's helpers that generate LLVM code, for operations that numba does not offer; None without numba.
code: Any = _numba.core.cgutils if AVAILABLE else None


def abilities() -> str:
    """The instruction sets of the CPU that loops are compiled for, as LLVM names them; "" without numba."""
    return str(_numba.core.registry.cpu_target.target_context.codegen().magic_tuple()[2]) if AVAILABLE else ""


def written(write: Callable[..., None], arguments: int) -> Any:
    """Make a function for loops that is generated as LLVM code and returns nothing; None without numba. The function
    takes one tuple of 64-bit integers.

    Args:
        write: appends the code; called with LLVM's builder and the LLVM values of the integers.
        arguments: number of integers in the tuple.
    """
    if not AVAILABLE:
        return None

    def typed(context: Any, given: Any) -> Any:
        """Return the signature and the code generator, as numba requires."""

        def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
            write(builder, *code.unpack_tuple(builder, values[0], arguments))
            return target.get_dummy_value()

        return _numba.void(_numba.types.UniTuple(_numba.int64, arguments)), emit

    return _numba.extending.intrinsic(typed)


def inlined(function: Callable[..., Any]) -> Any:
    """Decorator: a function that is inlined into each loop that calls it; without numba, the function itself.

    Without inlining, a process that compiles the loop and a process that loads it from disk would run different copies
    of the function, and completions would differ in their last bits.
    """
    return _numba.njit(forceinline=True, **_OPTIONS)(function) if AVAILABLE else function


def compiled(function: Callable[..., Any]) -> Any:
    """Decorator: a loop that is compiled on its first call, and cached on disk if possible; without numba, the function
    itself.

    A cached loop is compiled anew when a file of this folder, or of the loop's, has changed: numba itself only looks at
    the loop's file, not at those of the functions that are inlined.
    """
    if not AVAILABLE:
        return function
    try:
        loop = _numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # numba found no folder that it may write to
        return _numba.njit(**_OPTIONS)(function)
    file = loop._cache._cache_file
    file._source_stamp = (file._source_stamp, _stamp(Path(__file__).parent, Path(inspect.getfile(function)).parent))
    file.save = partial(_save, file)
    return loop


def _save(file: Any, key: Any, data: Any) -> None:
    """Save a compiled loop in numba's cache, under a name that is only its own, then add the name to the index.

    numba itself numbers the files of a loop, and writes the index first. If the process ended then, the index would
    name a file of earlier code or of other types, and all later processes would run it.
    """
    start = Path(file._index_name).stem
    name = f"{start}.{sha256(repr((file._source_stamp, key)).encode()).hexdigest()[:16]}.nbc"
    file._save_data(name, data)
    known = file._load_index()
    file._save_index(known | {key: name})
    for old in Path(file._cache_path).glob(f"{start}.*.nbc") if not known else ():
        if old.name != name:  # of earlier code
            with suppress(OSError):
                old.unlink()


@cache
def _stamp(*folders: Path) -> tuple[tuple[str, float, int], ...]:
    """Name, time of change and size of the Python files in the folders; changes when one of them is edited."""
    files = [(path, path.stat()) for folder in folders for path in sorted(folder.glob("*.py"))]
    return tuple((path.name, status.st_mtime, status.st_size) for path, status in files)


def body(loop: Any) -> Any:
    """A loop made by `compiled`, as a function that is inlined into another loop (see `inlined`)."""
    return inlined(loop.py_func) if AVAILABLE else loop


def computes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether compiled loops are available for tensors with this device and dtype: on the CPU, in float32 or
    bfloat16."""
    return AVAILABLE and device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)


def _as_pointer(context: Any, address: Any) -> Any:
    """Signature and code of `_pointer`, which casts an integer address to a pointer."""

    def code(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], target.get_value_type(signature.return_type))

    return _numba.types.voidptr(address), code


_pointer: Any = _numba.extending.intrinsic(_as_pointer) if AVAILABLE else None


@inlined
def floats(address: Any, count: Any) -> Any:
    """The `count` float32 numbers at an address, as an array."""
    return _carray(_pointer(address), (count,), np.float32)


@inlined
def halves(address: Any, count: Any) -> Any:
    """The `count` bfloat16 numbers at an address, as an array of 16-bit integers."""
    return _carray(_pointer(address), (count,), np.uint16)


@inlined
def integers(address: Any, count: Any) -> Any:
    """The `count` 64-bit integers at an address, as an array."""
    return _carray(_pointer(address), (count,), np.int64)


@inlined
def widened(half: Any) -> Any:
    """Convert a bfloat16 (as an integer) to float32: the same bits followed by 16 zeros."""
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@inlined
def halved(number: Any) -> Any:
    """Convert a float32 number to the nearest bfloat16 (as an integer), ties to even; not for NaN."""
    bits = np.float32(number).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@inlined
def rounded(number: Any) -> Any:
    """Round a float32 number to bfloat16; the result is float32."""
    return widened(halved(number))


@inlined
def exp(x: Any) -> Any:
    """e^x with a relative error of 2e-7 for x from -87 to 87, and about e^±87 beyond: a power of two times a Taylor
    series. It vectorises."""
    t = min(max(x * F(1.4426950408889634), F(-126.0)), F(126.0))
    whole = np.floor(t + F(0.5))
    rest = t - whole
    series = rest * F(1.5403530393381609e-4) + F(1.3333558146428443e-3)
    series = series * rest + F(9.618129107628477e-3)
    series = series * rest + F(5.550410866482158e-2)
    series = series * rest + F(0.2402265069591007)
    series = series * rest + F(0.6931471805599453)
    series = series * rest + F(1.0)
    return series * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@inlined
def tanh(x: Any) -> Any:
    """tanh x with a relative error of 2e-7 (Cephes, tanhf.c). Near 0, where 1 - 2 / (e^2x + 1) would cancel, a series
    is used. It vectorises."""
    size, square = abs(x), x * x
    series = square * F(-5.70498872745e-3) + F(2.06390887954e-2)
    series = series * square - F(5.37397155531e-2)
    series = series * square + F(1.33314422036e-1)
    series = series * square - F(3.33332819422e-1)
    far = F(1.0) - F(2.0) / (exp(size + size) + F(1.0))
    return x + x * square * series if size < F(0.625) else (far if x > F(0.0) else -far)
