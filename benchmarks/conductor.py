"""How far one conductor scales: the real one with hundreds of simulated engines on real sockets
(`benchmarks.simulated_run`).

    python -m benchmarks.conductor [--engines 64,512] [--steps 6] [--quick] [--apart] [--asyncio]

Each setting is a run: its machines join all at the same time, idle for a while, work through the steps, and get some
further versions. All simulated machines are one process; `--apart` pins it and the conductor to a core each. If other
programs use the machine, the conductor gets less than a core. So each number stands beside the conductor's CPU seconds
for it (`cpu`), which depend less on that, and the seconds in which it waited for a core (`queued`). `echo -10 >
/proc/self/autogroup` in a shell of its own (`setsid`) puts both before the rest of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Table, save
from benchmarks.simulated_run import Setting, SimulatedRun, simulated_run
from stretto.core.tasks import cancel_and_wait, run_beside
from stretto.processes import event_loop
from stretto_report.audit.check import check_run
from stretto_report.reading.inspection import inspect_run

_TICK_SECONDS = 0.01
_PAGE = os.sysconf("SC_PAGE_SIZE")
_IDLE_SECONDS = 4.0
_ANNOUNCEMENTS = 5


@dataclass
class Phase:
    """A part of a run: its wall seconds, CPU seconds, and seconds of waiting for a core; and by how many milliseconds a
    timer of 10 ms was late."""

    seconds: float = 0.0
    cpu: float = 0.0
    queued: float = 0.0
    late: list[float] = field(default_factory=list, repr=False)

    @property
    def p99(self) -> float:
        return round(sorted(self.late)[int(0.99 * len(self.late))], 1) if self.late else 0.0


@contextmanager
def phase() -> Iterator[Phase]:
    """Measure the block; the result is filled in at its end."""
    found, loop = Phase(), asyncio.get_running_loop()
    handle: asyncio.TimerHandle | None = None

    def tick(due: float) -> None:
        nonlocal handle
        found.late.append(1000 * (loop.time() - due))
        due = loop.time() + _TICK_SECONDS
        handle = loop.call_at(due, tick, due)

    due = loop.time() + _TICK_SECONDS
    handle = loop.call_at(due, tick, due)
    began, used, queued = time.perf_counter(), time.process_time(), queued_seconds()
    try:
        yield found
    finally:
        found.seconds, found.cpu = time.perf_counter() - began, time.process_time() - used
        found.queued = queued_seconds() - queued
        handle.cancel()


def queued_seconds() -> float:
    """Seconds in which the main thread of this process was runnable, but others had the cores."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def digits(value: float) -> float:
    """The value rounded to three significant digits."""
    return float(f"{value:.3g}")


async def idle(run: SimulatedRun, engines: int) -> dict[str, float]:
    """Measure while all engines idle: with heartbeats alone, and with the counters that are polled each second."""
    before = await run.fleet.do("report")
    with phase() as beats:
        await asyncio.sleep(_IDLE_SECONDS)
    after = await run.fleet.do("report")
    with phase() as polls:
        for _ in range(3):
            await run.roles.poll(1.0)
    return {
        "heartbeats_per_second": digits((after.echoes - before.echoes) / beats.seconds),
        "share_of_a_core": digits(beats.cpu / beats.seconds),
        "timer_p99_ms": beats.p99,
        "counters_cpu_ms_per_engine": digits(1000 * polls.cpu / 3 / engines),
    }


async def announcements(run: SimulatedRun, engines: int) -> dict[str, float]:
    """Measure from a publication to its load by every engine."""
    loading = asyncio.ensure_future(run.pool.keep_loaded())
    seconds, used, late = list[float](), list[float](), list[float]()
    for number in range(_ANNOUNCEMENTS):
        with phase() as one:
            await run.announce(run.setting.steps + 1 + number)
        seconds.append(one.seconds)
        used.append(one.cpu)
        late += one.late
    await cancel_and_wait([loading])
    return {
        "seconds": digits(statistics.median(seconds)),
        "cpu_ms_per_engine": digits(1000 * statistics.median(used) / engines),
        "timer_max_ms": round(max(late, default=0.0), 1),  # none in an announcement shorter than a timer
    }


@contextmanager
def profiled(file: str) -> Iterator[None]:
    """Write a profile of the block, in CPU seconds, to `file` unless it is empty."""
    with cProfile.Profile(time.process_time) if file else nullcontext() as profiler:
        yield
    if profiler is not None:
        profiler.dump_stats(file)


async def training(run: SimulatedRun) -> dict[str, float]:
    """Measure all steps, from the first admission to the last batch on record."""
    before = await run.fleet.do("report")
    with phase() as whole:
        await run.conduct()
    after, balance = await run.fleet.do("report"), run.ledger.balance()
    finished = balance.trained + balance.buffered
    crossed = after.sent - before.sent + after.received - before.received
    return {
        "trajectories": finished,
        "seconds": digits(whole.seconds),
        "cpu_seconds": digits(whole.cpu),
        "queued_seconds": digits(whole.queued),
        "trajectories_per_second": digits(finished / whole.seconds),
        "trajectories_per_second_not_queued": digits(finished / (whole.seconds - whole.queued)),
        "trajectories_per_cpu_second": digits(finished / whole.cpu),
        "share_of_a_core": digits(whole.cpu / whole.seconds),
        "tokens_per_cpu_second": digits(finished * run.setting.tokens / whole.cpu),
        "bytes_per_trajectory": digits(crossed / finished),
        "timer_p99_ms": whole.p99,
        "timer_max_ms": round(max(whole.late), 1),
        "fleet_cpu_seconds": digits(after.cpu_seconds - before.cpu_seconds),
    }


