"""Ranks 1 .. N-1 of a trainer: processes that rank 0 starts, passes its orders to, and watches.

    conductor ──orders──► rank 0 ──the same orders──► rank 1 .. N-1
        ▲                   │                             │ die, hang, or report an error
        └──── RankLost ─────┴──── a watching thread ◄─────┘

A dead rank makes collectives fail or hang. Either way rank 0 ends and names the lost rank; the kernel ends the other
ranks (`processes.heartbeat`), and the conductor replaces the trainer as a whole.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec

from stretto.core.errors import RoleDied
from stretto.core.frames import Unframer, frame
from stretto.core.records import Record
from stretto.processes.role import RoleProcess
from stretto.processes.run_role import Failed
from stretto.trainer.messages import RankLost, Stop, ToTrainer
from stretto.trainer.parallel.ranks import ALONE, Ranks
from stretto.trainer.parallel.rendezvous import join, open_store

_NOTICE_SECONDS = 2.0
_STUCK_SECONDS = 1.0
_READ_BYTES = 1 << 16
EXIT_CODE = 1
_FAILED = msgspec.msgpack.Decoder(Failed)


class RankSpec(Record, frozen=True):
    """The spec of ranks 1, 2, ...; `trainer` is the JSON text of rank 0's own `TrainerSpec`."""

    rank: int
    port: int
    trainer: str
    descriptor: int


class RankGroup:
    """The other ranks, as rank 0 handles them; none in a trainer of one process."""

    def __init__(self, count: int, trainer: str, threads: int, log: Path, hung: float) -> None:
        """`count` ranks in all, started with the text `trainer`; one without a heartbeat for `hung` seconds is
        killed."""
        self._wires = {rank: socket.socketpair() for rank in range(1, count)}
        self._count, self._trainer, self._threads, self._log, self._hung = count, trainer, threads, log, hung
        self._ending = False
        self._loss: Future[RankLost | Failed] = Future()

    def start(self, device: str, tell: Callable[[RankLost | Failed], None]) -> Ranks:
        """Start, watch and join the other ranks; a thread calls `tell`, for the conductor, when one is lost."""
        if not self._wires:
            return ALONE
        store = open_store(self._count)
        watching = partial(asyncio.run, self._watch(store.port, tell))
        threading.Thread(target=watching, name="ranks", daemon=True).start()
        return join(store, 0, self._count, device)

    def forward(self, order: ToTrainer) -> None:
        """Pass on the order that rank 0 is about to carry out."""
        self._ending = isinstance(order, Stop)
        message = frame(order)
        for near, _ in self._wires.values():
            near.sendall(message)

    def explain(self, error: Exception) -> RankLost | Failed | None:
        """The loss of another rank that made rank 0 fail with `error`; None if all ranks fail so, or rank 0 alone."""
        try:
            loss = self._loss.result(_NOTICE_SECONDS if self._wires else 0.0)
        except TimeoutError:
            return None
        return None if isinstance(loss, Failed) and loss.problem.endswith(f": {error}") else loss

    async def _watch(self, port: int, tell: Callable[[RankLost | Failed], None]) -> None:
        ends = [asyncio.create_task(self._live(rank, port), name=f"rank {rank}") for rank in self._wires]
        (end, *_), _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        error = end.exception()  # whatever it is: unless it is reported, rank 0 hangs in a collective
        loss = end.result() if error is None else RankLost(how=f"lost {end.get_name()}, unwatched: {error!r}")
        self._loss.set_result(loss)
        await asyncio.sleep(_STUCK_SECONDS)
        if not self._ending:
            tell(loss)
            os._exit(EXIT_CODE)  # the main thread hangs in a collective

    async def _live(self, rank: int, port: int) -> RankLost | Failed:
        """Start a rank, and wait until it ends; gives the report for the conductor."""
        near, far = self._wires[rank]
        name = f"rank {rank}"
        log = self._log.with_name(f"{self._log.stem}-rank-{rank}{self._log.suffix}")
        process = RoleProcess(name, "stretto.trainer.roles.rank", log, self._hung)
        spec = RankSpec(rank=rank, port=port, trainer=self._trainer, descriptor=far.fileno())
        try:
            await process.start(spec, self._threads, (far.fileno(),))
        except RoleDied as death:
            return RankLost(how=f"lost {death.role}, which {death.how}")
        far.close()
        how = await process.ended()
        if (failed := _parting_words(near)) is not None:
            return Failed(problem=f"{name}: {failed.problem}", exit_code=failed.exit_code)
        return RankLost(how=f"lost {name}, which {how}")


def _parting_words(wire: socket.socket) -> Failed | None:
    """The error that a rank reported before it ended, if it did."""
    wire.setblocking(False)
    try:
        bodies = Unframer().feed(wire.recv(_READ_BYTES))
    except OSError:
        return None
    return _FAILED.decode(bodies[0]) if bodies else None
