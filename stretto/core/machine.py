"""The processor of this machine, and the folder of its user in which runs keep what they share."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor() -> str:
    """The model of the processor, such as ``AMD EPYC 9B14``."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def cache_folder() -> Path:
    """Where built models, warm starts and measured kernels are kept between runs: ``$STRETTO_CACHE``, else the user's
    cache."""
    root = os.environ.get("STRETTO_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stretto"
