"""`stretto.Ledger`: every trajectory of a run on record, so that a run that was killed trains nothing twice."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.core.errors import Problem, RunFolderError
from stretto.core.records import Batch
from stretto.doors.mistakes import checked
from stretto.store import lock
from stretto.store.ledger.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import UnfinishedGroup, read_batches, read_unfinished


class FolderLedger(Ledger):
    """The ledger of a folder, which one process writes at a time; one that is there is gone on with.

    Example::

        # What became of the trajectories of a loop, and a fact of its own that is kept with them.
        with stretto.Ledger("loop") as ledger:
            scheduler = stretto.Scheduler([(2, 3, 4)], batch_size=1, group_size=2, ledger=ledger)
            ticket = scheduler.admit()
            ledger.put("note", "one group is in flight")
            print(ledger.balance().in_flight, ledger.get("note", str))
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        """`settings` are keys of a recipe's section ``[store]``.

        Raises:
            RunFolderError: another process writes there, or the folder cannot be made.
            StoreError: what is there is no ledger, or is damaged.
            RecipeError: a setting is not what it should be.
        """
        self.folder = Path(folder).expanduser()
        config = checked(settings, "Ledger", StoreConfig)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            found = f"cannot be created: {error.strerror}"
            raise RunFolderError([Problem(str(folder), found, "give another folder")]) from error
        self._release = weakref.finalize(self, os.close, lock.acquire(self.folder))
        self._file_of_all = self.folder / "ledger.sqlite"
        try:
            super().__init__(self._file_of_all, config)
        except BaseException:
            self._release()
            raise

    def batches(self, after: int) -> Sequence[Batch]:
        """The batches of the steps after `after`, as they were trained on.

        Raises:
            StoreError: one of them is not on record with every token.
        """
        self.flush()
        return list(read_batches(self._file_of_all, after, self.last_step() or after))

    def unfinished(self) -> Sequence[UnfinishedGroup]:
        """The groups in flight and in the buffer, in the order of their admission.

        Raises:
            StoreError: one of them is not whole.
        """
        self.flush()
        return read_unfinished(self._file_of_all)

    def close(self) -> None:
        """Write what is left, and let other processes in."""
        try:
            super().close()
        finally:
            self._release()

    def __enter__(self) -> FolderLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
