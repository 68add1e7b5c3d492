"""The active conductor of a run: recorded in the ledger, compared by machines."""

from __future__ import annotations

import secrets

from stretto.core.records import Record


class Tenure(Record, frozen=True, order=True):
    """Identifies one conductor process of a run. Each start increments the ledger's epoch; ties (two copies of a folder
    resumed) are decided by the name. The lower one gives way."""

    epoch: int
    conductor: str


def next_tenure(before: Tenure | None) -> Tenure:
    """Tenure of a new conductor: the epoch after `before` (1 if None), with a random name."""
    return Tenure(epoch=1 if before is None else before.epoch + 1, conductor=secrets.token_hex(8))
