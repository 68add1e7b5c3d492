"""Library versions and machine of a run, for ``versions.json`` and ``machine.json``."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from stretto.core.machine import cores, gpus, processor
from stretto.core.records import Record

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "msgspec", "numpy", "pydantic", "uvicorn")


class Machine(Record, frozen=True):
    """Hardware and system of a machine. Example: ``Machine(system="Linux 6.1", processor="AMD EPYC 9B14", cores=2,
    memory_gib=24.0, accelerators=())``"""

    system: str
    processor: str
    cores: int
    memory_gib: float
    accelerators: tuple[str, ...]


def library_versions() -> dict[str, str]:
    """Return the versions of Python, of stretto and of the libraries that influence its numbers, by name. Libraries
    that are not installed are left out."""
    versions = {"python": platform.python_version()}
    for name in ("stretto", *_LIBRARIES):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def machine() -> Machine:
    """Describe this machine. `cores` counts those that this process may use; `accelerators` are the visible NVIDIA
    GPUs."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=processor(),
        cores=cores(),
        memory_gib=round(pages * page / 2**30, 1),
        accelerators=tuple(f"{gpu.name}, {gpu.memory >> 20} MiB" for gpu in gpus()),
    )
