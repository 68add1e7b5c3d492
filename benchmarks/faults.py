"""Random kills: real runs whose roles, or all of them at once, are killed at random times; does any law break?

    python -m benchmarks.faults --kills 200      the campaign
    python -m benchmarks.faults --kills 5        a short slice

Each run trains the tests' small recipe. A kill hits the conductor (the run is then resumed), the trainer, an engine or
a reward worker (the run has to go on by itself), or all of them. After every end the checker decides from the records.
The seconds to the next step are counted from the kill.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.report import Table, save
from stretto.dashboard.check import check_run
from tests.launch.running import Command, Laboratory, steps_done, wait_for_step, wait_until

FAULTS = ("conductor", "trainer", "engine", "rewards", "all")
STEPS = 40
SETTINGS = (f"trainer.steps={STEPS}", "trainer.checkpoint_every=7", "deadlines.trainer_restarts=50", "deadlines.hung=5")


def victims(command: Command, fault: str) -> list[int]:
    """The processes that a fault hits."""
    match fault:
        case "conductor":
            return [command.process.pid]
        case "rewards":
            return command.processes("stretto.rewards.worker")[:1]
        case "all":
            return command.processes()
    return command.processes(f"stretto.launch.{fault}_role")[:1]


def one_kill(laboratory: Laboratory, run_dir: Path, fault: str, chance: random.Random) -> tuple[float, bool]:
    """Train on until a random moment, kill, go on; seconds to the next step, and whether every law was kept."""
    resume = ("--resume",) if run_dir.exists() else ()
    with laboratory.train(run_dir, *SETTINGS, *resume) as command:
        before = steps_done(run_dir)
        wait_for_step(command, min(before + 1, STEPS - 3))
        time.sleep(chance.random() * 0.3)
        before, began = steps_done(run_dir), time.monotonic()
        for pid in victims(command, fault):
            os.kill(pid, signal.SIGKILL)
        if fault not in ("conductor", "all"):
            wait_until(lambda: steps_done(run_dir) > before or command.process.poll() is not None, "the next step")
            seconds = time.monotonic() - began
            command.kill_all()
            wait_until(lambda: not command.processes(), "the end of all roles")
            return seconds, check_run(run_dir).kept
        wait_until(lambda: not command.processes(), "the end of all roles")
    with laboratory.train(run_dir, *SETTINGS, "--resume") as command:
        wait_until(lambda: steps_done(run_dir) > before or command.process.poll() is not None, "the next step")
        seconds = time.monotonic() - began
        command.kill_all()
        wait_until(lambda: not command.processes(), "the end of all roles")
    return seconds, check_run(run_dir).kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    seconds: dict[str, list[float]] = defaultdict(list)
    broken: dict[str, int] = defaultdict(int)
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as root:
        laboratory, run = Laboratory(Path(root), Path(root) / "cache"), 0
        for number in range(arguments.kills):
            fault, run_dir = FAULTS[number % len(FAULTS)], Path(root) / f"run-{run}"
            taken, kept = one_kill(laboratory, run_dir, fault, chance)
            seconds[fault].append(taken)
            broken[fault] += not kept
            if steps_done(run_dir) >= STEPS - 10:
                run += 1
    table = Table("fault", "kills", "survived", "laws broken", "s to the next step", "worst")
    results = []
    for fault in FAULTS:
        if taken_by := seconds[fault]:
            median, worst = statistics.median(taken_by), max(taken_by)
            table.add(fault, len(taken_by), len(taken_by), broken[fault], f"{median:.1f}", f"{worst:.1f}")
            results.append({"fault": fault, "kills": len(taken_by), "laws_broken": broken[fault], "seconds": taken_by})
    table.show()
    save("faults", {"seed": arguments.seed, "kills": arguments.kills, "faults": results})


if __name__ == "__main__":
    main()
