"""Simulated machines for `benchmarks.conductor`, all in one process, without weights and sampling.

    python -m benchmarks.fleet SPEC        SPEC is the JSON of a `FleetSpec`

To the conductor each machine looks real: it joins by the real handshake, its agent sends the heartbeats of
`stretto_cluster.agent` and takes orders, its engine listens at a port of its own and speaks `stretto.engine.wire`. Only
the completions are made up, and a version arrives as soon as it is announced. Commands come by standard input, one per
line (`go`, `report`, `vanish N`), and each is answered by a line. The process ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import httptools
import msgspec
import uvloop

from stretto import __version__
from stretto.core.canary import Loaded, Scores
from stretto.core.columns import pack
from stretto.core.engine import EngineHealth
from stretto.core.errors import DeadlineExceeded, HandshakeBroken, MachineLost
from stretto.core.frames import frame
from stretto.core.records import Completion, GenerateRequest, Partials, Record, Segment, StopReason
from stretto.core.tasks import cancel_and_wait
from stretto.engine.wire import AbortRequest, PartialsRequest, UpdateRequest
from stretto_cluster.handshake import call
from stretto_cluster.messages import (
    TO_AGENT,
    Beat,
    Dismissed,
    Echo,
    Join,
    MachineReady,
    Mirrored,
    NewVersion,
    RoleEnded,
    RolePlace,
    RoleStarted,
    RunTerms,
    StartRole,
    StopRole,
    ToAgent,
)
from stretto_cluster.wire import Wire, connect

_HOST = "127.0.0.1"
_HANDSHAKE_SECONDS = 10.0
_RETRY_SECONDS = _BEAT_SECONDS = 1.0  # those of `stretto_cluster.agent`
_BACKLOG = 256
_LOGPROB = -0.6931471805599453
_FIRST_ID = 100_000  # as long on the wire as most of a large vocabulary

_REQUESTS = msgspec.msgpack.Decoder(list[GenerateRequest])
_PARTIALS = msgspec.msgpack.Decoder(PartialsRequest)


class FleetSpec(Record, frozen=True):
    """Settings of the simulated machines. `seconds`: mean of the drawn time of a completion of `tokens` tokens; 0:
    none. `core`: CPU core to which they are pinned; -1: any."""

    address: str
    token: str
    machines: int
    tokens: int
    seconds: float = 0.0
    core: int = -1


class FleetReport(Record, frozen=True):
    """Counts of what the machines have done since their start. `echoes`: heartbeats that were answered."""

    cpu_seconds: float
    echoes: int
    retries: int  # of handshakes
    completions: int  # that were sent
    loads: int
    received: int  # bytes by the engines
    sent: int  # bytes by the engines


@dataclass
class _Counts:
    echoes: int = 0
    retries: int = 0
    completions: int = 0
    loads: int = 0
    received: int = 0
    sent: int = 0


@functools.lru_cache(maxsize=4096)
def _columns(begin: int, count: int) -> bytes:
    """Columns of `count` tokens from index `begin` on, packed as an engine packs them, with float32
    log-probabilities."""
    return pack(range(_FIRST_ID + begin, _FIRST_ID + begin + count), array("f", [_LOGPROB]) * count)


@dataclass
class _Open:
    """A request in the engine: when each of its members ends, by the loop's clock."""

    began: float
    version: int
    ends: list[float]
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