async def tokens_per_cpu_second(setting: Setting, path: Path) -> float:
    """Measure the training of one setting alone."""
    async with simulated_run(setting, path) as run:
        await run_beside(run.roles.supervise(), run.all_up())
        return (await training(run))["tokens_per_cpu_second"]


async def measured(setting: Setting, path: Path, profile: str) -> dict[str, Any]:
    """Measure one setting. `profile`: file for a profile of its training, or ""."""
    engines, found = setting.engines, dict[str, Any]()
    async with simulated_run(setting, path) as run:
        empty = resident()
        with phase() as joins:
            await run_beside(run.roles.supervise(), run.all_up())
        found["registrations"] = {
            "per_second": digits(engines / joins.seconds),
            "per_cpu_second": digits(engines / joins.cpu),
            "retries": (await run.fleet.do("report")).retries,
            "timer_p99_ms": joins.p99,
        }
        found["memory_kib_per_engine"] = round((resident() - empty) / engines / 1024, 1)
        found["idle"] = await idle(run, engines)
        with profiled(profile):
            found["training"] = await training(run)
        found["announcement"] = await announcements(run, engines)
        found["memory_mib_in_all"] = round(resident() / 2**20)
    checked, balance = check_run(path), inspect_run(path).trajectories
    found["kept"] = checked.kept and balance.trained == setting.steps * setting.batch * setting.group
    return found


def row(setting: Setting, found: dict[str, Any]) -> tuple[object, ...]:
    """Row of the table for a setting."""
    joins, still, training, told = found["registrations"], found["idle"], found["training"], found["announcement"]
    return (
        f"{setting.engines} x {setting.tokens} tokens, {setting.seconds:g} s",
        joins["per_second"],
        f"{still['heartbeats_per_second']:g} ({still['share_of_a_core']:.0%})",
        training["trajectories_per_second"],
        training["trajectories_per_cpu_second"],
        digits(training["tokens_per_cpu_second"] / 1e6),
        f"{training['share_of_a_core']:.0%}",
        training["queued_seconds"],
        training["timer_p99_ms"],
        told["seconds"],
        found["memory_kib_per_engine"],
        found["kept"],
    )


def settings(engines: list[int], steps: int, quick: bool) -> list[Setting]:
    """Settings with instant short completions for each number of `engines`; unless `quick`, for the last number also
    with long ones, and with completions that stay in flight for seconds."""
    found = [Setting(count, steps) for count in engines]
    largest = Setting(engines[-1], steps)
    further = [
        dataclasses.replace(largest, tokens=1024, steps=max(1, steps // 4)),
        dataclasses.replace(largest, seconds=6.0, steps=max(1, steps // 2)),
    ]
    return found if quick else found + further


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="64,512")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="the settings without delay and with short completions")
    parser.add_argument("--asyncio", action="store_true", help="another event loop than the one of the conductor")
    parser.add_argument("--profile", default="", help="a file for the profile of the training; nothing is saved")
    parser.add_argument("--in-flight", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--dry", action="store_true", help="nothing is saved")
    parser.add_argument("--apart", action="store_true", help="conductor and machines have a core each")
    words = parser.parse_args()
    core = -1
    if words.apart:
        ours, core = sorted(os.sched_getaffinity(0))[:2]
        os.sched_setaffinity(0, {ours})
    table = Table(
        *(
            "engines",
            "joins/s",
            "heartbeats/s (of a core)",
            "trajectories/s",
            "per cpu second",
            "M tokens per cpu second",
            "of a core",
            "queued s",
        ),
        *("timer p99 ms", "announcement s", "KiB per engine", "kept"),
    )
    rows = []
    for setting in settings([int(count) for count in words.engines.split(",")], words.steps, words.quick):
        seconds = words.seconds or setting.seconds
        setting = dataclasses.replace(setting, in_flight=words.in_flight, seconds=seconds, core=core)
        run = asyncio.run if words.asyncio else event_loop.run
        with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as folder:
            found = run(measured(setting, Path(folder) / "run", words.profile))
        rows.append({"setting": asdict(setting), **found})
        table.add(*row(setting, found))
        table.show_last()
        print(found, flush=True)
    if not (words.dry or words.profile or words.asyncio):
        load = f"{os.getloadavg()[0]:.1f} processes wanted to run on the {os.cpu_count()} cores in the last minute"
        priority = Path("/proc/self/autogroup").read_text().split()[-1]
        save("conductor", {"goal": 5000, "load": load, "nice": int(priority), "apart": words.apart, "rows": rows})


if __name__ == "__main__":
    main()
