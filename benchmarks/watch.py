"""How fast `stretto watch` is with a large run: 1,000,000 trajectories, 100,000 steps, 1,000,000 spans.

    python -m benchmarks.watch [--trajectories 1000000] [--steps 100000] [--spans 1000000]

The run is invented, in the format of real ones: rows of the ledger with their seals, lines of metrics and of spans;
without payloads. A server is started twice: the first starts without a cache, the second has the cache of the first.
For both, the requests of a browser are timed (the list, the run, its curves, its newest trajectories, its timeline);
for the second also pages of the table, as the median of three each, and the memory of the process is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.report import Table, save
from stretto.core.events import Span
from stretto.store.ledger.schema import open_for_writing
from stretto.store.ledger.seals import seal
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import StepMetrics

PATIENCE_SECONDS = 180.0  # for anything that is waited for
GROUP = 8
TABLES = (
    "",
    "sort=-id",
    "sort=-reward&offset=500000",
    "sort=length&offset=999000",
    "sort=-staleness&limit=500",
    "where=state%3Dfailed and reason~timeout",
    "where=reward>%3D0.5 and length>60&sort=-length",
    "where=group%3D0.777.0",
    'where=text~"question 77"&sort=reward',
)


def make_run(path: Path, trajectories: int, steps: int, spans: int) -> None:
    """Write the run. A fiftieth of the groups failed; the others were trained, evenly over the steps."""
    with RunFolder.create(path) as folder:
        folder.write("recipe.toml", f"[trainer]\nsteps = {steps}\n[rollout]\nmax_staleness = 2.0\n")
        folder.write("log.txt", "2026-11-22 03:08:45  ends with exit code 0\n")
        groups = trajectories // GROUP
        questions = ({"id": str(at), "prompt": f"question {at}", "answer": "1"} for at in range(groups))
        _write(folder.questions, questions)
        with closing(open_for_writing(folder.ledger)) as connection:
            connection.execute("BEGIN")
            rows = (_group(group) for group in range(groups))
            connection.executemany("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            rows = (_trajectory(key, trajectories, steps) for key in range(trajectories))
            connection.executemany(f"INSERT INTO trajectories VALUES ({', '.join('?' * 14)})", rows)
            connection.execute("COMMIT")
        _write(folder.metrics, (_step(step) for step in range(1, steps + 1)))
        _write(folder.spans, (_span(at) for at in range(spans)))


def _group(group: int) -> tuple[Any, ...]:
    columns = (group * GROUP, f"0.{group}.0", str(group), GROUP, 0, b"\x91\x05")
    return (*columns, seal(*columns))


def _trajectory(key: int, trajectories: int, steps: int) -> tuple[Any, ...]:
    group, step = key // GROUP, key * steps // trajectories + 1
    length, old = 20 + key * 7_919 % 200, max(step - 1 - key % 3, 0)
    if group % 50 == 0:
        ended: tuple[Any, ...] = ("failed", "timeout after 1 s", None, None, None, None, 0, None, None, 0)
    else:
        right = key * 31 % 7 < 4
        outcome = ("right" if right else "wrong", float(right), "stop" if key % 9 else "length")
        ended = ("trained", "", step, *outcome, length, old, step - 1, int(old < step - 1))
    columns = (key, group * GROUP, key % GROUP, *ended)
    return (*columns, seal(*columns))


def _step(step: int) -> StepMetrics:
    noise = step * 7_919 % 1_000 / 1_000
    names = ("loss", "entropy", "grad_norm", "clip_fraction", "kl_behavior", "behavior_logprob_error", "learning_rate")
    return StepMetrics(
        step=step,
        version=step,
        wall_seconds=step * 0.5,
        rl_seconds=step * 0.5,
        accuracy=0.5,
        reward=0.5 + 0.1 * noise,
        length_mean=120.0,
        length_max=219,
        staleness_mean=1.0,
        staleness_max=2,
        trained_tokens=1_200,
        generated_tokens=1_300 * step,
        trainer=dict.fromkeys(names, 0.1 + 0.01 * noise),
        queues={"in_flight": 16.0, "buffered": 2.0},
        busy={"trainer": 0.6, "engine-0": 0.9, "rewards": 0.1, "conductor": 0.05},
    )


def _span(at: int) -> Span:
    role, name = (("trainer", "update"), ("engine-0", "generate"), ("engine-1", "generate"), ("engine-0", "load"))[
        at % 4
    ]
    return Span(role=role, name=name, start=100 + at * 0.05, end=100 + at * 0.05 + 0.04, version=at // 4)


def _write(path: Path, records: Iterator[Any]) -> None:
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        while block := list(islice(records, 10_000)):
            file.write(b"".join(encoder.encode(record) + b"\n" for record in block))


@contextmanager
def server(runs: Path, cache: Path) -> Iterator[tuple[httpx.Client, int]]:
    """Start a server in its own process; yields a client and the process id."""
    command = [
        sys.executable,
        "-m",
        "stretto_app.cli.main",
        "watch",
        str(runs),
        "--port",
        "0",
        "--token",
        "T",
        "--no-open",
    ]
    environment = os.environ | {"STRETTO_CACHE": str(cache)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], PATIENCE_SECONDS)[0], "the server does not start"
            address = process.stdout.readline().split()[-1].split("?")[0]
            with httpx.Client(base_url=address, headers={"authorization": "Bearer T"}, timeout=120) as client:
                yield client, process.pid
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def opening(client: httpx.Client) -> tuple[str, float, float]:
    """Do the requests of a browser. Returns the address of the run, the seconds, and the share of the ledger read by
    then."""
    start = time.perf_counter()
    (run,) = client.get("/api/runs").json()["runs"]
    address = f"/api/runs/{run['id']}"
    indexed = 0.0
    for part in ("", "/series?names=reward,trainer.entropy", "/trajectories?sort=-id", "/timeline?pixels=1200"):
        found = client.get(f"{address}{part}").raise_for_status().json()
        indexed = found.get("indexed", indexed)
    return address, time.perf_counter() - start, indexed


def until(what: str, is_so: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Ask repeatedly until something is so.

    Raises:
        TimeoutError: it is not so after these seconds; the message says what was waited for.
    """
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.1)


