"""Rank 0's management of ranks 1 .. N-1: they join rank 0, get its orders, and are watched.

    conductor ──orders──► rank 0 ──the same orders──► rank 1 .. N-1
        ▲                   │                             │ die, hang, go silent, or report an error
        └──── RankLost ─────┴──── a watching thread ◄─────┘

Every rank connects to an address of rank 0 and proves that it has a key made for this trainer (`handshake`),
inside TLS if the run uses TLS. torch's store has no key, so it listens on loopback only; ranks on other machines reach
it through further connections of this kind. Rank 0 starts the ranks of its own machine; the conductor has the others
started.

A dead rank makes collectives fail or hang. In both cases rank 0 reports the lost rank and ends. The kernel then ends
the ranks of rank 0's machine (`processes.heartbeat`), and ranks on other machines end when their connection closes. The
conductor replaces the trainer as a whole.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec

from stretto import __version__
from stretto.core.errors import DeadlineExceeded, HandshakeRefused, RoleDied
from stretto.core.frames import frame
from stretto.core.records import Record
from stretto.processes.channel import Failed
from stretto.processes.http.tls import server_context
from stretto.processes.role import RoleProcess
from stretto.processes.spawn import FRESH, Spawner
from stretto.trainer.config import TrainerConfig
from stretto.trainer.messages import RankLost, RanksAwaited, Stop, ToTrainer, TrainerSpec
from stretto.trainer.ranks import EXIT_CODE, OtherRanks, Ranks
from stretto_cluster.handshake import new_key
from stretto_cluster.ranks.collectives import LOOPBACK, join, open_store
from stretto_cluster.ranks.messages import RANK_KEY, RANK_ROLE, RankSpec, RankStart
from stretto_cluster.wire import Reception, Wire, join_ends

_NOTICE_SECONDS = 2.0
_STUCK_SECONDS = 1.0
_PARTING_SECONDS = 1.0
_MOST_REFUSALS = 4  # most named in a message
_FAILED = msgspec.msgpack.Decoder(Failed)


class RankIntroduction(Record, frozen=True):
    """Introduction of a joining rank: its number and its stretto version. `to_store`: this is a further connection of
    the rank, to be forwarded to torch's store."""

    rank: int
    version: str = __version__
    to_store: bool = False


_INTRODUCTION = msgspec.msgpack.Decoder(RankIntroduction)


