"""A recorder with its folder and its ledger."""

import time

from stretto.core.records import Update
from stretto.loop.records.recorder import Recorder
from stretto.loop.records.reporter import SilentReporter
from stretto.loop.records.totals import RunClock, Work
from stretto.store.inspection import Inspection
from stretto.store.ledger.ledger import Ledger
from stretto.store.run_folder import RunFolder
from stretto.store.totals import Totals
from stretto_report.reading.inspection import inspect_run
from tests.store.make import PROMPT, Make, buffered

UPDATE = Update(step=1, version=1, trained_tokens=2, masked_tokens=0, metrics={})
BATCH = Make.batch(1, Make.group("0.17.0", Make.trajectory("0.17.0")))  # two tokens

_NONE = Totals(max_staleness=None)  # no earlier process

__all__ = ["BATCH", "PROMPT", "UPDATE", "Desk"]


class Desk:
    """`work`: what the roles have done; a test sets it."""

    def __init__(self, folder: RunFolder, ledger: Ledger, earlier: Totals = _NONE) -> None:
        self.folder, self.ledger, self.work = folder, ledger, Work()
        clock = RunClock(earlier, time.monotonic())
        self.recorder = Recorder(folder, ledger, SilentReporter(), lambda: self.work, 1, earlier, clock)

    def one_step(self) -> None:
        buffered(self.ledger, *BATCH.groups)
        self.ledger.commit_batch(BATCH)
        self.recorder.updated(BATCH, UPDATE)

    def concluded(self) -> Inspection:
        """End the run; what it came to."""
        self.recorder.rl_ends()
        self.recorder.conclude()
        self.ledger.flush()
        return inspect_run(self.folder.path)
