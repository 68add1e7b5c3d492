"""The comparison of the weights in two policy folders."""

from __future__ import annotations

import filecmp
from pathlib import Path


def same_weights(first: Path, second: Path) -> bool | None:
    """Whether the weight files of two policy folders are equal byte for byte. None if they cannot be compared: a folder
    has no weights, or their weight files have different names. Raises OSError if a file cannot be read."""
    ours, theirs = weight_files(first), weight_files(second)
    if not ours or [path.name for path in ours] != [path.name for path in theirs]:
        return None
    return all(filecmp.cmp(*pair, shallow=False) for pair in zip(ours, theirs, strict=True))


def why_incomparable(first: Path, second: Path) -> str:
    """Return why `same_weights` returns None for these two folders, in words for a message. Only for such folders."""
    for policy in (first, second):
        if not weight_files(policy):
            return f"{policy} has no weights" if policy.is_dir() else f"{policy} is not there"
    return f"{first} and {second} are divided into files in different ways"


def weight_files(policy: Path) -> list[Path]:
    """Return the weight files of a policy folder, sorted: one, or several of a large model; empty if the folder does
    not exist or has none."""
    return sorted(policy.glob("model*.safetensors"))
