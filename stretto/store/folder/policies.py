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


def why_incomparable(first: Path, second: Path) -> str:
    """Why `same_weights` says None."""
    for policy in (first, second):
        if not _weights(policy):
            return f"{policy} has no weights" if policy.is_dir() else f"{policy} is not there"
    return f"{first} and {second} are divided into files in different ways"


def _weights(policy: Path) -> list[Path]:
    """One file, or several where the policy is too large for one."""
    return sorted(policy.glob("model*.safetensors"))