@dataclass
class _Engine:
    """One simulated engine. `version`: the newest that it was told to load."""

    spec: FleetSpec
    counts: _Counts
    chance: random.Random
    version: int = 0
    generated: int = 0
    updates: int = 0
    open: dict[str, _Open] = field(default_factory=dict)
    connections: set[_Connection] = field(default_factory=set)

    def health(self) -> EngineHealth:
        return EngineHealth(
            version=self.version,
            running=len(self.open),
            waiting=0,
            generated=self.generated,
            prefilled=0,
            recomputed=0,
            interrupted=0,
            preempted=0,
            wasted=0,
            updates=self.updates,
            busy_seconds=0.0,
        )

    def update(self, order: UpdateRequest) -> Loaded:
        """Accept a version. There is no model, so it returns for the canary what the request expects."""
        self.version, self.updates = order.version, self.updates + 1
        self.counts.loads += 1
        asked = order.challenge
        return Loaded(order.version, None if asked is None else Scores(asked.canary.logprobs))

    def piece(self, begin: int, end: int, version: int) -> Segment:
        count = max(0, end - begin)
        return Segment.sealed(_columns(begin, count), count, ((version, count),) if count else ())

    def partials(self, known: dict[str, list[int]]) -> Partials:
        return {id: pieces for id, counts in known.items() if id in self.open and (pieces := self._new(id, counts))}

    def _new(self, id: str, known: list[int]) -> dict[int, Segment]:
        """New tokens of each unfinished member beyond the `known` ones. They arrive evenly until the drawn end."""
        one, now = self.open[id], asyncio.get_running_loop().time()
        shares = ((now - one.began) / (end - one.began) if end > now else 0.0 for end in one.ends)
        ends = [int(share * self.spec.tokens) for share in shares]
        pieces = {k: self.piece(count, ends[k], one.version) for k, count in enumerate(known) if ends[k] > count}
        return dict(pieces)

    def completion(self, id: str, member: int, version: int) -> bytes:
        self.counts.completions += 1
        self.generated += self.spec.tokens
        whole = msgspec.structs.replace(self.piece(0, self.spec.tokens, version), stop_reason=StopReason.STOP)
        return bytes(frame(Completion(id, member, whole)))

    def generate(self, requests: list[GenerateRequest], send: Callable[[bytes, bool], None]) -> None:
        """Send each completion when it has ended, as the engine's server does, by `send(frames, whether more come)`."""
        if not self.spec.seconds:
            frames = [self.completion(one.id, k, self.version) for one in requests for k, _ in enumerate(one.seeds)]
            send(b"".join(frames), False)
            return
        loop, missing = asyncio.get_running_loop(), sum(len(request.seeds) for request in requests)

        def end(id: str, member: int, version: int) -> None:
            nonlocal missing
            missing -= 1
            send(self.completion(id, member, version), missing > 0)
            if not missing:
                for request in requests:
                    self.close(request.id)

        for request in requests:
            began = loop.time()
            ends = [began + self.chance.uniform(0, 2 * self.spec.seconds) for _ in request.seeds]
            self.open[request.id] = one = _Open(began, self.version, ends)
            one.timers += [loop.call_at(at, end, request.id, k, self.version) for k, at in enumerate(ends)]

    def close(self, id: str) -> None:
        if (one := self.open.pop(id, None)) is not None:
            for timer in one.timers:
                timer.cancel()


