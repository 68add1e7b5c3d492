"""What a trainer's state is made of: the last whole checkpoint, and the batches since (docs/decisions/0002)."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.core.records import Batch
from stretto.store.folder.checkpoints import Checkpoint, Checkpoints
from stretto.store.folder.run_folder import RunFolder
from stretto.store.ledger.reading import read_batches


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
            StoreError: there are checkpoints and none is whole.
        """
        return Checkpoints(self.folder.checkpoints, self.keep).latest(version)

    def batch(self, step: int) -> Batch:
        """What step `step` was trained on.

        Raises:
            StoreError: it is not on record, with every token.
        """
        (batch,) = read_batches(self.folder.ledger, step - 1, step)
        return batch
