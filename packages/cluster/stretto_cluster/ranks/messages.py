"""Arguments of the processes of ranks 1, 2, ..., and orders to them."""

from __future__ import annotations

from typing import Any, Self

import msgspec

from stretto.core.records import Record
from stretto.trainer.messages import RanksAwaited, ToTrainer, TrainerSpec

RANK_ROLE = "stretto_cluster.ranks.rank"
RANK_KEY = "STRETTO_RANK_KEY"


class RankSpec(Record, frozen=True):
    """Arguments of the process of rank 1, 2, ...: the address of rank 0, and settings that differ between machines.
    Rank 0 sends the other settings after the rank has joined. `hung`: seconds without its heartbeat after which the
    rank ends. `model`, `reference`: folders on this machine; None: as rank 0.

    The key is in the environment variable `RANK_KEY`, because other users of a machine can read command lines.
    """

    rank: int
    host: str
    port: int
    threads: int
    hung: float = 10.0
    gpu: int = 0  # index of its GPU among the visible GPUs
    model: str | None = None  # the model folder on this machine; None: the same path as rank 0's
    reference: str | None = None  # `algorithm.reference.path` on this machine; None: the same path as rank 0's
    tls: str = ""  # the folder of certificates on this machine; "": no TLS

    @classmethod
    def of(cls, awaited: RanksAwaited, rank: int, trainer: TrainerSpec, **there: Any) -> Self:
        """The spec of an awaited rank, to be started as the role `RANK_ROLE` with the environment `environment_of`.
        `trainer`: spec of rank 0. `there`: further fields, of the rank's machine."""
        assert rank in awaited.ranks, f"rank {rank} is not awaited"
        return cls(rank, awaited.host, awaited.port, trainer.threads, trainer.hung, **there)


def environment_of(awaited: RanksAwaited) -> dict[str, str]:
    """Environment variables that awaited ranks need: `RANK_KEY` with the key."""
    return {RANK_KEY: awaited.key}


class RankStart(Record, frozen=True, tag=True):
    """Order of rank 0 to a rank that has joined: join the process group at rank 0's store, then carry out orders.
    `trainer`: JSON text of rank 0's `TrainerSpec`."""

    store: int  # port of the store
    trainer: str


ToRank = RankStart | ToTrainer
TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