class _Connection(asyncio.Protocol):
    """HTTP/1.1 connection of one engine, as far as the client needs it."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body = b"", bytearray()
        self._requests: list[GenerateRequest] = []
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._engine.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._engine.connections.discard(self)
        for request in self._requests:
            self._engine.close(request.id)

    def data_received(self, data: bytes) -> None:
        self._engine.counts.received += len(data)
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        """Called by the parser, like the next two methods."""
        self._path, self._body = url, bytearray()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        engine, body = self._engine, bytes(self._body)
        match self._path:
            case b"/generate":
                self._requests = _REQUESTS.decode(body)
                self._write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                engine.generate(self._requests, self._chunk)
            case b"/update_weights":
                self._reply(engine.update(msgspec.msgpack.decode(body, type=UpdateRequest)))
            case b"/partials":
                self._reply(engine.partials(_PARTIALS.decode(body).known))
            case b"/abort":
                asked = msgspec.msgpack.decode(body, type=AbortRequest).request
                assert isinstance(asked, str), "a pool aborts one request at a time"
                engine.close(asked)
                self._reply(engine.health())
            case b"/health":
                self._reply(engine.health())
            case _:
                self._reply([])

    def _reply(self, message: object) -> None:
        body = msgspec.msgpack.encode(message)
        self._write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    def _chunk(self, frames: bytes, more: bool) -> None:
        self._write(b"%x\r\n%b\r\n%b" % (len(frames), frames, b"" if more else b"0\r\n\r\n"))

    def _write(self, data: bytes) -> None:
        self._engine.counts.sent += len(data)
        self.transport.write(data)


@dataclass
class _Machine:
    """An agent and its engine."""

    number: int
    spec: FleetSpec
    engine: _Engine
    address: str
    server: asyncio.Server
    wire: Wire[ToAgent] | None = None
    turn: int = 0

    @classmethod
    async def listening(cls, number: int, spec: FleetSpec, counts: _Counts) -> _Machine:
        engine = _Engine(spec, counts, random.Random(number))
        server = await asyncio.get_running_loop().create_server(lambda: _Connection(engine), _HOST, 0, backlog=_BACKLOG)
        return cls(number, spec, engine, f"{_HOST}:{server.sockets[0].getsockname()[1]}", server)

    async def work(self) -> None:
        """Join (again if the gate refuses for lack of space), and work until the connection ends."""
        while (wire := await self._joined()) is None:
            self.engine.counts.retries += 1
            await asyncio.sleep(_RETRY_SECONDS)
        self.wire = wire
        terms = await wire.receive()
        assert isinstance(terms, RunTerms)
        self.engine.version = max(0, terms.published)
        wire.send(MachineReady(places=(RolePlace(self.address, "/tmp"),), model="/model", mailbox_folder="/mailbox"))
        beats = asyncio.create_task(self._beats(wire, min(_BEAT_SECONDS, terms.lease / 5)))
        try:
            while (order := await wire.receive()) is not None:
                if isinstance(order, Dismissed):
                    return
                for reply in self._replies(order):
                    wire.send(reply)
        finally:
            await cancel_and_wait([beats])
            wire.cut()

    async def _joined(self) -> Wire[ToAgent] | None:
        join = msgspec.msgpack.encode(Join("engine", f"machine-{self.number}", 1, __version__))
        try:
            reader, writer = await connect(self.spec.address, None)
            await call(reader, writer, self.spec.token, join, peer="the run", seconds=_HANDSHAKE_SECONDS)
        except (HandshakeBroken, MachineLost, DeadlineExceeded, OSError):
            return None
        return Wire(reader, writer, TO_AGENT)

    @staticmethod
    async def _beats(wire: Wire[ToAgent], every: float) -> None:
        while True:
            wire.send(Beat(sent=time.monotonic(), clock_offset=0.0))
            await asyncio.sleep(every)

    def _replies(self, order: ToAgent) -> Iterator[Mirrored | RoleStarted | RoleEnded]:
        match order:
            case Echo():
                self.engine.counts.echoes += 1
            case NewVersion(version):
                yield Mirrored(version=version, size=0, seconds=0.0)
            case StartRole():
                self.turn = order.turn
                yield RoleStarted(place=0, turn=order.turn)
            case StopRole():
                yield RoleEnded(place=0, turn=self.turn, how="ended with exit code 0", killed=False)

    def vanish(self) -> None:
        """Break every connection, and stop listening."""
        self.server.close()
        if self.wire is not None:
            self.wire.cut()
        for connection in [*self.engine.connections]:
            connection.transport.abort()


async def serve(spec: FleetSpec) -> None:
    """Carry out commands until standard input ends."""
    loop, counts = asyncio.get_running_loop(), _Counts()
    machines = [await _Machine.listening(number, spec, counts) for number in range(spec.machines)]
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    works: list[asyncio.Task[None]] = []
    print("ready", flush=True)
    while command := (await commands.readline()).decode().split():
        match command:
            case ["go"]:
                works = [asyncio.create_task(machine.work()) for machine in machines]
            case ["vanish", count]:
                for machine in machines[: int(count)]:
                    machine.vanish()
        report = FleetReport(cpu_seconds=time.process_time(), **vars(counts))
        print(msgspec.json.encode(report).decode(), flush=True)
    with contextlib.suppress(Exception):  # the conductor has gone, and so has what they were working for
        await cancel_and_wait([*works])


if __name__ == "__main__":
    told = msgspec.json.decode(sys.argv[1], type=FleetSpec)
    os.sched_setaffinity(0, {told.core} if told.core >= 0 else os.sched_getaffinity(0))
    uvloop.run(serve(told))
