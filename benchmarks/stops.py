"""Stops a run at random moments: does it end in time and leave nothing behind, and can it be resumed?

    python -m benchmarks.stops                  all fifty
    python -m benchmarks.stops --stops 11-20    some of them; results are added to earlier ones

The seed of a stop decides what it follows (the start of the process, its log, its engine, a training step, the last
evaluation), how much later it comes, and its signal. All stops of one command hit the same run: each resumes the run
that the previous stop has ended, and after the last one the run must train two more steps. In time means that the
command ends within 10 seconds of the signal.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from benchmarks.report import RESULTS, Table, save
from stretto.core.errors import RunFolderError
from stretto.store.run_folder import RunFolder
from stretto_report.audit.check import check_run
from tests.launch.running import MODULES, Command, Laboratory, said, shared_files, steps_done, wait_until

IN_TIME = 10.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: After what a stop comes, how often, and how many seconds later at most.
MOMENTS = {"process": (3, 2.0), "log": (4, 3.0), "engine": (3, 2.0), "step": (8, 0.6), "last evaluation": (2, 0.2)}
LAST = "measuring the held-out accuracy of the last version"


@dataclass(frozen=True)
class Stop:
    """Results of one stop."""

    number: int
    after: str
    signal: str
    seconds: float  # from the signal to the end
    code: int
    steps: int  # on record afterwards
    problems: tuple[str, ...]  # what was not as it should be

    @property
    def clean(self) -> bool:
        return not self.problems


def one_stop(laboratory: Laboratory, run_dir: Path, seed: str, number: int = 0) -> Stop:
    """Start or resume the run, stop it, and look for anything left behind."""
    chance = random.Random(seed)
    kinds = list(MOMENTS)
    (after,) = chance.choices(kinds, [MOMENTS[kind][0] for kind in kinds])
    later, by = chance.random() * MOMENTS[after][1], chance.choice(SIGNALS)
    before, known = steps_done(run_dir), said(run_dir)
    resume = ("--resume",) if (run_dir / "ledger.sqlite").exists() else ()
    steps = before + (2 if after == "last evaluation" else 100_000)
    with laboratory.train(run_dir, f"trainer.steps={steps}", "trainer.checkpoint_every=3", *resume) as command:
        _wait(command, run_dir, after, before + chance.randint(1, 3), len(known))
        time.sleep(later)
        began = time.monotonic()
        command.process.send_signal(by)
        ended = command.end(60)
        seconds = time.monotonic() - began
        problems = [] if ended.code in _allowed(by, after) else [f"exit code {ended.code}: {ended.err[-300:]}"]
        if seconds > IN_TIME:
            problems.append(f"{seconds:.1f} s")
        if "Traceback" in ended.err:
            problems.append(f"a traceback: {ended.err[-300:]}")
        problems += left_behind(command, run_dir)
    return Stop(number, after, by.name, round(seconds, 2), ended.code, steps_done(run_dir), tuple(problems))


def _wait(command: Command, run_dir: Path, after: str, step: int, known: int) -> None:
    """Return at the event that the stop follows. The first `known` characters of the log come from earlier commands."""
    match after:
        case "log":
            wait_until(lambda: len(said(run_dir)) > known, "its log", command)
        case "engine":
            wait_until(lambda: bool(command.processes(MODULES["engine"])), "an engine's process", command)
        case "step":
            wait_until(lambda: steps_done(run_dir) >= step, f"step {step}", command)
        case "last evaluation":
            wait_until(lambda: LAST in said(run_dir)[known:], LAST, command)


def _allowed(by: signal.Signals, after: str) -> Sequence[int]:
    """Allowed exit codes: 128 + the signal; at the very start also Python's own exit by the signal; at the very end
    also 0."""
    return (128 + by, *((-by,) if after in ("process", "log") else ()), *((0,) if after == "last evaluation" else ()))


def left_behind(command: Command, run_dir: Path) -> list[str]:
    """Things that an ended command should not have left: processes, files, a lock, contradictory records."""
    time.sleep(0.1)  # the kernel takes a moment to end what belongs to nobody
    problems = [f"process {pid} is left" for pid in command.processes()]
    problems += [f"{path} is left" for path in (*command.temporary.iterdir(), *shared_files(run_dir))]
    if (run_dir / "ledger.sqlite").exists():
        try:
            RunFolder.resume(run_dir).release()
        except RunFolderError as error:
            problems.append(str(error))
        if not (checked := check_run(run_dir)).kept:
            problems.append(str(checked))
    return problems


def stops(laboratory: Laboratory, numbers: Iterable[int], seed: int) -> list[Stop]:
    """Do these stops on one run, which must then train two more steps."""
    run_dir, found = laboratory.folder / "run", list[Stop]()
    for number in numbers:
        found.append(one_stop(laboratory, run_dir, f"{seed}/{number}", number))
        print(found[-1], flush=True)
    resume = ("--resume",) if (run_dir / "ledger.sqlite").exists() else ()
    laboratory.trained(run_dir, f"trainer.steps={steps_done(run_dir) + 2}", "trainer.checkpoint_every=3", *resume)
    return found


def earlier(seed: int) -> dict[int, Stop]:
    """Results of earlier commands."""
    path = RESULTS / "stops.json"
    if not path.exists():
        return {}
    results = msgspec.json.decode(path.read_bytes())["results"]
    found = (msgspec.convert(stop, Stop) for stop in results["stops"])
    return {stop.number: stop for stop in found} if results["seed"] == seed else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", default="1-50", help="numbers of the first and the last one")
    parser.add_argument("--seed", type=int, default=1)
    words = parser.parse_args()
    first, last = map(int, words.stops.split("-"))
    with tempfile.TemporaryDirectory(prefix="stretto-stops-") as root:
        new = stops(Laboratory(Path(root), Path(root) / "cache"), range(first, last + 1), words.seed)
    found = earlier(words.seed) | {stop.number: stop for stop in new}
    table = Table("after", "stops", "clean", "s to the end, median", "worst")
    for after in MOMENTS:
        if those := [stop for stop in found.values() if stop.after == after]:
            seconds = [stop.seconds for stop in those]
            clean = sum(stop.clean for stop in those)
            table.add(after, len(those), clean, f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}")
    table.show()
    load = f"{os.getloadavg()[0]:.1f} processes wanted to run on the {os.cpu_count()} cores in the last minute"
    results = {"seed": words.seed, "load": load, "stops": [asdict(found[number]) for number in sorted(found)]}
    save("stops", results)


if __name__ == "__main__":
    main()
