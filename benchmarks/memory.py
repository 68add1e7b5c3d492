"""Resident memory of this process (Linux)."""

from __future__ import annotations

from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Now."""
    return _field("VmRSS")


def forget_peak() -> None:
    """Let the peak begin at what is resident now."""
    _CLEAR.write_text("5")


def peak_bytes() -> int:
    """The most since the process began, or since `forget_peak`."""
    return _field("VmHWM")


def _field(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")
