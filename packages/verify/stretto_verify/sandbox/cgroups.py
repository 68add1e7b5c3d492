"""Control group of a sandbox: limits on the memory and processes of everything in it.

Creating groups usually needs root. Without control groups, level A is not possible.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_PREFIX = "stretto-"
_REMOVE_SECONDS = 2.0
_numbers = itertools.count()


@dataclass(frozen=True)
class Hierarchy:
    """A folder in which groups can be created. `files`: by the name of a group's file, the limit (``memory``, ``swap``
    or ``processes``) that is written into it."""

    folder: Path
    files: Mapping[str, str]


_V1 = {
    "memory": {"memory.limit_in_bytes": "memory", "memory.memsw.limit_in_bytes": "memory"},
    "pids": {"pids.max": "processes"},
}
_V2 = {"memory.max": "memory", "memory.swap.max": "swap", "pids.max": "processes"}
_OPTIONAL = {"memory.memsw.limit_in_bytes", "memory.swap.max"}  # kernels without swap accounting lack them


class ProgramGroup:
    """A control group of one sandbox, in every hierarchy that is needed; made by `create`."""

    def __init__(self) -> None:
        self._folders: list[Path] = []

    @classmethod
    def create(cls, memory: int, processes: int, hierarchies: list[Hierarchy] | None = None) -> Self:
        """Create a group with at most `memory` bytes, no swap, and `processes` processes; groups that dead processes
        have left are removed. `hierarchies` None: `find_hierarchies`.

        Raises:
            OSError: no hierarchy supports both limits, or this process may not change it.
        """
        name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        group = cls()
        try:
            for hierarchy in find_hierarchies() if hierarchies is None else hierarchies:
                _remove_orphans(hierarchy.folder)
                folder = hierarchy.folder / name
                folder.mkdir()
                group._folders.append(folder)
                limits = {"memory": memory, "swap": 0, "processes": processes}
                for file, limit in hierarchy.files.items():
                    if file not in _OPTIONAL or (folder / file).exists():
                        with open(folder / file, "r+", encoding="utf-8") as setting:
                            setting.write(str(limits[limit]))
        except OSError:
            group.close()
            raise
        return group

    def add(self, process: int) -> None:
        """Move a process, given by its pid, into the group; its later children are in it too.

        The kernel takes some milliseconds, so programs are forked inside the group instead of moved.
        """
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(process), encoding="utf-8")

    def close(self) -> None:
        """Remove the group, whose processes must be gone, or about to go: after 2 seconds with processes it stays."""
        for folder in self._folders:
            _remove(folder)
        self._folders = []


def remove_groups_of(process: int) -> None:
    """Remove the groups that a killed process, given by its pid, has left. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        for hierarchy in find_hierarchies():
            for folder in hierarchy.folder.glob(f"{_PREFIX}{process}-*"):
                _remove(folder)


def find_hierarchies(proc: Path = Path("/proc/self")) -> list[Hierarchy]:
    """Folders for groups of memory and processes: that of this process's group, else the visible root. Whether this
    process may create groups there is not checked. `proc`: the folder with the kernel's files `cgroup` and `mounts`.

    Raises:
        OSError: there are none.
    """
    own = dict(_own_groups(os.fsdecode((proc / "cgroup").read_bytes())))
    mounts = dict(_mounts(os.fsdecode((proc / "mounts").read_bytes())))
    if "memory" in mounts and "pids" in mounts:
        return [
            Hierarchy(_below(mounts[controller], own.get(controller, "/")), files) for controller, files in _V1.items()
        ]
    if "" in mounts:
        folder = _below(mounts[""], own.get("", "/"))
        if {"memory", "pids"} <= set((folder / "cgroup.subtree_control").read_text(encoding="utf-8").split()):
            return [Hierarchy(folder, _V2)]
    raise OSError("no control groups for memory and processes")


def _own_groups(text: str) -> Iterator[tuple[str, str]]:
    """Controller and path in each line of /proc/self/cgroup: ``4:memory:/path``, or ``0::/path`` in version 2."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _mounts(text: str) -> Iterator[tuple[str, Path]]:
    """Controller and mount folder of each hierarchy; the controller of version 2 is called ``""``."""
    for line in text.splitlines():
        _, folder, kind, options, *_ = line.split(" ")
        if kind == "cgroup2":
            yield "", Path(folder)
        elif kind == "cgroup":
            for option in options.split(","):
                yield option, Path(folder)


def _below(mount: Path, path: str) -> Path:
    """Folder of this process's group, whose `path` in the hierarchy the kernel gives. In a container, that may be one
    outside that is not visible: then the `mount` folder."""
    inside = mount / path.lstrip("/")
    return inside if inside.is_dir() else mount


def _remove(folder: Path) -> None:
    until = time.monotonic() + _REMOVE_SECONDS
    while folder.exists() and time.monotonic() < until:
        try:
            folder.rmdir()
        except OSError:  # it has processes
            time.sleep(0.005)


def _remove_orphans(parent: Path) -> None:
    """Remove the groups in the folder `parent` whose creator, a process id in their name, has ended. Errors are
    ignored."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
