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
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import Table, save
from stretto.dashboard.check import check_run
from tests.launch.running import Command, Laboratory, steps_done, wait_for_step, wait_until

FAULTS = ("conductor", "trainer", "engine", "rewards", "all")
STEPS = 40
SETTINGS = (f"trainer.steps={STEPS}", "trainer.checkpoint_every=7", "deadlines.trainer_restarts=50", "deadlines.hung=5")


@dataclass(frozen=True)
class Kill:
    """What came of one kill."""

    fault: str
    seconds: float  # from the kill to the next step, or to the end of the wait for it
    survived: bool  # a further step was done
    kept: bool  # the checker found every law kept


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


def one_kill(laboratory: Laboratory, run_dir: Path, fault: str, chance: random.Random) -> Kill:
    """Train on until a random moment, kill, go on; a run whose conductor was killed goes on by being resumed."""
    resume = ("--resume",) if run_dir.exists() else ()
    with laboratory.train(run_dir, *SETTINGS, *resume) as command:
        before = steps_done(run_dir)
        wait_for_step(command, min(before + 1, STEPS - 3))
        time.sleep(chance.random() * 0.3)
        before, began = steps_done(run_dir), time.monotonic()
        for pid in victims(command, fault):
            os.kill(pid, signal.SIGKILL)
        if fault not in ("conductor", "all"):
            return _judged(command, run_dir, fault, before, began)
        wait_until(lambda: not command.processes(), "the end of all roles")
    with laboratory.train(run_dir, *SETTINGS, "--resume") as command:
        return _judged(command, run_dir, fault, before, began)


def _judged(command: Command, run_dir: Path, fault: str, before: int, began: float) -> Kill:
    """Wait for the next step, end the run, and look at its records."""
    wait_until(lambda: steps_done(run_dir) > before or command.process.poll() is not None, "the next step")
    seconds, survived = time.monotonic() - began, steps_done(run_dir) > before
    command.kill_all()
    wait_until(lambda: not command.processes(), "the end of all roles")
    return Kill(fault, seconds, survived, check_run(run_dir).kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    kills: list[Kill] = []
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as root:
        laboratory, run = Laboratory(Path(root), Path(root) / "cache"), 0
        for number in range(arguments.kills):
            run_dir = Path(root) / f"run-{run}"
            kills.append(one_kill(laboratory, run_dir, FAULTS[number % len(FAULTS)], chance))
            if steps_done(run_dir) >= STEPS - 10:
                run += 1
    by_fault: dict[str, list[Kill]] = defaultdict(list)
    for kill in kills:
        by_fault[kill.fault].append(kill)
    table = Table("fault", "kills", "survived", "laws broken", "s to the next step", "worst")
    for fault, those in by_fault.items():
        seconds = [kill.seconds for kill in those]
        survived, broken = sum(kill.survived for kill in those), sum(not kill.kept for kill in those)
        table.add(fault, len(those), survived, broken, f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}")
    table.show()
    save("faults", {"seed": arguments.seed, "kills": [asdict(kill) for kill in kills]})


if __name__ == "__main__":
    main()
