"""An engine of another make: ``python -m tests.loop.toy_engine SPEC``. Speaks the wire, holds no model.

It answers every seed with one token of the version it serves, behind those of the prefix. The prompt tells it to
misbehave: 1 dies in mid-answer, 2 hangs up in mid-answer and goes on with it, as behind a cut network, 3 tells one
token and never ends, 5 hangs up and listens no more, 6 hangs up and answers nothing any more, 7 has a bit of each
answer wrong, 8 answers nothing any more, 9 to 11 tell nonsense of its health from then on. It never loads version 99,
and answers nothing any more from that order on; one that starts with it serves it. Its spans are numbered, and take a
moment. The file ``SPEC.model`` holds the newest version; or "broken", with which no engine starts; or "mistaken", the
same, as by a mistake of the user; or "killed VERSION": the first engine that starts takes the word away and kills
itself; or "hangs VERSION": the same, and it is never ready; or "grows VERSION": the same, and it loads for three
seconds before it listens.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from stretto.core.canary import Loaded
from stretto.core.engine import EngineHealth
from stretto.core.errors import DataError, Problem, RefusedRequest
from stretto.core.events import Span
from stretto.core.frames import frame
from stretto.core.records import Completion, GenerateRequest, Segment, StopReason
from stretto.engine.wire import AbortRequest, PartialsRequest, Refusal, UpdateRequest
from stretto.processes.channel import run_role
from stretto.processes.heartbeat import begin_role

NONSENSE = {
    9: b'{"status": "ok"}',
    10: msgspec.msgpack.encode({"version": "7", "generated": -1, "busy_seconds": float("nan")}),
    11: bytes(1 << 20),  # again and again
}
UNTOLD = 12  # it fails whenever it is asked for its tokens in flight
DIE, HANG_UP, STAY_SILENT, ANSWER, TURN_DEAF, TURN_MUTE, LIE, FREEZE = 1, 2, 3, 4, 5, 6, 7, 8
UNFINISHED = 3  # tokens, it says, always
NEVER, CUT = 99, 98  # versions: the load of one never ends, and that of the other breaks off


class ToySpec(msgspec.Struct):
    """What it needs of an `EngineSpec`, whose module would import torch."""

    address: str
    model: str
    name: str = "toy"


class ToyEngine:
    """One connection, one exchange after the other."""

    def __init__(self, version: int, socket: Path) -> None:
        self.version = version
        self.generated = 0
        self.socket = socket
        self.deaf = self.mute = self.untold = False
        self.nonsense = 0
        self.open = set[str]()  # what it goes on with
        self.spans = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            path = head.split()[1].decode()
            body = await self._reply(path, await reader.readexactly(length))
            if path == "/health" and (nonsense := NONSENSE.get(self.nonsense)) is not None:
                endless, body = self.nonsense == 11, nonsense
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (1 << 40 if endless else len(body)))
                writer.write(body)
                while endless and not writer.is_closing():
                    writer.write(body)
                    await writer.drain()
                continue
            if body is None or self.deaf:
                writer.close()
                return
            status = b"500 Failed" if self.untold and path == "/partials" else b"200 OK"
            writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))

    async def _reply(self, path: str, body: bytes) -> bytes | None:
        if self.mute:
            await asyncio.sleep(600)
        match path:
            case "/generate":
                return await self._generate(*msgspec.msgpack.decode(body, type=list[GenerateRequest]))
            case "/abort":
                self.open.difference_update(msgspec.msgpack.decode(body, type=AbortRequest).request)
            case "/update_weights":
                if (version := msgspec.msgpack.decode(body, type=UpdateRequest).version) == CUT:
                    return None
                self.version = version
                if self.version == NEVER:
                    self.mute = True
                    await asyncio.sleep(600)
                return msgspec.msgpack.encode(Loaded(self.version))
            case "/partials" if self.untold:
                return msgspec.msgpack.encode(Refusal(error="RoleFailed", found="MemoryError: no\nroom"))
            case "/partials":
                known = msgspec.msgpack.decode(body, type=PartialsRequest).known
                piece = Segment.of((7,), (-0.1,), (self.version,), 1, StopReason.STOP, (), -2, "a lie", 50.0)
                return msgspec.msgpack.encode({id: {0: piece.after(count)} for id, (count, *_) in known.items()})
            case "/spans":
                await asyncio.sleep(0.05)
                self.spans += 1
                return msgspec.msgpack.encode([Span(role="toy", name="step", start=self.spans, end=self.spans)])
        return msgspec.msgpack.encode(self._health())

    async def _generate(self, request: GenerateRequest, *others: GenerateRequest) -> bytes | None:
        if request.id in self.open:
            return bytes(frame([Refusal.of(RefusedRequest("id", request.id, "an id that no open request uses"))]))
        match request.prompt_token_ids[0]:
            case 1:
                os._exit(9)
            case 2:
                self.open.add(request.id)
                return None
            case 3:
                await asyncio.sleep(600)
            case 5:
                self.deaf = True
                self.socket.unlink()
                return None
            case 6:
                self.mute = True
                return None
            case 8:
                self.mute = True
                await asyncio.sleep(600)
            case 12:
                self.untold = True
                await asyncio.sleep(600)
            case 9 | 10 | 11 as nonsense:
                self.nonsense = nonsense
        self.generated += len(request.seeds)
        prefixes = request.prefixes or (Segment(),) * len(request.seeds)
        last = [Segment.of((seed,), (-0.1,), (self.version,), 0, StopReason.STOP) for seed in request.seeds]
        whole = [prefix + end for prefix, end in zip(prefixes, last, strict=True)]
        if request.prompt_token_ids[0] == LIE:
            whole = [msgspec.structs.replace(one, checksum=one.checksum ^ 1) for one in whole]
        return b"".join(frame(Completion(request.id, member, segment)) for member, segment in enumerate(whole))

    def _health(self) -> EngineHealth:
        zeros = ("running", "waiting", "prefilled", "recomputed", "interrupted", "preempted", "wasted", "updates")
        counts = dict.fromkeys(zeros, 0)
        return EngineHealth(
            version=self.version, generated=self.generated, busy_seconds=1.0, unfinished=UNFINISHED, **counts
        )


def mistaken(place: Path) -> None:
    raise DataError([Problem(str(place), "lacks a weight", "mend it"), Problem("a: b", "another one")])


def load() -> None:
    """Take up a large model for three seconds."""
    loaded = list[bytes]()
    for _ in range(60):
        loaded.append(b"w" * (2 << 20))
        time.sleep(0.05)


async def play(text: str) -> None:
    spec = msgspec.json.decode(text, type=ToySpec)
    begin_role()
    print(f"listens at {spec.address}", flush=True)
    socket = spec.address.removeprefix("unix:")
    newest = Path(spec.model)
    if (words := newest.read_text().split())[0] in ("killed", "hangs", "grows"):
        whole = newest.with_name(f"whole-{os.getpid()}")
        whole.write_text(words[1])
        whole.replace(newest)  # at once: another engine may read it meanwhile
        if words[0] == "grows":
            load()
        else:
            os.kill(os.getpid(), signal.SIGKILL if words[0] == "killed" else signal.SIGSTOP)
    if words[0] == "mistaken":
        sys.exit(run_role(lambda: mistaken(newest), lambda failed: print(f"{spec.name}: {failed.problem}", flush=True)))
    engine = ToyEngine(int(newest.read_text()), Path(socket))
    if socket == spec.address:
        host, _, port = spec.address.rpartition(":")
        server = await asyncio.start_server(engine.serve, host, int(port))
    else:
        server = await asyncio.start_unix_server(engine.serve, socket)
    await server.serve_forever()


def main(arguments: list[str]) -> int:
    asyncio.run(play(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
