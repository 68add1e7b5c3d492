"""Faster imports of large libraries: without garbage collection, with fewer file reads of transformers and, in a
process that forks, without threads.

On each import, transformers reads all 2,100 files of its models for the names in them, and twice, since its cache holds
128 of 520 folders; of each file it splits all lines to find one that begins with ``__all__``. That is a fifth of a
role's import time.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from stretto.processes.spawn import OFFLINE, settings

SCANS = "transformers.utils.import_utils"
_NAMES, _FOLDER = "fetch__all__", "create_import_structure_from_path"
_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch asks the kernel for them, for tensors of 2 MiB and more


@contextmanager
def quick_imports() -> Iterator[None]:
    """Context manager for imports: turns off the garbage collector, which would traverse all modules again and again (a
    fifth of the time), and patches transformers, if it is imported in the block, to read its files once."""
    collecting, finder = gc.isenabled(), _Finder()
    gc.disable()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if collecting:
            gc.enable()


@contextmanager
def imports_of_roles() -> Iterator[None]:
    """Context manager: `quick_imports` with the environment variables of a role, which libraries read on import; they
    are restored afterwards. Libraries get one thread each, because a process with threads cannot be forked."""
    further = {"OPENBLAS_NUM_THREADS": "1", _LARGE_PAGES: os.environ.get(_LARGE_PAGES, "1")}
    wanted = {name: value for name, value in (settings(1) | further).items() if name != OFFLINE}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        with quick_imports():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != SCANS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        read_once(module)


def read_once(module: ModuleType) -> None:
    """Patch transformers to cache all folders that it has read, and to split only the part of a file that begins with
    its list of names. Versions without these functions are left unchanged."""
    names, folder = getattr(module, _NAMES, None), getattr(module, _FOLDER, None)
    if callable(names):
        setattr(module, _NAMES, functools.partial(_names_of, names))
    if folder is not None and hasattr(folder, "__wrapped__"):
        setattr(module, _FOLDER, functools.cache(folder.__wrapped__))


def _names_of(names: Any, text: str) -> Any:
    """Call transformers' function `names` on the part of a file's text from its last line with ``__all__`` on; returns
    its result, [] if there is no such line."""
    start = text.rfind("\n__all__") + 1
    return names(text[start:]) if start or text.startswith("__all__") else []
