"""How stale a batch is, token by token."""

from __future__ import annotations

from collections import Counter

from stretto.core.records import Batch


def loss_tokens(batch: Batch) -> Counter[int]:
    """How many tokens are in the loss, by their staleness: the batch's version less their own.

    A trajectory has few versions: to count each of them is quicker than to go through all tokens in Python.
    """
    found = Counter[int]()
    for group in batch.groups:
        oldest = batch.oldest_of(group.id)
        for trajectory in group.trajectories:
            versions = trajectory.versions
            found.update({batch.version - one: versions.count(one) for one in set(versions) if one >= oldest})
    return found
