"""Sources of a trainer's state: start, last whole checkpoint, later batches (docs/explanation/decisions/0002)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stretto.core.errors import StoreError
from stretto.core.records import Batch
from stretto.store.folder.checkpoints import Checkpoint, Checkpoints, FileSeal, seal_files, verify_files
from stretto.store.folder.run_folder import RunFolder
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import read_batches, read_fact

START = "start"  #: ledger key: digests of every file that the run starts from, by folder


@dataclass(frozen=True)
class Recovery:
    """Reads checkpoints and batches of the run to restore a trainer; every call reads whole files.

    Example: checkpoint of step 40, batches of 41 to 43: ``newest(43).step == 40``, then ``batch(41)``.
    """

    folder: RunFolder
    keep: int

    def newest(self, version: int) -> Checkpoint | None:
        """The newest whole checkpoint not past `version`; None if training must start from the beginning.

        Raises:
            StoreError: there are checkpoints but none is whole, or the start has changed.
        """
        if version or self.folder.policy(0).exists():
            check_start(self.folder)
        return Checkpoints(self.folder.checkpoints, self.keep).latest(version)

    def batch(self, step: int) -> Batch:
        """The batch of step `step`.

        Raises:
            StoreError: it is not fully on record.
        """
        (batch,) = read_batches(self.folder.ledger, step - 1, step)
        return batch


def seal_start(ledger: Ledger, policy: Path, reference: str | None) -> None:
    """Record the digests of the folders that the run starts from: the policy (version 0) and the reference."""
    start = {"policy/v000000": seal_files(policy)}
    if reference is not None:
        start[reference] = seal_files(Path(reference))
    ledger.put(START, start)
    ledger.sync()


def check_start(folder: RunFolder) -> None:
    """Compare the folders that the run started from with their recorded digests. Runs of an older format have none.

    Raises:
        StoreError: a file is missing or changed; names it and the recorded state.
    """
    start = read_fact(folder.ledger, START, dict[str, dict[str, FileSeal]]) or {}
    for name, files in start.items():
        try:
            verify_files(folder.path / name, files, "the ledger")
        except StoreError as error:
            raise StoreError(f"{error}; bring the file back that the run started from") from error
