"""Command line of this process as `ps` shows it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

_ARGUMENTS = slice(45, 47)  # fields arg_start and arg_end of /proc/PID/stat, counted after the name
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_ADDRESSES = (
    *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack"),
    *("arg_start", "arg_end", "env_start", "env_end", "auxv"),
)


class _Map(ctypes.Structure):
    """``struct prctl_mm_map``: memory layout of a process."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in _ADDRESSES),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def make_room(size: int) -> None:
    """Reserve `size` bytes for the command line of this process and of its forks.

    Raises:
        OSError: the kernel refuses.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.malloc.restype = library.sbrk.restype = ctypes.c_void_p
    library.malloc.argtypes, library.sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_ssize_t]
    fields = [int(field) for field in Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[1:]]
    code, data, environment = fields[22:24], fields[41:43], fields[46:48]
    room = library.malloc(size)  # for good: the kernel reads there when somebody asks for the command line
    ctypes.memset(room, 0, size)
    heap = library.sbrk(0)
    parts = _Map(*code, *data, fields[43], heap, fields[24], room, room + size, *environment, 0, 0, 0xFFFFFFFF)
    if library.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(parts), ctypes.sizeof(parts), 0) != 0:
        raise OSError(ctypes.get_errno(), "the command line cannot be longer")


def show_as(words: Sequence[str]) -> None:
    """Overwrite the command line that `ps` shows with these words, as far as there is room; OSError without /proc."""
    start, end = map(int, Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[_ARGUMENTS])
    text = "\0".join(words).encode()[: end - start - 1]
    if start:  # 0 where a process may not know it
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
