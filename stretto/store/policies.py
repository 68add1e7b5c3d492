"""Policy folders held against each other, without loading them: the weights as they are on disk, byte for byte."""

from __future__ import annotations

import filecmp
from pathlib import Path


def same_weights(first: Path, second: Path) -> bool | None:
    """Whether two policy folders hold the same weights; None where they cannot be compared: one of them is not there,
    or they are divided into files in different ways.

    Raises:
        OSError: a file is there and cannot be read.
    """
    ours, theirs = _weights(first), _weights(second)
    if not ours or [path.name for path in ours] != [path.name for path in theirs]:
        return None
    return all(filecmp.cmp(*pair, shallow=False) for pair in zip(ours, theirs, strict=True))


def _weights(policy: Path) -> list[Path]:
    """One file, or several where the policy is too large for one."""
    return sorted(policy.glob("model*.safetensors"))
