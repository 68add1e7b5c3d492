"""Identity of a run's active conductor. It is recorded in the ledger; machines that join compare it, so that they
follow only one conductor of a run."""

from __future__ import annotations

import secrets

from stretto.core.records import Record


class Tenure(Record, frozen=True, order=True):
    """Identifies one conductor process of a run, ordered by age: of two conductors, the one with the lower tenure gives
    way. Each start of the run has the next `epoch`. If two copies of a run folder are resumed, epochs are equal, and
    the random name `conductor` decides."""

    epoch: int
    conductor: str


def next_tenure(before: Tenure | None) -> Tenure:
    """Return the tenure of a new conductor: the epoch after `before` (None: 1), with a random name."""
    return Tenure(epoch=1 if before is None else before.epoch + 1, conductor=secrets.token_hex(8))
