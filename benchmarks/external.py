"""What stretto adds to a server of vLLM or SGLang: tokens per second of the server alone, and as an engine of a run.

    python -m benchmarks.external                       both makes, 64 concurrent completions, 3 rounds
    python -m benchmarks.external --kinds vllm --rounds 5 --interval 16   tokens that an event of the server has

Alone: a bare client streams the completions from the server's own endpoint, with token ids and log-probabilities as
stretto requests them, and discards the bytes. As an engine: the same prompts go through the conductor's client and the
adapter's process (`stretto_servers.role`), which decodes, checks and stamps every token. Both take turns with one
server.

Rates depend on other work of the machine; CPU seconds per token do not. So both are measured: of the server with all
its processes, of the adapter, and of the client.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load_file

from benchmarks.generators import prompts
from benchmarks.peers.environment import Environment, PeerUnavailable
from benchmarks.report import Table, save
from benchmarks.shapes import make
from stretto.core.errors import EngineLost
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.config import MAKES, EngineConfig
from stretto.engine.http.client import HttpEngine
from stretto.engine.wire import EngineSpec
from stretto.processes.tree import descendants
from stretto.weights.folder import remove
from stretto.weights.shared_memory import SharedMemoryPublisher
from stretto_servers import sglang, vllm
from stretto_servers.http import JsonServer
from stretto_servers.make import Continuation, launch_of, make_of
from stretto_servers.server import ServerProcess, port_of, reserve_port, until_ready

CONCURRENT, TOKENS, VOCABULARY = 64, 128, 1024
START_SECONDS, REPLY_SECONDS = 600.0, 300.0
ENDPOINTS = {"vllm": ("/inference/v1/generate", vllm._body), "sglang": ("/generate", sglang._body)}
MAILBOX = "external.benchmark"


@dataclass(frozen=True)
class Turn:
    """Result of one turn: tokens per second, and CPU microseconds per token."""

    rate: float
    server: float
    adapter: float
    client: float


async def turn(tokens: int, server: int, adapter: int, work: Callable[[], Coroutine[Any, Any, None]]) -> Turn:
    """Run `work`, which samples `tokens` tokens, and measure it. `server`, `adapter`: pids of the roots of their
    process trees."""

    def costs() -> list[float]:
        return [sum(map(cpu_seconds, (server, *descendants(server)))), cpu_seconds(adapter), time.process_time()]

    before, start = costs(), time.perf_counter()
    await work()
    seconds = time.perf_counter() - start
    return Turn(tokens / seconds, *((now - then) / tokens * 1e6 for now, then in zip(costs(), before, strict=True)))


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process has used; 0 if it has ended."""
    with suppress(OSError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


async def alone(kind: str, address: str, asked: Sequence[tuple[int, ...]], turn: str) -> None:
    """Get the completions from the server by a bare client."""
    server = JsonServer(kind, address, seconds=REPLY_SECONDS, token_seconds=REPLY_SECONDS)
    path, body = ENDPOINTS[kind]
    sampling = Sampling(max_tokens=TOKENS)

    async def completion(number: int, prompt: tuple[int, ...]) -> None:
        wanted = Continuation(f"{turn}-{number}", prompt, sampling, TOKENS, seed=number)
        async with aclosing(server.events(path, body(wanted))) as events:
            async for _ in events:
                pass

    await asyncio.gather(*(completion(number, prompt) for number, prompt in enumerate(asked)))
    await server.close()


async def as_engine(engine: HttpEngine, asked: Sequence[tuple[int, ...]], turn: str) -> None:
    """Get the same completions through stretto."""
    sampling = Sampling(max_tokens=TOKENS)

    async def completion(number: int, prompt: tuple[int, ...]) -> int:
        request = GenerateRequest(id=f"{turn}.{number}", prompt_token_ids=prompt, seeds=(number,), sampling=sampling)
        return sum([len(ended.token_ids) async for ended in engine.generate(request)])

    tokens = await asyncio.gather(*(completion(number, prompt) for number, prompt in enumerate(asked)))
    assert sum(tokens) == len(asked) * TOKENS


@asynccontextmanager
async def running(kind: str, python: Path, model: Path, interval: int) -> AsyncIterator[tuple[str, int]]:
    """Start a server for the block; yields its address and the pid of its root process."""
    reserved = reserve_port()
    port = port_of(reserved)
    settings = {"kind": kind, "python": str(python), "slots": CONCURRENT, "cache_gib": 1.0}
    if interval:
        settings["arguments"] = ["--stream-interval", str(interval)]
    config = EngineConfig.model_validate(settings)
    process = await ServerProcess.start(kind, launch_of(config, str(model), port))
    http = JsonServer(kind, f"127.0.0.1:{port}", seconds=REPLY_SECONDS, token_seconds=REPLY_SECONDS)
    try:
        await until_ready(process, make_of(kind, http, REPLY_SECONDS), START_SECONDS)
        yield f"127.0.0.1:{port}", process._guard.pid
    finally:
        await http.close()
        await process.stop()
        reserved.close()


@asynccontextmanager
async def adapted(kind: str, server: str, model: Path, folder: Path) -> AsyncIterator[tuple[HttpEngine, int]]:
    """Start an adapter of the server for the block, with the model's weights as version 1; yields a client of it, and
    its pid."""
    SharedMemoryPublisher(MAILBOX, folder / "mailbox").publish(1, load_file(model / "model.safetensors").items())
    spec = EngineSpec(
        name="engine-0",
        address=f"unix:{folder}/engine.sock",
        model=str(model),
        mailbox=MAILBOX,
        mailbox_folder=str(folder / "mailbox"),
        config=EngineConfig.model_validate({"kind": kind, "addresses": [server]}).model_dump_json(),
        threads=1,
        publication_seconds=60.0,
        server=server,
        scratch=str(folder / "engine-0"),
    )
    command = [sys.executable, "-m", "stretto_servers.role", msgspec.json.encode(spec).decode()]
    adapter = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    engine = HttpEngine("engine-0", spec.address)
    try:
        async with asyncio.timeout(120):
            while True:
                try:
                    await engine.health()
                    break
                except EngineLost:
                    await asyncio.sleep(0.1)
        yield engine, adapter.pid
    finally:
        await engine.close()
        adapter.terminate()
        adapter.wait(30)
        remove(MAILBOX, folder / "mailbox")


async def measured(kind: str, python: Path, rounds: int, interval: int, folder: Path) -> dict[str, Any]:
    """Measure both ways in turns."""
    model, asked = make("3.4M", folder), prompts(CONCURRENT, VOCABULARY)
    bare: list[Turn] = []
    ours: list[Turn] = []
    tokens = CONCURRENT * TOKENS
    async with (
        running(kind, python, model, interval) as (address, server),
        adapted(kind, address, model, folder) as (engine, adapter),
    ):
        for number in range(rounds + 1):
            name = f"turn{number}"
            bare.append(await turn(tokens, server, adapter, partial(alone, kind, address, asked, name)))
            ours.append(await turn(tokens, server, adapter, partial(as_engine, engine, asked, name)))
    bare, ours = bare[1:], ours[1:]  # the first is slow
    cost = [statistics.median(used(turn) for turn in turns) for turns in (bare, ours)]
    return {
        "kind": kind,
        "server_alone": bare,
        "as_engine": ours,
        "added": round(statistics.median(t.rate for t in bare) / statistics.median(t.rate for t in ours) - 1, 3),
        "added_cpu": round(cost[1] / cost[0] - 1, 3),
        "load_average": round(os.getloadavg()[0], 1),
    }


#: Microseconds per token of the server, and of what stretto adds.
PARTS: tuple[Callable[[Turn], float], ...] = (lambda turn: turn.server, lambda turn: turn.adapter + turn.client)


def used(turn: Turn) -> float:
    """CPU microseconds per token of all processes."""
    return turn.server + turn.adapter + turn.client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(MAKES.built_in), default=list(MAKES.built_in))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--interval", type=int, default=0, help="tokens of an event; 0: as stretto starts the server")
    words = parser.parse_args()
    rows: list[dict[str, Any]] = []
    table = Table("server", "alone tokens/s", "as engine tokens/s", "added", "server µs/token", "ours", "added")
    for kind in words.kinds:
        try:
            python = Environment(kind).ensure()
        except PeerUnavailable as problem:
            print(f"{kind} is left out: {problem}")
            continue
        with tempfile.TemporaryDirectory(prefix="st-") as folder:
            row = asyncio.run(measured(kind, python, words.rounds, words.interval, Path(folder)))
        rows.append(row)
        rates = (statistics.median(turn.rate for turn in row[way]) for way in ("server_alone", "as_engine"))
        costs = [statistics.median(part(t) for t in row["as_engine"]) for part in PARTS]
        shown = (*(f"{rate:,.0f}" for rate in rates), f"{row['added']:.1%}", *(f"{cost:.1f}" for cost in costs))
        table.add(kind, *shown, f"{row['added_cpu']:.1%}")
        table.show_last()

    if not words.interval:
        save("external", {"model": "3.4M", "concurrent": CONCURRENT, "tokens": TOKENS, "rows": rows})


if __name__ == "__main__":
    main()