class RankGroup(OtherRanks):
    """Ranks 1, 2, ... as rank 0 manages them: starts those of its machine, passes orders on, and watches all."""

    def __init__(self, spec: TrainerSpec, spawner: Spawner = FRESH) -> None:
        """Prepare the group, without starting a rank. `spec`: spec of rank 0; `spawner` starts the ranks of this
        machine.

        Raises:
            RecipeError: a TLS file of `spec.tls` is missing or invalid.
            OSError: `spec.rank_host` cannot be resolved.
        """
        self._config = config = TrainerConfig.model_validate_json(spec.trainer)
        self._spec, self._key, self._spawner = spec, new_key(), spawner
        self._reception = Reception(self._key, server_context(spec.tls))
        self._host = _resolved(spec.rank_host)
        self._remote = tuple(range(config.local_ranks, config.ranks))
        self._ranks = tuple(range(1, config.ranks))
        self._joined: dict[int, asyncio.Future[Wire[Failed]]] = {}
        self._refused: deque[str] = deque(maxlen=_MOST_REFUSALS)  # reasons for refused ranks
        self._ending = False
        self._loss: Future[RankLost | Failed] = Future()
        self._loop: Future[asyncio.AbstractEventLoop] = Future()  # event loop of the watching thread

    def start(self, tell: Callable[[RanksAwaited | RankLost | Failed], None]) -> Ranks:
        store = open_store(self._config.ranks)
        watching = partial(asyncio.run, self._watch(store.port, tell))
        threading.Thread(target=watching, name="ranks", daemon=True).start()
        config, seconds = self._config, self._spec.collective
        return join(store, 0, config.ranks, config.device, self._host, seconds=seconds, config=config)

    def forward(self, order: ToTrainer) -> None:
        self._ending = isinstance(order, Stop)
        asyncio.run_coroutine_threadsafe(self._send(order), self._loop.result()).result()

    async def _send(self, order: ToTrainer) -> None:
        wires, whole = [joined.result() for joined in self._joined.values()], frame(order)
        await asyncio.gather(*(wire.send_frame(whole) for wire in wires))

    def explain(self, error: Exception) -> RankLost | Failed | None:
        try:
            loss = self._loss.result(_NOTICE_SECONDS)
        except TimeoutError:
            return None
        return None if isinstance(loss, Failed) and loss.problem.endswith(f": {error}") else loss

    async def _watch(self, store: int, tell: Callable[[RanksAwaited | RankLost | Failed], None]) -> None:
        self._loop.set_result(loop := asyncio.get_running_loop())
        self._joined = {rank: loop.create_future() for rank in self._ranks}
        with closing(await asyncio.start_server(partial(self._admit, store), self._host, 0)) as server:
            port: int = server.sockets[0].getsockname()[1]
            if self._remote:
                tell(RanksAwaited(host=self._host, port=port, key=self._key, ranks=self._remote))
            ends = [
                asyncio.create_task(
                    self._elsewhere(rank) if rank in self._remote else self._here(rank, port), name=_name(rank)
                )
                for rank in self._ranks
            ]
            (end, *_), _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        error = end.exception()  # any error: unless it is reported, rank 0 hangs in a collective
        loss = end.result() if error is None else RankLost(how=f"lost {end.get_name()}, whose watch failed: {error!r}")
        self._loss.set_result(loss)
        await asyncio.sleep(_STUCK_SECONDS)
        if not self._ending:
            tell(loss)
            os._exit(EXIT_CODE)  # the main thread hangs in a collective

    async def _admit(self, store: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reception.comes(writer)
        peer = f"a rank at {writer.get_extra_info('peername')[0]}"
        try:
            who = _INTRODUCTION.decode(await self._reception.admit(reader, writer, b"", self._unwanted, peer))
            if who.to_store:
                await join_ends((reader, writer), await asyncio.open_connection(LOOPBACK, store))
                return
            wire = Wire(reader, writer, _FAILED)
            self._joined[who.rank].set_result(wire)
            await wire.send_all(RankStart(store=store, trainer=msgspec.json.encode(self._spec).decode()))
        except (HandshakeRefused, DeadlineExceeded, OSError, asyncio.InvalidStateError) as error:
            print(f"not joined: {error}", file=sys.stderr)  # InvalidStateError: two joined as the same rank at once
            self._refused.append(str(error))
            writer.close()

    def _unwanted(self, introduction: bytes) -> str:
        """Text of the reason why a rank with the right key is refused (release, number, or the order of its
        connections); "" if it is admitted. `introduction`: an encoded `RankIntroduction`."""
        who = _INTRODUCTION.decode(introduction)
        if who.version != __version__:
            return f"{_name(who.rank)} is of stretto {who.version}, and rank 0 of stretto {__version__}"
        if (joined := self._joined.get(who.rank)) is None:
            return f"there is no {_name(who.rank)}"
        if who.to_store:
            return "" if joined.done() else f"{_name(who.rank)} has not joined yet"
        return f"{_name(who.rank)} has joined already" if joined.done() else ""

    async def _elsewhere(self, rank: int) -> RankLost | Failed:
        """Wait until a rank on another machine has joined and then ended. Returns the report for the conductor: the
        error that the rank sent, else how it was lost. If some rank does not join in time, the report names all that
        are missing."""
        seconds = self._spec.assembly
        await asyncio.wait([self._joined[rank]], timeout=seconds)
        if missing := [_name(one) for one in self._remote if not self._joined[one].done()]:
            refused = "".join(f"; {why}" for why in self._refused)
            return RankLost(how=f"lost {', '.join(missing)}: did not join within {seconds:g} s{refused}")
        return await self._listened(rank)

    async def _here(self, rank: int, port: int) -> RankLost | Failed:
        """Start a rank on this machine, which joins at `port`, and wait until it ends. Returns the report for the
        conductor: the error that the rank sent, else how its process was lost."""
        config, log = self._config, Path(self._spec.log)
        log = log.with_name(f"{log.stem}-rank-{rank}{log.suffix}")
        process = RoleProcess(_name(rank), RANK_ROLE, log, self._spec.hung, self._spawner)
        hung, tls = self._spec.hung, self._spec.tls
        spec = RankSpec(rank=rank, host=self._host, port=port, threads=config.threads, hung=hung, gpu=rank, tls=tls)
        try:
            await process.start(spec, config.threads, environment={RANK_KEY: self._key})
        except RoleDied as death:
            return RankLost(how=f"lost {death.role}, which {death.how}")
        connection = asyncio.create_task(self._listened(rank))
        how = await process.ended()
        await asyncio.wait([connection], timeout=_PARTING_SECONDS)
        if connection.done() and isinstance(words := connection.result(), Failed):
            return words
        return RankLost(how=f"lost {_name(rank)}, which {how}")

    async def _listened(self, rank: int) -> RankLost | Failed:
        """Wait until the connection to a rank ends; returns the error that the rank sent, or else its loss."""
        wire = await self._joined[rank]
        words: list[Failed] = []
        how = await wire.listen(words.append, self._spec.hung)
        if words:
            named = words[0].problem if words[0].again else f"{_name(rank)}: {words[0].problem}"
            return msgspec.structs.replace(words[0], problem=named)
        return RankLost(how=f"lost {_name(rank)}, which {how}")


def _name(rank: int) -> str:
    return f"rank {rank}"


def _resolved(host: str) -> str:
    """The IP address of a host name or address; loopback for "". Raises OSError if it cannot be resolved."""
    if not host:
        return LOOPBACK
    (_, _, _, _, address), *_ = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(address[0])
