"""The staleness rule: when a new group may start, and until which version it may be trained on.

A *version* counts published policies: version 0 is the policy at the start, and the step that trains at version b
publishes version b + 1. Everything here counts *groups* (one prompt with its completions), because a batch is B groups.

Two facts carry the bound (AReaL, arXiv 2505.24298, equation 3, and its consequence):

1. A new group may start while ``floor((N - 1) / B) <= i + eta``. N counts all groups started so far that did not drop
   out (trained, buffered, in flight), and the new one; i is the version that will sample it.
2. Version b has trained exactly b * B groups, so at most ``(eta + 1) * B`` are untrained at any time; a group
   admitted at version i is *due* by the batch trained at version ``i + eta``.

The paper enforces only the first. `rollout.batching` shows how the second is guaranteed.
"""

from __future__ import annotations

from collections import Counter

from stretto.core.records import Batch, Record

#: A version distance. ``math.inf`` means that there is no bound.
Staleness = float


def admits(counted: int, version: int, batch_size: int, max_staleness: Staleness) -> bool:
    """Whether another group may start: ``counted // batch_size <= version + max_staleness`` (equation 3). `counted`:
    groups started so far that have not dropped out. `version`: policy version that would sample the group.

    >>> admits(counted=7, version=0, batch_size=4, max_staleness=1)   # the 8th: floor(7 / 4) = 1 <= 0 + 1
    True
    >>> admits(counted=8, version=0, batch_size=4, max_staleness=1)   # the 9th: floor(8 / 4) = 2 >  0 + 1
    False
    """
    return counted // batch_size <= version + max_staleness


def due(admitted_version: int, max_staleness: Staleness) -> float:
    """Last version at which a group admitted at `admitted_version` can be trained within the bound; inf without one."""
    return admitted_version + max_staleness


class BoundChange(Record, frozen=True, array_like=True):
    """A change that the run made itself to a bound set to "auto", from `before` to `after`; the new bound applies to
    groups admitted afterwards. `step`: training step whose measurements led to the change; `key`: number of the first
    of these groups, set by the ledger.

    Example: ``BoundChange(step=9, name="max_staleness", before=4, after=2, reason="mismatch 1.2 of its limit (...)")``
    """

    step: int
    name: str  # key in `[rollout]`
    before: int
    after: int
    reason: str
    key: int = 0


def loss_tokens(batch: Batch) -> Counter[int]:
    """Number of a batch's sampled tokens that are in the loss, by staleness (the batch's version minus the version that
    sampled the token)."""
    found = Counter[int]()
    for group in batch.groups:
        oldest = batch.oldest_of(group.id)
        for trajectory in group.trajectories:
            for segment in trajectory.segments:
                for one, count in segment.stamps:
                    if one >= oldest:
                        found[batch.version - one] += count
    return found
