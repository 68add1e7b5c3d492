"""Process of rank 1, 2, ... of the trainer: ``python -m stretto_cluster.ranks.rank SPEC``. It carries out the same
orders as rank 0.

A rank, on any machine, needs only its spec and, in the environment variable `RANK_KEY`, the key for joining rank 0.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import msgspec
import torch
from torch import Tensor

from stretto.core.errors import StrettoError
from stretto.core.frames import LARGEST_BATCH
from stretto.core.machine import VISIBLE
from stretto.doors.loading import look_in
from stretto.processes.channel import ConductorGone, Failed, run_role
from stretto.processes.heartbeat import begin_role
from stretto.processes.http.tls import client_context
from stretto.trainer.config import TrainerConfig
from stretto.trainer.messages import CheckpointFailed, Stop, TrainerSpec
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.ranks import EXIT_CODE
from stretto.trainer.roles.trainer import Notice, TrainerRole, published_dtype
from stretto.weights.mailbox import Gather, Publication, as_it_is, stored
from stretto_cluster.handshake import call
from stretto_cluster.ranks.collectives import LOOPBACK, join, reach_store
from stretto_cluster.ranks.messages import RANK_KEY, TO_RANK, RankSpec, RankStart, ToRank
from stretto_cluster.ranks.rank_group import RankIntroduction
from stretto_cluster.wire import Stream, Wire, connect, join_ends

_JOIN_SECONDS = 30.0
_PARTING_SECONDS = 2.0
_RANK_0 = "rank 0"


class RankOrders:
    """The connection to rank 0, over which orders come. A thread reads it, so that a rank that waits in a collective
    notices the loss of rank 0; then the thread ends this process at once."""

    def __init__(self, spec: RankSpec, key: str) -> None:
        self._spec, self._key = spec, key
        self._orders: SimpleQueue[ToRank] = SimpleQueue()
        self._joined: Future[tuple[Wire[ToRank], asyncio.AbstractEventLoop]] = Future()
        self._way_to_store = 0
        self._stopping = False

    def join(self) -> str:
        """Start the thread and join rank 0; returns the address of this machine for the other ranks.

        Raises:
            MachineLost: rank 0 cannot be reached.
            HandshakeBroken: it closed the connection before an answer.
            HandshakeRefused: the key or the certificate is of another trainer, or rank 0 refuses this rank.
            DeadlineExceeded: rank 0 did not reply in time (10 seconds to connect, 30 to the handshake).
        """
        threading.Thread(target=asyncio.run, args=(self._listen(),), name="orders", daemon=True).start()
        wire, _ = self._joined.result()
        return wire.local_host

    def store_port(self, start: RankStart) -> int:
        """Loopback port of this machine at which torch's store can be reached, after `join`: on rank 0's machine the
        store's own, from the order `start`; elsewhere one that leads to it."""
        return self._way_to_store or start.store

    def receive(self) -> ToRank:
        """Wait for the next order. There is no timeout: this process ends together with rank 0."""
        return self._orders.get()

    def send(self, words: Failed) -> None:
        """Send rank 0 the reason why this rank ends; waits at most two seconds.

        Raises:
            ConductorGone: rank 0 was not joined, is gone, or does not read.
        """
        if not self._joined.done() or self._joined.exception() is not None:
            raise ConductorGone
        wire, loop = self._joined.result()
        try:
            asyncio.run_coroutine_threadsafe(wire.send_all(words), loop).result(_PARTING_SECONDS)
        except (ConnectionError, TimeoutError):
            raise ConductorGone from None

    async def _listen(self) -> None:
        try:
            wire = Wire(*await self._reach(RankIntroduction(rank=self._spec.rank)), TO_RANK, LARGEST_BATCH)
            if self._spec.model is not None:  # on a machine of its own
                way = await asyncio.start_server(self._lead_to_store, LOOPBACK, 0)
                self._way_to_store = way.sockets[0].getsockname()[1]
        except Exception as error:  # any error: the main thread waits for it
            self._joined.set_exception(error)
            return
        self._joined.set_result((wire, asyncio.get_running_loop()))
        try:
            how = await wire.listen(self._take, self._spec.hung)
        except Exception as error:  # any error: the main thread waits for orders
            how = f"sent an invalid order: {error!r}"
        if not self._stopping:
            print(f"{_RANK_0} {how}", file=sys.stderr, flush=True)
            os._exit(EXIT_CODE)  # the main thread may hang in a collective

    async def _reach(self, introduction: RankIntroduction) -> Stream:
        spec = self._spec
        reader, writer = await connect(f"{spec.host}:{spec.port}", client_context(spec.tls))
        ours = msgspec.msgpack.encode(introduction)
        await call(reader, writer, self._key, ours, peer=_RANK_0, seconds=_JOIN_SECONDS)
        return reader, writer

    async def _lead_to_store(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a connection from torch, on this machine, to rank 0's store. If that cannot be reached, write why to
        stderr, and close the connection."""
        try:
            far = await self._reach(RankIntroduction(rank=self._spec.rank, to_store=True))
        except (StrettoError, OSError) as error:  # torch says that its connection was lost; this is why
            print(f"no way to the store of {_RANK_0}: {error}", file=sys.stderr, flush=True)
            writer.close()
        else:
            await join_ends((reader, writer), far)

    def _take(self, message: ToRank) -> None:
        self._stopping = isinstance(message, Stop)
        self._orders.put(message)


class GatheringPublisher:
    """Publisher of the ranks other than 0: it takes part in each collective gather, and publishes nothing. `dtype`: the
    same as that of rank 0's publisher."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype

    def copy(self, version: int, tensors: Iterable[tuple[str, Tensor]], gather: Gather = as_it_is) -> Publication:
        for name, tensor in tensors:
            gather(name, tensor, stored(tensor, self._dtype))
        return Publication(dict)


def follow(spec: RankSpec, orders: RankOrders) -> None:
    """Join rank 0, form the process group, and carry out rank 0's orders until `Stop`. Results are not sent."""
    here = orders.join()
    start = orders.receive()
    assert isinstance(start, RankStart), start
    trainer = msgspec.json.decode(start.trainer, type=TrainerSpec)
    look_in(trainer.path)
    trainer = _as_here(trainer, spec)
    config = TrainerConfig.model_validate_json(trainer.trainer)
    store = reach_store(orders.store_port(start), config.ranks)
    ranks = join(store, spec.rank, config.ranks, config.device, here, spec.gpu, trainer.collective, config)
    where = f" on {socket.gethostname()}" if spec.model is not None else ""
    role = TrainerRole(
        trainer, GatheringPublisher(published_dtype(trainer)), ranks, partial(_tell, orders), spec.gpu, where
    )
    while not isinstance(order := orders.receive(), Stop):
        assert not isinstance(order, RankStart), "a rank is started once"
        role.carry_out(order)


def _as_here(trainer: TrainerSpec, spec: RankSpec) -> TrainerSpec:
    """Rank 0's spec, unchanged on its own machine. On another one: with the folders of that machine, without the run's
    choice of kernels, and with a GPU that no other role shares."""
    if spec.model is None:
        return trainer
    algorithm = AlgorithmConfig.model_validate_json(trainer.algorithm)
    if spec.reference is not None and algorithm.reference is not None:
        reference = algorithm.reference.model_copy(update={"path": spec.reference})
        algorithm = algorithm.model_copy(update={"reference": reference})
    gpus = tuple(filter(None, os.environ.get(VISIBLE, "").split(",")))
    return msgspec.structs.replace(
        trainer, model=spec.model, algorithm=algorithm.model_dump_json(), kernels=None, gpus=gpus, share=1.0
    )


def _tell(orders: RankOrders, message: Notice) -> None:
    """If `message` says that a checkpoint failed, report it to rank 0, which waits in a collective, and end this
    process; else do nothing."""
    if isinstance(message, CheckpointFailed):
        orders.send(Failed(problem=message.problem, exit_code=message.exit_code))
        os._exit(EXIT_CODE)


def main(arguments: list[str]) -> int:
    """Run the process of a rank; returns its exit code (`channel.run_role`). `arguments`: a `RankSpec` as JSON."""
    spec = msgspec.json.decode(arguments[0], type=RankSpec)
    key = os.environ.pop(RANK_KEY, "")
    begin_role()
    torch.set_num_threads(spec.threads)
    orders = RankOrders(spec, key)
    return run_role(lambda: follow(spec, orders), orders.send)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
