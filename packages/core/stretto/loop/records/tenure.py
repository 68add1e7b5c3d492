"""Which conductor of a run is at work: a fact of the ledger, and what machines compare."""

from __future__ import annotations

import secrets

from stretto.core.records import Record


class Tenure(Record, frozen=True, order=True):
    """One conductor of a run. Each start raises the epoch that the ledger has; of two that were resumed from copies of
    one folder, the name decides. The lower one gives way."""

    epoch: int
    conductor: str


def next_tenure(before: Tenure | None) -> Tenure:
    """The tenure of a conductor that begins where `before` was the last one."""
    return Tenure(epoch=1 if before is None else before.epoch + 1, conductor=secrets.token_hex(8))
