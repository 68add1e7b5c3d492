"""Restoring a trainer: the start of the run, the last whole checkpoint, the later batches (decision 2)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from stretto.core.errors import StoreError
from stretto.core.records import Batch
from stretto.store.checkpoints import Checkpoint, Checkpoints, FileSeal, seal_files, verify_files
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import read_batches, read_fact
from stretto.store.run_folder import RunFolder

START = "start"  #: ledger key: digests of every file that the run starts from, by folder
BASE = "base weights"  #: ledger key: `weights_digest` of the model before any training


@dataclass(frozen=True)
class Recovery:
    """Reads the checkpoints and batches of a run, from which a trainer is restored. Every call reads whole files.

    Example: there is a checkpoint of step 40, and the trainer died at version 43. ``newest(43).step == 40``; then the
    trainer repeats ``batch(41)``, ``batch(42)`` and ``batch(43)``. `keep`: number of checkpoints that the run keeps.
    """

    folder: RunFolder
    keep: int

    def newest(self, version: int) -> Checkpoint | None:
        """Find the newest whole checkpoint of step `version` or earlier; None if training must start from version 0.

        Raises:
            StoreError: there are checkpoints but none is whole, or the files that the run started from have changed.
        """
        if version or self.folder.policy(0).exists():
            check_start(self.folder)
        return Checkpoints(self.folder.checkpoints, self.keep).latest(version)

    def batch(self, step: int) -> Batch:
        """Read the batch that was trained on in step `step`. Raises StoreError if it is not completely in the
        ledger."""
        (batch,) = read_batches(self.folder.ledger, step - 1, step)
        return batch


def seal_start(
    ledger: Ledger, policy: Path, reference: str | None, base: Path | None = None, loaded: Collection[str] = ()
) -> None:
    """Record in the ledger, and force to disk, the digests of all files that the run starts from: `policy` (the folder
    of version 0) and `reference` (the folder of the reference model; None: there is none); and of the weights of
    `base`, the model before a warm start (None: there was none, and `policy` is a copy of it), which the files `loaded`
    hold. Raises OSError if a file cannot be read, StoreError if the ledger cannot be written."""
    start = {"policy/v000000": (files := seal_files(policy))}
    if reference is not None:
        start[reference] = seal_files(Path(reference))
    ledger.put(START, start)
    ledger.put(BASE, weights_digest(files if base is None else seal_files(base), loaded))
    ledger.sync()


def weights_digest(files: Mapping[str, FileSeal], loaded: Collection[str]) -> str:
    """Compute a digest of the weights of a model folder from its `seal_files`: 16 hexadecimal digits. Only the files
    `loaded` count (`loaded_files`), by their contents."""
    found = sorted(files[name].xxh3 for name in loaded)
    return hashlib.blake2b("".join(found).encode(), digest_size=8).hexdigest()


def check_start(folder: RunFolder) -> None:
    """Compare the files that the run started from with their recorded digests. Does nothing for a run of an older
    format, which has no digests.

    Raises:
        StoreError: a file is missing or changed; names the file and the recorded value.
    """
    start = read_fact(folder.ledger, START, dict[str, dict[str, FileSeal]]) or {}
    for name, files in start.items():
        try:
            verify_files(folder.path / name, files, "the ledger")
        except StoreError as error:
            raise StoreError(f"{error}; bring the file back that the run started from") from error
