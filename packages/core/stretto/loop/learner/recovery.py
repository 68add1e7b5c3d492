"""State of a trainer: its start, the last whole checkpoint, the batches since (docs/explanation/decisions/0002)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stretto.core.errors import StoreError
from stretto.core.records import Batch
from stretto.store.folder.checkpoints import Checkpoint, Checkpoints, FileSeal, seal_files, verify_files
from stretto.store.folder.run_folder import RunFolder
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import read_batches, read_fact

START = "start"  #: the seals of every file that the run starts from, by folder, in the ledger


@dataclass(frozen=True)
class Recovery:
    """The run's own past, read whenever a trainer has to be brought back to it; every call reads whole files.

    Example: checkpoint of step 40, batches of 41 to 43: ``newest(43).step == 40``, and ``batch(41)`` comes next.
    """

    folder: RunFolder
    keep: int

    def newest(self, version: int) -> Checkpoint | None:
        """The newest whole checkpoint that is not past `version`; None when the run has to be trained from its start.

        Raises:
            StoreError: there are checkpoints and none is whole, or the start is not what it was.
        """
        if version or self.folder.policy(0).exists():
            check_start(self.folder)
        return Checkpoints(self.folder.checkpoints, self.keep).latest(version)

    def batch(self, step: int) -> Batch:
        """What step `step` was trained on.

        Raises:
            StoreError: it is not on record, with every token.
        """
        (batch,) = read_batches(self.folder.ledger, step - 1, step)
        return batch


def seal_start(ledger: Ledger, policy: Path, reference: str | None) -> None:
    """Put on record what the run starts from: the policy, which becomes version 0, and the folder of a reference."""
    start = {"policy/v000000": seal_files(policy)}
    if reference is not None:
        start[reference] = seal_files(Path(reference))
    ledger.put(START, start)
    ledger.sync()


def check_start(folder: RunFolder) -> None:
    """Compare what the run started from with its seals, byte for byte; a run of an older format has none.

    Raises:
        StoreError: names the file that is missing or another, and what it was.
    """
    start = read_fact(folder.ledger, START, dict[str, dict[str, FileSeal]]) or {}
    for name, files in start.items():
        try:
            verify_files(folder.path / name, files, "the ledger")
        except StoreError as error:
            raise StoreError(f"{error}; bring the file back that the run started from") from error
