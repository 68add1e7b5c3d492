"""Checksums of what the ledger holds: SQLite notices a torn page, not a flipped bit in the middle of one."""

from __future__ import annotations

import msgspec
import xxhash

from stretto.core.errors import StoreError
from stretto.core.records import Batch

SIZE = 8  #: bytes of a seal

_encode = msgspec.msgpack.Encoder().encode


def seal(*content: object) -> bytes:
    """XXH3 (64 bits) of the content, in order."""
    return xxhash.xxh3_64_digest(_encode(content))


def batch_seal(batch: Batch) -> bytes:
    """The seal of everything that a batch does to the weights: tokens, numbers, versions, rewards, and their order."""
    answers = [
        (
            group.id,
            group.prompt.token_ids,
            [(t.completion, t.verdict.outcome, t.verdict.reward) for t in group.trajectories],
        )
        for group in batch.groups
    ]
    return seal(batch.step, batch.version, batch.oldest_trainable, answers)


def check(found: object, expected: bytes, what: str) -> None:
    """Raises StoreError when what was read is not what was written."""
    if found != expected:
        raise StoreError(f"{what} is not what was written: its checksum does not fit")
