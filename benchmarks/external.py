"""What stretto adds to a server of vLLM or SGLang: tokens per second of the server alone, and as an engine of a run.

    python -m benchmarks.external                       both makes, 64 concurrent completions, 3 rounds
    python -m benchmarks.external --kinds vllm --rounds 5

Alone, a bare client streams the completions from the server's own endpoint, with token ids and log-probabilities as
stretto asks for them, and throws the bytes away. As an engine, the same prompts go through the conductor's client and
the adapter's process (`engine.external.role`), which reads, checks and stamps every token. Both by turns, one server.
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
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
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
from stretto.engine.config import EngineConfig
from stretto.engine.external import sglang, vllm
from stretto.engine.external.http import JsonServer
from stretto.engine.external.make import Continuation
from stretto.engine.external.makes import MAKES
from stretto.engine.external.server import ServerProcess, free_port, until_ready
from stretto.engine.http.client import HttpEngine
from stretto.engine.spec import EngineSpec
from stretto.weights.folder import remove
from stretto.weights.shared_memory import SharedMemoryPublisher

CONCURRENT, TOKENS, VOCABULARY = 64, 128, 1024
START_SECONDS, REPLY_SECONDS = 600.0, 300.0
ENDPOINTS = {"vllm": ("/inference/v1/generate", vllm._body), "sglang": ("/generate", sglang._body)}
MAILBOX = "external.benchmark"


async def alone(kind: str, address: str, asked: Sequence[tuple[int, ...]], turn: str) -> float:
    """Tokens per second of the server under a bare client."""
    server = JsonServer(kind, address, seconds=REPLY_SECONDS, token_seconds=REPLY_SECONDS)
    path, body = ENDPOINTS[kind]
    sampling = Sampling(max_tokens=TOKENS)

    async def completion(number: int, prompt: tuple[int, ...]) -> None:
        wanted = Continuation(f"{turn}-{number}", prompt, sampling, TOKENS, seed=number)
        async with aclosing(server.events(path, body(wanted))) as events:
            async for _ in events:
                pass

    start = time.perf_counter()
    await asyncio.gather(*(completion(number, prompt) for number, prompt in enumerate(asked)))
    seconds = time.perf_counter() - start
    await server.close()
    return len(asked) * TOKENS / seconds


async def as_engine(engine: HttpEngine, asked: Sequence[tuple[int, ...]], turn: str) -> float:
    """Tokens per second of the same completions through stretto."""
    sampling = Sampling(max_tokens=TOKENS)

    async def completion(number: int, prompt: tuple[int, ...]) -> int:
        request = GenerateRequest(id=f"{turn}.{number}", prompt_token_ids=prompt, seeds=(number,), sampling=sampling)
        return sum([len(ended.token_ids) async for ended in engine.generate(request)])

    start = time.perf_counter()
    tokens = await asyncio.gather(*(completion(number, prompt) for number, prompt in enumerate(asked)))
    assert sum(tokens) == len(asked) * TOKENS
    return sum(tokens) / (time.perf_counter() - start)


@asynccontextmanager
async def running(kind: str, python: Path, model: Path) -> AsyncIterator[str]:
    """The address of a server."""
    port = free_port()
    config = EngineConfig.model_validate({"kind": kind, "python": str(python), "slots": CONCURRENT, "cache_gib": 1.0})
    process = await ServerProcess.start(kind, MAKES[kind].launch(config, str(model), port))
    http = JsonServer(kind, f"127.0.0.1:{port}", seconds=REPLY_SECONDS, token_seconds=REPLY_SECONDS)
    try:
        await until_ready(process, MAKES[kind].server(http, REPLY_SECONDS), START_SECONDS)
        yield f"127.0.0.1:{port}"
    finally:
        await http.close()
        await process.stop()


@asynccontextmanager
async def adapted(kind: str, server: str, model: Path, folder: Path) -> AsyncIterator[HttpEngine]:
    """A client of an adapter of the server, in a process of its own, with the model's weights as version 1."""
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
    command = [sys.executable, "-m", "stretto.engine.external.role", msgspec.json.encode(spec).decode()]
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
        yield engine
    finally:
        await engine.close()
        adapter.terminate()
        adapter.wait(30)
        remove(MAILBOX, folder / "mailbox")


async def measured(kind: str, python: Path, rounds: int, folder: Path) -> dict[str, Any]:
    """Both ways by turns."""
    model, asked = make("3.4M", folder), prompts(CONCURRENT, VOCABULARY)
    bare: list[float] = []
    ours: list[float] = []
    async with running(kind, python, model) as address, adapted(kind, address, model, folder) as engine:
        await alone(kind, address, asked, "warm")
        await as_engine(engine, asked, "warm")
        for turn in range(rounds):
            bare.append(await alone(kind, address, asked, f"turn{turn}"))
            ours.append(await as_engine(engine, asked, f"turn{turn}"))
    added = statistics.median(bare) / statistics.median(ours) - 1
    return {
        "kind": kind,
        "server_alone": [round(rate, 1) for rate in bare],
        "as_engine": [round(rate, 1) for rate in ours],
        "added": round(added, 3),
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(MAKES), default=list(MAKES))
    parser.add_argument("--rounds", type=int, default=3)
    words = parser.parse_args()
    rows: list[dict[str, Any]] = []
    table = Table("server", "alone tokens/s", "as engine tokens/s", "added")
    for kind in words.kinds:
        try:
            python = Environment(kind).ensure()
        except PeerUnavailable as problem:
            print(f"{kind} is left out: {problem}")
            continue
        with tempfile.TemporaryDirectory(prefix="st-") as folder:
            row = asyncio.run(measured(kind, python, words.rounds, Path(folder)))
        rows.append(row)
        rates = (statistics.median(row[way]) for way in ("server_alone", "as_engine"))
        table.add(kind, *(f"{rate:,.0f}" for rate in rates), f"{row['added']:.1%}")
        table.show_last()

    save("external", {"model": "3.4M", "concurrent": CONCURRENT, "tokens": TOKENS, "rows": rows})


if __name__ == "__main__":
    main()
