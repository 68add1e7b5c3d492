"""Simulated schedules: whole runs on a virtual clock in which everything goes wrong. Is any law broken?

    python -m benchmarks.schedules 1 1000                these seeds
    python -m benchmarks.schedules 1 1000 --add FILE     and adds them to a campaign (`benchmarks.tally`)

A seed gives a schedule of `tests/faults/simulation.py`: delays, reorderings, duplicate completions, dying engines, and
kills of the conductor; after each kill the checker judges the records. A failed seed is a problem of its part; the
other seeds still run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.tally import Part, add, measured
from tests.faults.simulation import play

NAME = "schedules"


def played(first: int, last: int) -> Part:
    """Run the schedules of these seeds."""
    began, counts, problems = time.monotonic(), {"schedules": 0, "kills": 0, "steps": 0}, list[str]()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="st-", dir=memory if os.access(memory, os.W_OK) else None) as root:
        for seed in range(first, last + 1):
            folder = Path(root) / str(seed)
            folder.mkdir()
            try:
                world = play(seed, folder)
                counts["kills"] += world.kills
                counts["steps"] += world.schedule.steps
            except Exception as error:  # of whatever kind: a problem on record, and the other seeds go on
                problems.append(f"seed {seed}: {type(error).__name__}: {error}"[:300])
                print(problems[-1], flush=True)
            counts["schedules"] += 1
            shutil.rmtree(folder)
    return measured(first, last, began, counts, problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--add", type=Path, metavar="FILE", help="the file of the campaign")
    words = parser.parse_args()
    part = played(words.first, words.last)
    print(
        f"seeds {part.first} to {part.last}: {part.counts['schedules']:,.0f} schedules, "
        f"{part.counts['kills']:,.0f} kills of the conductor, {part.counts['steps']:,.0f} steps, "
        f"{len(part.problems) or 'no'} problems in {part.seconds:.0f} s"
    )
    if words.add:
        tally = add(words.add, NAME, part)
        print(f"{tally.total['schedules']:,} schedules in all, {tally.problems or 'no'} problems")


if __name__ == "__main__":
    main()
