"""Checksums of what the ledger holds: SQLite notices a torn page, not a flipped bit in the middle of one."""

from __future__ import annotations

import msgspec
import xxhash

from stretto.core.errors import StoreError
from stretto.core.records import Batch, Completion, Trajectory

SIZE = 8  #: bytes of a seal

_encode = msgspec.msgpack.Encoder().encode


def seal(*content: object) -> bytes:
    """XXH3 (64 bits) of the content, in order."""
    return xxhash.xxh3_64_digest(_encode(content))


def batch_seal(batch: Batch, number: int) -> bytes:
    """The seal of everything that a batch does to the weights: tokens, numbers, versions, rewards, and their order, in
    a ledger of format `number`."""
    groups = [
        (group.id, group.prompt.token_ids, [_sealed(group.id, trajectory, number) for trajectory in group.trajectories])
        for group in batch.groups
    ]
    return seal(batch.step, batch.version, batch.oldest_trainable, groups)


def _sealed(group: str, trajectory: Trajectory, number: int) -> tuple[object, ...]:
    verdict = trajectory.verdict
    if number > 2:
        return trajectory.id, trajectory.segments, verdict.outcome, verdict.reward
    (segment,) = trajectory.segments
    return Completion.of(group, trajectory.member, segment), verdict.outcome, verdict.reward


def check(found: object, expected: bytes, what: str) -> None:
    """Raises StoreError when what was read is not what was written."""
    if found != expected:
        raise StoreError(f"{what} is not what was written: its checksum does not fit")
