"""Weights over a network: how fast a mirror pulls a version, and how long engines then stop to load it.

    python -m benchmarks.weights              three minutes, on a machine that does nothing else
    python -m benchmarks.weights --no-ray     without Ray's environment

A version in bfloat16 is sent over the loopback from a weights server (its own process) to another mailbox: in full, and
as the difference from the version before, in which every parameter differs by one step of 1e-6. For comparison, `copy`
is a plain copy of the same file in shared memory, and Ray does a `put` on one node and a `get` on another. Rates always
count the bytes of the whole version. Then one, two and four engines (processes of one thread, bfloat16) load the
version from the mirror: `verify` is the work of a thread before the pause, `pause` the copy; the slowest engine counts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from benchmarks.peers.environment import Environment, PeerUnavailable
from benchmarks.report import Table, save
from benchmarks.shapes import SHAPES
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.build import build_policy
from stretto.model.hf.folder import load_policy
from stretto.weights.folder import path_of, remove, shared_folder
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from stretto_cluster.weights.mirror import Mirror
from stretto_cluster.weights.server import WeightsServerSpec, bound

WIDE = SHAPES["48M"].model_copy(update={"hidden_size": 576, "layers": 38, "heads": 9, "kv_heads": 3})
MODELS = {**SHAPES, "135M": WIDE}
ENGINES = (1, 2, 4)
STEP = 1e-6
ROUNDS = 3
RAY = Path(__file__).parent / "peers" / "ray_put.py"


@dataclass(frozen=True)
class Place:
    """Two mailboxes on this machine, and the server of the first."""

    run: str
    home: Path
    away: Path
    source: str
    key: str

    def mirror(self, delta: Literal["always", "never"]) -> Mirror:
        return Mirror(self.source, self.key, self.run, self.away, delta=delta, patience=60.0)


@contextmanager
def place(model: Path, needed: int) -> Iterator[Place]:
    """Run a weights server during the block."""
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as scratch, ExitStack() as undo:
        run, home, key = f"bench.{os.getpid()}", shared_folder(4 * needed, Path(scratch)), secrets.token_hex(16)
        undo.callback(remove, run, home)
        away = home / f"{run}.away"
        away.mkdir()
        undo.callback(shutil.rmtree, away)
        (Path(scratch) / "key").write_text(key)
        with bound("127.0.0.1", 0) as free:
            source = f"127.0.0.1:{free.getsockname()[1]}"
        spec = WeightsServerSpec(run, str(home), str(model), source, str(Path(scratch) / "key"))
        command = [sys.executable, "-m", "stretto_cluster.weights.server", msgspec.json.encode(spec).decode()]
        server = subprocess.Popen(command)
        undo.callback(server.wait)
        undo.callback(server.terminate)
        yield Place(run, home, away, source, key)


class Policy:
    """Parameters in float32, which take a step before each version."""

    def __init__(self, model: Path) -> None:
        self._parameters = {name: p.detach() for name, p in load_policy(model).named_parameters()}
        generator = torch.Generator().manual_seed(1)
        self._directions = {
            name: torch.randint(0, 2, p.shape, generator=generator).mul_(2).sub_(1).float()
            for name, p in self._parameters.items()
        }

    @property
    def size(self) -> int:
        """Bytes of a version in bfloat16."""
        return sum(2 * p.numel() for p in self._parameters.values())

    def step(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield name, parameter.add_(self._directions[name], alpha=STEP).bfloat16()


class EngineProcess:
    """Engine that loads a version when told to."""

    def __init__(self, model: Path, place: Place) -> None:
        command = [sys.executable, "-m", "benchmarks.weights", "--engine", str(model), place.run, str(place.away)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def tell(self, version: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{version}\n")
        self._process.stdin.flush()

    def seconds(self) -> tuple[float, float]:
        """Seconds for verifying the announced version, and for copying it."""
        verify, copy = self._answer().split()
        return float(verify), float(copy)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def engine(model: str, run: str, folder: str) -> None:
    """Process of an engine: reads a version from each line of its input, and writes to a line of its output the seconds
    in which it was read and verified, and those in which the engine took it."""
    torch.set_num_threads(1)
    native = NativeEngine.load(Path(model), EngineConfig(dtype="bfloat16", cache_gib=0.1, device="cpu"))
    subscriber = SharedMemorySubscriber(run, Path(folder))
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        tensors = subscriber.load(int(line))
        verified = time.perf_counter()
        native.update(int(line), tensors)
        print(verified - start, time.perf_counter() - verified, flush=True)


def measure(name: str, model: Path) -> dict[str, Any]:
    """Medians of all forms for one model."""
    policy = Policy(model)
    rates: dict[str, list[float]] = {"copy": [], "full": [], "delta": []}
    pauses: list[dict[str, Any]] = []
    moved: list[float] = []
    version = 0
    with place(model, policy.size) as there, ExitStack() as undo:
        publisher = SharedMemoryPublisher(there.run, there.home)
        publisher.publish(version, policy.step())
        asyncio.run(there.mirror("never").pull(version))
        engines = []
        for _ in range(max(ENGINES)):
            engines.append(EngineProcess(model, there))
            undo.callback(engines[-1].end)
        for form, mirror in (("full", there.mirror("never")), ("delta", there.mirror("always"))):
            for count in ENGINES:
                found = []
                for _ in range(ROUNDS):
                    version += 1
                    publisher.publish(version, policy.step())
                    pulled = asyncio.run(mirror.pull(version))
                    assert pulled.delta == (form == "delta"), pulled.reason
                    size = path_of(there.run, there.away, version).stat().st_size
                    rates[form].append(size / pulled.seconds)
                    if pulled.delta:
                        moved.append(pulled.bytes / size)
                    rates["copy"].append(size / copy_seconds(there, version))
                    found.append(_stop(engines[:count], version))
                longest = statistics.median(max(copy for _, copy in stops) for stops in found)
                verify = statistics.median(max(verify for verify, _ in stops) for stops in found)
                pauses.append({"form": form, "engines": count, "pause": longest, "verify": verify})
    return {
        "model": name,
        "bytes": policy.size,
        "bytes_per_second": {form: statistics.median(values) for form, values in rates.items()},
        "moved": statistics.median(moved),
        "pauses": pauses,
    }


def _stop(engines: list[EngineProcess], version: int) -> list[tuple[float, float]]:
    for one in engines:
        one.tell(version)
    return [one.seconds() for one in engines]


def copy_seconds(there: Place, version: int) -> float:
    """Seconds of a plain copy of a version in shared memory."""
    start = time.perf_counter()
    shutil.copyfile(path_of(there.run, there.home, version), there.away / "copy")
    took = time.perf_counter() - start
    (there.away / "copy").unlink()
    return took


def ray(sizes: list[int]) -> dict[str, Any] | None:
    """Rows for Ray; None if its environment cannot be built."""
    try:
        return Environment("ray").measure(RAY, "--bytes", *map(str, sizes), threads=1, seconds=240)
    except PeerUnavailable as problem:
        print(problem)
        return None


def show(models: list[dict[str, Any]], peer: dict[str, Any] | None) -> None:
    table = Table(
        "model", "MB", "copy MB/s", "in full MB/s", "delta MB/s", "delta moves", "Ray put MB/s", "Ray get MB/s"
    )
    beside = {row["bytes"]: row for row in peer["rows"]} if peer else {}
    for one in models:
        rates = [f"{one['bytes_per_second'][form] / 1e6:,.0f}" for form in ("copy", "full", "delta")]
        row = beside.get(one["bytes"])
        theirs = [f"{one['bytes'] / row[way] / 1e6:,.0f}" for way in ("put", "get")] if row else ["", ""]
        table.add(one["model"], f"{one['bytes'] / 1e6:,.0f}", *rates, f"{one['moved']:.1%}", *theirs)
    table.show()
    print()
    pauses = Table("model", "pulled", "engines", "pause ms", "before it, verify ms")
    for one in models:
        for stop in one["pauses"]:
            told = [f"{1000 * stop[part]:.1f}" for part in ("pause", "verify")]
            pauses.add(one["model"], stop["form"], stop["engines"], *told)
    pauses.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.engine:
        return engine(*words.engine)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    models = []
    with tempfile.TemporaryDirectory(prefix="stretto-models-") as folder:
        for name, shape in MODELS.items():
            build_policy(shape, Path(folder) / name, seed=1)
            print(f"{name} ...", flush=True)
            models.append(measure(name, Path(folder) / name))
    peer = None if words.no_ray else ray([one["bytes"] for one in models])
    show(models, peer)
    loads = {"before": load, "after": os.getloadavg()[0]}
    save("weights", {"rounds": ROUNDS, "load_average": loads, "models": models, "ray": peer})
    return None


if __name__ == "__main__":
    main()