def parts_kept(cache: Path) -> set[str]:
    """Names of the parts of a run that the server has in its cache."""
    found = set[str]()
    for path in (cache / "watch").glob("*.sqlite"):
        with contextlib.suppress(sqlite3.OperationalError), closing(sqlite3.connect(path)) as connection:
            found |= {part for (part,) in connection.execute("SELECT part FROM facts")}
    return found


def _memory_mib(pid: int) -> float:
    (line,) = [row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if row.startswith("VmHWM")]
    return float(line.split()[1]) / 1024


def _tables(client: httpx.Client, address: str) -> dict[str, float]:
    """Median seconds of three pages, by question."""
    found: dict[str, float] = {}
    for question in TABLES:
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            client.get(f"{address}/trajectories?{question}").raise_for_status()
            seconds.append(time.perf_counter() - start)
        found[question] = statistics.median(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("trajectories", 1_000_000), ("steps", 100_000), ("spans", 1_000_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    sizes = vars(parser.parse_args())
    with tempfile.TemporaryDirectory(prefix="stretto-watch-") as scratch:
        runs, cache = Path(scratch, "runs"), Path(scratch, "cache")
        make_run(runs / "large", **sizes)
        with server(runs, cache) as (client, pid):
            address, first, indexed = opening(client)
            start = time.perf_counter()
            until("the ledger to be read", lambda: client.get(f"{address}/trajectories").json()["indexed"] == 1)
            reading = first + time.perf_counter() - start
            until("the spans to be read", lambda: client.get(f"{address}/timeline").json()["spans"] == sizes["spans"])
            until("the metrics to be read", lambda: client.get(f"{address}/series").json()["steps"] == sizes["steps"])
            until("what was read to be kept", lambda: parts_kept(cache) >= {"trajectories", "steps", "spans"})
            first_memory = _memory_mib(pid)
        with server(runs, cache) as (client, pid):
            address, again, _ = opening(client)
            tables = _tables(client, address)
            memory = _memory_mib(pid)
    table = Table("what", "seconds")
    for name, value in {
        "opening, nothing read": first,
        "until all is read": reading,
        "opening, read before": again,
    }.items():
        table.add(name, round(value, 3))
    for question, value in tables.items():
        table.add(f"table: {question or '(first page)'}", round(value, 4))
    table.show()
    print(f"memory: {first_memory:.0f} MiB while reading, {memory:.0f} MiB after")
    result = {
        "sizes": sizes,
        "opening_first": first,
        "indexed_then": indexed,
        "reading": reading,
        "opening_again": again,
    }
    save("watch", result | {"tables": tables, "memory_mib_reading": first_memory, "memory_mib": memory})


if __name__ == "__main__":
    main()
