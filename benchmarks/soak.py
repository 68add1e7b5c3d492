"""An engine at full load for a while: does its memory stay flat, and does every answer come back?

    python -m benchmarks.soak --minutes 10

The engine is a process of its own, reached as a run reaches it. Twice as many answers as it has slots are always
wanted, their lengths log-normal with the longest at the context's end, and its cache is small enough to be full all the
time, so that answers are preempted. New weights arrive every few seconds. Four times in the whole time all answers are
awaited: an idle engine checks that no slot is held, and ends if one is, which ends the benchmark.

Flat means: the resident memory at the end is that after a quarter of the time, to 2 % and 4 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from transformers import PreTrainedModel

from benchmarks.report import Table, save
from stretto.core.errors import EngineLost
from stretto.core.records import GenerateRequest, Sampling, derive_seed
from stretto.engine.config import EngineConfig
from stretto.engine.http.client import HttpEngine
from stretto.engine.spec import EngineSpec
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto.model.hf.folder import load_policy
from stretto.processes.heartbeat import PARENT
from stretto.weights.shared_memory import SharedMemoryPublisher

SLOTS = 64
GROUP = 4
CONTEXT = 1024
MEDIAN = 90  # tokens of an answer; the longest are ten times as long
SHAPE = BuildConfig(hidden_size=64, layers=2, heads=4, kv_heads=4, head_dim=16, context_length=CONTEXT)
TOKEN_BYTES = 2 * 2 * 4 * 16 * 4
CACHE_GIB = SLOTS * 160 * TOKEN_BYTES / 2**30  # full when the answers of all slots are of the mean length
UPDATE_SECONDS = 5.0
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Sample:
    """The engine at one moment."""

    seconds: float
    resident_mib: float
    tokens_per_second: float
    answers: int
    preempted: int
    recomputed: int
    version: int


class Load:
    """Keeps twice as many answers wanted as there are slots."""

    def __init__(self, engine: HttpEngine) -> None:
        self._engine = engine
        self._random = random.Random(0)
        self._number = 0
        self.answers = self.tokens = 0

    async def run(self, until: float) -> None:
        """Ask until the given time of `time.monotonic`, then await what is open."""
        async with asyncio.TaskGroup() as group:
            for _ in range(2 * SLOTS // GROUP):
                group.create_task(self._ask(until))

    async def _ask(self, until: float) -> None:
        while time.monotonic() < until:
            self._number += 1
            longest = int(min(10 * MEDIAN, MEDIAN * math.exp(self._random.gauss(0, 0.9)))) + 1
            request = GenerateRequest(
                id=str(self._number),
                prompt_token_ids=tuple(self._random.randrange(2, 20) for _ in range(self._random.randint(4, 64))),
                seeds=tuple(derive_seed(self._number, member) for member in range(GROUP)),
                sampling=Sampling(max_tokens=longest),
            )
            async for completion in self._engine.generate(request):
                self.answers += 1
                self.tokens += len(completion.token_ids)


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in use now, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def soak(
    process: subprocess.Popen[bytes], engine: HttpEngine, publisher: SharedMemoryPublisher, words: Words
) -> None:
    """Load the engine, sample its memory, show and save what was seen."""
    load, samples = Load(engine), list[Sample]()
    table = Table("seconds", "resident MiB", "tokens/s", "answers", "preempted", "recomputed", "version")
    start = time.monotonic()

    async def sample() -> None:
        before, last = 0, start
        while True:
            await asyncio.sleep(words.minutes * 60 / 40)
            health, now = await engine.health(), time.monotonic()
            rate = (health.generated - before) / (now - last)
            before, last = health.generated, now
            resident = resident_bytes(process.pid) / 2**20
            counts = (load.answers, health.preempted, health.recomputed, health.version)
            samples.append(Sample(round(now - start, 1), round(resident, 1), round(rate), *counts))
            table.add(*asdict(samples[-1]).values())
            table.show_last()

    async def update() -> None:
        version = 0
        while True:
            await asyncio.sleep(UPDATE_SECONDS)
            version += 1
            publisher.publish(version, words.model.named_parameters())
            await engine.update(version)

    beside = [asyncio.create_task(sample()), asyncio.create_task(update())]
    for quarter in range(1, 5):
        await load.run(start + words.minutes * 60 * quarter / 4)
        health = await engine.health()
        if health.running or health.waiting:
            raise RuntimeError(f"{health.running} answers run and {health.waiting} wait, but nobody asked for them")
    for task in beside:
        task.cancel()
    ended = await asyncio.gather(*beside, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    await report(engine, load, samples, words)


async def report(engine: HttpEngine, load: Load, samples: list[Sample], words: Words) -> None:
    """Print whether memory was flat, and write the JSON."""
    health = await engine.health()
    early, late = samples[len(samples) // 4].resident_mib, samples[-1].resident_mib
    flat = late - early <= 0.02 * early + 4
    lost = health.generated - health.wasted - load.tokens
    print(f"\nresident memory {'flat' if flat else 'NOT flat'}: {early} MiB after a quarter, {late} MiB at the end")
    print(f"{load.answers:,} answers of {load.tokens:,} tokens came back, {lost} tokens did not")
    print(f"{health.preempted:,} preemptions, {health.recomputed:,} tokens recomputed, {health.updates} updates")
    results = {"minutes": words.minutes, "flat": flat, "lost_tokens": lost, "samples": [asdict(s) for s in samples]}
    save("soak", results | {"slots": SLOTS, "cache_gib": CACHE_GIB, "answers": load.answers})


@dataclass(frozen=True)
class Words:
    """What was asked for on the command line, and the policy whose weights are published again and again."""

    minutes: float
    model: PreTrainedModel


async def until_up(engine: HttpEngine, process: subprocess.Popen[bytes]) -> None:
    """Return when the engine answers.

    Raises:
        RuntimeError: its process ended instead.
    """
    while process.poll() is None:
        with suppress(EngineLost):
            await engine.health()
            return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"the engine ended with {process.returncode} before it served")


async def main_in(folder: Path, minutes: float) -> None:
    """The whole benchmark with files in `folder`."""
    build_policy(SHAPE, folder / "policy", seed=1)
    words = Words(minutes, load_policy(folder / "policy"))
    config = EngineConfig(slots=SLOTS, cache_gib=CACHE_GIB)
    publisher, run = SharedMemoryPublisher(f"soak{os.getpid()}", folder), f"soak{os.getpid()}"
    spec = EngineSpec(
        name="engine-0",
        address=f"unix:{folder}/engine.sock",
        model=str(folder / "policy"),
        mailbox=run,
        mailbox_folder=str(folder),
        config=config.model_dump_json(),
        threads=1,
        publication_seconds=0.0,
    )
    command = [sys.executable, "-m", "stretto.engine.role", msgspec.json.encode(spec).decode()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", PARENT: str(os.getpid())}
    process = subprocess.Popen(command, env=environment, cwd=REPOSITORY)
    engine = HttpEngine("engine-0", spec.address)
    try:
        await until_up(engine, process)
        await soak(process, engine, publisher, words)
    finally:
        await engine.close()
        process.terminate()
        process.wait(timeout=20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory(prefix="stretto-soak-") as folder:
        asyncio.run(main_in(Path(folder), minutes))


if __name__ == "__main__":
    main()
