"""Adapter process for an engine of another make: ``python -m stretto_servers.role SPEC``.

conductor ◄─ the engine's HTTP interface ─► this process ◄─ the server's HTTP interface ─► vLLM or SGLang
trainer ─► mailbox ─► this process: verifies and stages a version ─► the server loads it
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from stretto.core.frames import LARGEST_FRAME
from stretto.core.tasks import cancel_and_wait
from stretto.doors.loading import look_in
from stretto.engine.config import EngineConfig
from stretto.engine.http.server import EngineApp, serve_app
from stretto.engine.text import StopTexts
from stretto.engine.wire import ENGINE_KEY, EngineSpec
from stretto.model.hf.inspection import inspect_model_folder
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.processes import event_loop
from stretto.processes.channel import run_role
from stretto.processes.heartbeat import begin_role
from stretto.processes.tree import open_descriptors
from stretto.weights.shared_memory import SharedMemorySubscriber
from stretto_servers.broadcast import SglangByBroadcast
from stretto_servers.engine import ExternalEngine
from stretto_servers.http import JsonServer
from stretto_servers.make import Limits, Make, Room, launch_of, make_of
from stretto_servers.server import GivenServer, Server, ServerProcess, lost, port_of, reserve_port, until_ready
from stretto_servers.staging import FolderAsItIs, StagedWeights, window_lacking
from stretto_servers.worker.advance import remove_counters

_REPLY_SECONDS = 60.0
_SPARE_DESCRIPTORS = 64  # for logs, weights, and orders to the server


def main(arguments: list[str]) -> int:
    """Run the role until the conductor ends it; returns the exit code (see `channel.run_role`). After an error, its
    message is the last line of the log. `arguments`: an `EngineSpec` as JSON."""
    spec = msgspec.json.decode(arguments[0], type=EngineSpec)
    begin_role()
    return run_role(
        lambda: event_loop.run(play(spec)), lambda failed: print(f"{spec.name}: {failed.problem}", file=sys.stderr)
    )


def wire_to(address: str, spec: EngineSpec, config: EngineConfig) -> Make:
    """Make the client of the server at `address` (``host:port``), with the deadlines of the spec; SGLang by broadcast
    if the spec says so, else by `make_of`."""
    http = JsonServer(
        spec.name, address, seconds=max(_REPLY_SECONDS, spec.load_seconds), token_seconds=spec.token_seconds
    )
    if spec.broadcast:
        return SglangByBroadcast(http, spec.load_seconds, address, "gloo" if config.on_cpu else "nccl")
    return make_of(config.kind, http, spec.load_seconds)


async def play(spec: EngineSpec) -> None:
    """Start the server, or connect to a running one (`spec.server`), load the newest version, and serve the engine's
    interface until cancelled or until engine or server fail, whose error is raised. A server that was started here ends
    with this call."""
    look_in(spec.path)
    key = os.environ.pop(ENGINE_KEY, "")  # before the server starts, which would inherit it
    config = EngineConfig.model_validate_json(spec.config)
    with reserve_port() as reserved:  # for as long as the server lives, which binds it after a minute or so
        address = spec.server or f"127.0.0.1:{port_of(reserved)}"
        wire = wire_to(address, spec, config)
        if spec.server:
            server: Server = GivenServer(spec.name, address, wire)
        else:
            server = await _started(spec, config, port_of(reserved))
        try:
            await until_ready(server, wire, spec.publication_seconds or spec.start_seconds)
            engine = await _engine(spec, config, wire)
            app = EngineApp(engine, LARGEST_FRAME, key)
            await serve_app(app, spec.address, partial(_until_either_ends, engine, server, wire), spec.tls)
        finally:
            await server.stop()


async def _started(spec: EngineSpec, config: EngineConfig, port: int) -> ServerProcess:
    temporary = Path(spec.scratch) / "temporary"  # for sockets and caches, which a killed server leaves behind
    temporary.mkdir(parents=True, exist_ok=True)
    room = Room(spec.share, spec.memory, spec.planned) if spec.memory else None
    launch = launch_of(config, spec.model, port, room)
    environment = launch.environment | {"TMPDIR": str(temporary)}
    return await ServerProcess.start(spec.name, replace(launch, environment=environment))


async def _engine(spec: EngineSpec, config: EngineConfig, wire: Make) -> ExternalEngine:
    folder = inspect_model_folder(Path(spec.model))
    served = await wire.describe()
    lengths = (folder.context_length, served.context_length, window_lacking(config.kind, folder.path))
    context = min(length for length in lengths if length)
    limits = Limits(folder.vocab_size, context, config.slots, most_connections())
    stop_texts = StopTexts(partial(load_tokenizer, spec.model))
    if not spec.publication_seconds:  # no trainer; a server that was already running may have other weights
        model = Path(spec.model).resolve()
        engine = ExternalEngine(spec.name, wire, limits, FolderAsItIs(model), stop_texts, config.on_update)
        try:
            await engine.update(engine.version)
        finally:
            remove_counters(model)
        return engine
    subscriber = SharedMemorySubscriber(spec.mailbox, Path(spec.mailbox_folder))
    staged = StagedWeights(subscriber, Path(spec.model), Path(spec.scratch))
    engine = ExternalEngine(spec.name, wire, limits, staged, stop_texts, config.on_update)
    await engine.update(await asyncio.to_thread(subscriber.await_first, spec.name, spec.publication_seconds))
    return engine


def most_connections() -> int:
    """Raise the limit of this process's open files as far as the system allows, and return how many requests to the
    server may be open at once: half of the descriptors that are free, since the requests of clients need some too.
    `sys.maxsize` if there is no limit."""
    most, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the system allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
        most = highest
    if most == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, (most - len(open_descriptors()) - _SPARE_DESCRIPTORS) // 2)


async def _until_either_ends(engine: ExternalEngine, server: Server, wire: Make) -> None:
    """Run the engine and watch its server; raise the error of the one that ends first, and end both. Never returns.
    `wire`: client of the server."""
    ended, working = asyncio.create_task(lost(server, wire)), asyncio.create_task(engine.run())
    try:
        await asyncio.wait((ended, working), return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise ended.result()
        working.result()  # raises: an engine runs until it fails
    finally:
        await cancel_and_wait([ended, working])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
