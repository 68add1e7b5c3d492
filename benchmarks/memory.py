"""Resident memory of this process (Linux)."""

from __future__ import annotations

from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Resident memory now, in bytes."""
    return _field("VmRSS")


def forget_peak() -> None:
    """Reset the peak to the present resident memory."""
    _CLEAR.write_text("5")


def peak_bytes() -> int:
    """Peak resident memory since the process began, or since `forget_peak`."""
    return _field("VmHWM")


def _field(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")
