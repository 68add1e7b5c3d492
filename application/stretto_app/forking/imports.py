"""Faster imports of large libraries: without garbage collection, with fewer file reads and, in a process that forks,
without threads.

On each import, transformers reads all 2,100 files of its models for the names in them, and twice, since its cache holds
128 of 520 folders; of each file it splits all lines to find one that begins with ``__all__``. That is a fifth of a
role's import time. It also asks Python which distribution each package belongs to, and Python makes a path of each
installed file; torch reads source files to name the line of each operation. Those take a tenth.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from stretto.processes.spawn import OFFLINE, settings

SCANS = "transformers.utils.import_utils"
SOURCES = "torch._library.utils"
_NAMES, _FOLDER = "fetch__all__", "create_import_structure_from_path"
_PLACE = "get_source"
_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch asks the kernel for them, for tensors of 2 MiB and more


@contextmanager
def quick_imports() -> Iterator[None]:
    """Context manager for imports: turns off the garbage collector, which would traverse all modules again and again (a
    fifth of the time). transformers and torch, if imported in the block, read fewer files."""
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
        if name not in PATCHES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        with _quick_metadata() if module.__name__ == SCANS else nullcontext():
            super().exec_module(module)
        PATCHES[module.__name__](module)


@contextmanager
def _quick_metadata() -> Iterator[None]:
    library = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = distributions_by_package
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = library


def distributions_by_package() -> Mapping[str, list[str]]:
    """Names of the installed distributions by package, as `importlib.metadata.packages_distributions` gives them, but
    read from the text of each distribution's record, which is quicker."""
    found: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        declared = (distribution.read_text("top_level.txt") or "").split()
        name = _header(distribution.read_text("METADATA") or "", "Name") or distribution.metadata["Name"]
        for package in declared or _packages_of(distribution):
            found.setdefault(package, []).append(name)
    return found


def _header(text: str, name: str) -> str:
    """Value of the first header `name` of a metadata file; empty if there is none."""
    headers, _, _ = text.partition("\n\n")
    _, _, found = f"\n{headers}".partition(f"\n{name}:")
    return found.partition("\n")[0].strip()


def _packages_of(distribution: importlib.metadata.Distribution) -> set[str]:
    record = distribution.read_text("RECORD")
    files = [str(file) for file in distribution.files or ()] if record is None else record.splitlines()
    paths = [line.partition(",")[0].strip('"') for line in files]
    if sys.version_info < (3, 12):  # later ones count every file
        paths = [path for path in paths if path.endswith(".py")]
    pairs = {path.partition("/")[:2] for path in paths}
    names = {first if inside else inspect.getmodulename(first) or first for first, inside in pairs}
    return {name for name in names if "." not in name}


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


def name_lines(module: ModuleType) -> None:
    """Patch torch to name the place of an operation without a look at the source text. Versions without this function
    are left unchanged."""
    if callable(getattr(module, _PLACE, None)):
        setattr(module, _PLACE, _place)


def _place(stacklevel: int) -> str:
    """``FILE:LINE`` of a caller of this function. `stacklevel` 1: its caller; 2: the caller's caller."""
    frame = sys._getframe(stacklevel)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


#: What is done to a module once it is imported.
PATCHES: Mapping[str, Callable[[ModuleType], None]] = {SCANS: read_once, SOURCES: name_lines}
