"""Ranks 1, 2, ... of the trainer: ``python -m stretto.trainer.roles.rank SPEC``. They do what rank 0 does.

A rank needs nothing of the process that starts it, on whichever machine, but its spec and the key that it joins rank 0
with, in the environment variable `RANK_KEY`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import msgspec
import torch

from stretto.core.deadlines import deadline
from stretto.processes.channel import ConductorGone
from stretto.processes.handshake import call
from stretto.processes.heartbeat import begin_role
from stretto.processes.peer import Peer
from stretto.processes.run_role import Failed, run_role
from stretto.trainer.config import TrainerConfig
from stretto.trainer.messages import TO_RANK, CheckpointFailed, CheckpointSaved, RankStart, Stop, ToRank
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.parallel.rendezvous import join, reach_store
from stretto.trainer.roles.rank_group import EXIT_CODE, RankIntroduction
from stretto.trainer.roles.trainer import TrainerRole
from stretto.trainer.spec import RANK_KEY, RankSpec, TrainerSpec
from stretto.weights.mailbox import GatheringPublisher

_JOIN_SECONDS = 30.0
_PARTING_SECONDS = 2.0
_RANK_0 = "rank 0"


class RankOrders:
    """The connection to rank 0, in a thread: a rank that waits in a collective notices that rank 0 is gone, and
    ends."""

    def __init__(self, spec: RankSpec, key: str) -> None:
        self._spec, self._key = spec, key
        self._orders: SimpleQueue[ToRank] = SimpleQueue()
        self._joined: Future[tuple[Peer[ToRank], asyncio.AbstractEventLoop]] = Future()
        self._stopping = False

    def join(self) -> str:
        """Join rank 0; the address of this machine by which the ranks reach it.

        Raises:
            OSError: rank 0 cannot be reached.
            HandshakeRefused: the key is not that of this trainer, or rank 0 does not want this rank.
            DeadlineExceeded: that took too long.
        """
        threading.Thread(target=asyncio.run, args=(self._listen(),), name="orders", daemon=True).start()
        peer, _ = self._joined.result()
        return peer.here

    def receive(self) -> ToRank:
        """The next message. The wait has no deadline: its owner is rank 0, with which this process ends."""
        return self._orders.get()

    def send(self, words: Failed) -> None:
        """Tell rank 0 why this rank ends, if it is there.

        Raises:
            ConductorGone: it is not.
        """
        if not self._joined.done() or self._joined.exception() is not None:
            raise ConductorGone
        peer, loop = self._joined.result()
        try:
            asyncio.run_coroutine_threadsafe(peer.send(words), loop).result(_PARTING_SECONDS)
        except (ConnectionError, TimeoutError):
            raise ConductorGone from None

    async def _listen(self) -> None:
        spec, introduction = self._spec, RankIntroduction(rank=self._spec.rank)
        try:
            async with deadline(f"rank {spec.rank}", f"{_RANK_0} at {spec.host} port {spec.port}", _JOIN_SECONDS):
                reader, writer = await asyncio.open_connection(spec.host, spec.port)
            ours = msgspec.msgpack.encode(introduction)
            await call(reader, writer, self._key, ours, peer=_RANK_0, seconds=_JOIN_SECONDS)
        except Exception as error:  # whatever it is: the main thread waits for it
            self._joined.set_exception(error)
            return
        peer = Peer(reader, writer, TO_RANK, spec.hung)
        self._joined.set_result((peer, asyncio.get_running_loop()))
        try:
            how = await peer.listen(self._take)
        except Exception as error:  # whatever it is: the main thread waits for orders
            how = f"sent what is no order: {error!r}"
        if not self._stopping:
            print(f"{_RANK_0} {how}", file=sys.stderr, flush=True)
            os._exit(EXIT_CODE)  # the main thread may hang in a collective

    def _take(self, message: ToRank) -> None:
        self._stopping = isinstance(message, Stop)
        self._orders.put(message)


def follow(spec: RankSpec, orders: RankOrders) -> None:
    """Join rank 0, and carry out its orders until `Stop`, without replies."""
    here = orders.join()
    start = orders.receive()
    assert isinstance(start, RankStart), start
    trainer = _as_here(msgspec.json.decode(start.trainer, type=TrainerSpec), spec)
    config = TrainerConfig.model_validate_json(trainer.trainer)
    store = reach_store(start.store, config.ranks, spec.host)
    ranks = join(store, spec.rank, config.ranks, config.device, here, spec.gpu)
    role = TrainerRole(trainer, GatheringPublisher(), ranks, partial(_tell, orders))
    while not isinstance(order := orders.receive(), Stop):
        assert not isinstance(order, RankStart), "a rank is started once"
        role.carry_out(order)


def _as_here(trainer: TrainerSpec, spec: RankSpec) -> TrainerSpec:
    """Rank 0's spec with the folders of this machine. Another machine does not see the run's choice of kernels."""
    if spec.model is None:
        return trainer
    algorithm = AlgorithmConfig.model_validate_json(trainer.algorithm)
    if spec.reference is not None and algorithm.reference is not None:
        reference = algorithm.reference.model_copy(update={"path": spec.reference})
        algorithm = algorithm.model_copy(update={"reference": reference})
    return msgspec.structs.replace(trainer, model=spec.model, algorithm=algorithm.model_dump_json(), kernels=None)


def _tell(orders: RankOrders, message: CheckpointSaved | CheckpointFailed) -> None:
    """Report a checkpoint that failed to rank 0, which waits for it in a collective, and end."""
    if isinstance(message, CheckpointFailed):
        orders.send(Failed(problem=message.problem, exit_code=message.exit_code))
        os._exit(EXIT_CODE)


def main(arguments: list[str]) -> int:
    """Run the role; see `processes.run_role`."""
    spec = msgspec.json.decode(arguments[0], type=RankSpec)
    key = os.environ.pop(RANK_KEY, "")
    begin_role()
    torch.set_num_threads(spec.threads)
    orders = RankOrders(spec, key)
    return run_role(lambda: follow(spec, orders), orders.send)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
