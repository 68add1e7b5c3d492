"""Random faults: real runs whose processes are killed or stopped at random times. Is any law broken?

    python -m benchmarks.faults                           the campaign: 300 faults, and 5 undisturbed runs
    python -m benchmarks.faults --kills 5 --undisturbed 1 a short slice
    python -m benchmarks.faults --records FOLDER          continues after the runs that are recorded there
    python -m benchmarks.faults --per-run 40 --most 5 --save   5 runs with up to 40 faults each
    python -m benchmarks.faults --kills 50 --undisturbed 0 --first 60 --add FILE   a part of a longer campaign: runs 60
                                                          and on, which no other part has (`benchmarks.tally`)
    python -m benchmarks.faults --warm --recipe tests/launch/recipes/tiny.toml ...   a kill every few seconds: processes
                                                          are forked from one that has imported what they need

A kill hits the conductor, or all processes at once (the run is then resumed), the trainer, one of two engines, a reward
worker, the warm start, or the fork server, with which the kernel ends trainer and engines. A stop (SIGSTOP) hits
one of these except the conductor, and must be noticed within `deadlines.hung`. The reward fails for one answer in five,
at random. The run must go on by itself, unless its roles were starting: then it may end with an error that names the
role, and is resumed. Kills come at any time: while roles start, during the recovery from another kill, in the middle of
a step. A *hang* is a run without a further step for 100 seconds (`--hang`: more on a busy machine). Whenever the
conductor is gone, and at the end, the checker decides from the records. The runs are short runs of the arithmetic
recipe; undisturbed runs give the accuracy to expect. A process that was stopped before it could ask to end with its
parent is continued (SIGCONT) once the conductor is gone, and must end by itself.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import Table, save
from benchmarks.runs import RECIPE
from benchmarks.tally import add, measured
from stretto.core.machine import cache_folder
from stretto.rewards.functions import final_answer
from stretto_report.audit.check import check_run
from stretto_report.reading.inspection import inspect_run
from tests.launch.running import MODULES, Command, Laboratory, said, steps_done, wait_until

ROLES = ("trainer", "engine", "rewards", "fork server", "supervised")
FAULTS = ("conductor", *ROLES[:-1], "all", "supervised", *(f"{role} stopped" for role in ROLES))
KILLS = 8  # of one run, at most, unless told otherwise: it may come to its end before
SEEDS = 4  # of recipes: the runs share their warm starts, and differ by when they are killed
SETTINGS = (
    "trainer.steps=250",
    "trainer.checkpoint_every=30",
    "deadlines.trainer_restarts=100",
    "deadlines.engine_restarts=100",
    "deadlines.hung=5",
    "engine.count=2",
    "rewards.function=benchmarks.faults:flaky",
    "rewards.max_consecutive_undecided=100000",
)
_AFTER_START = 20.0  # seconds: the first kill of a conductor's life comes within them, often before it is up
_AFTER_KILL = 6.0
_WARM = 0.3  # of those seconds, for a command that need not import anything
_PATIENT = 0.6  # part of the lives in which the next kill waits until the run has recovered from the last one


@dataclass(frozen=True)
class Kill:
    """Result of one kill."""

    fault: str
    at_step: int
    starting: bool  # since its conductor was started, the run had not done a step
    seconds: float  # from the last kill before the next step to that step, or to the end of the wait for it
    survived: bool  # a further step was done, or the run came to its end
    ended: bool = False  # the run ended for it although its conductor was not hit, and was resumed


@dataclass(frozen=True)
class Record:
    """Record of one run from its start to its end."""

    number: int
    seed: int
    kills: tuple[Kill, ...]
    checks: int  # that the checker made
    broken: tuple[str, ...]  # laws that it found broken
    final_accuracy: float | None  # held-out; None: it did not come to its end
    seconds: float


@dataclass
class Blow:
    """A kill after which no step is on record yet."""

    fault: str
    at_step: int
    starting: bool
    since: float
    ended: bool = False

    def over(self, survived: bool) -> Kill:
        return Kill(
            self.fault, self.at_step, self.starting, round(time.monotonic() - self.since, 2), survived, self.ended
        )


class Disturbed:
    """One run, with its kills and checks."""

    def __init__(
        self,
        laboratory: Laboratory,
        run_dir: Path,
        settings: Sequence[str],
        chance: random.Random,
        recipe: Path,
        hang: float,
    ) -> None:
        self._laboratory, self._run_dir, self._recipe, self._hang = laboratory, run_dir, recipe, hang
        self._settings, self._chance = settings, chance
        self._open: list[Blow] = []
        self.kills: list[Kill] = []
        self.checks = 0
        self.broken: list[str] = []

    def play(self, kills: int) -> float | None:
        """Train to the end, killing on the way; return the held-out accuracy at the end, None if there is none."""
        over = False
        while not over:
            resume = ("--resume",) if (self._run_dir / "ledger.sqlite").exists() else ()
            with self._laboratory.train(self._run_dir, *self._settings, *resume, recipe=self._recipe) as command:
                over = self._disturb(command, kills)
                until_gone(command)
            self._check()
        return inspect_run(self._run_dir).final_accuracy

    def _disturb(self, command: Command, kills: int) -> bool:
        """Kill until the conductor is gone or the run is at its end; return True in the latter case."""
        began, start = steps_done(self._run_dir), time.monotonic()
        pace = _WARM if self._laboratory.warm else 1.0
        due, patient = start + self._chance.random() * pace * _AFTER_START, self._chance.random() < _PATIENT
        fault = self._chance.choice(FAULTS)
        while command.process.poll() is None:
            time.sleep(0.02)
            self._settle()
            if self._open and time.monotonic() - max(start, self._open[-1].since) > self._hang:
                print(f"a hang after the kill of {self._open[-1].fault}:\n{said(self._run_dir)[-3000:]}", flush=True)
                self.kills += [blow.over(survived=False) for blow in self._open]
                self._open = []
                command.kill_all()
                break
            if self._open and patient:
                due = time.monotonic() + self._chance.random() * pace * _AFTER_KILL
            if time.monotonic() < due or len(self.kills) + len(self._open) >= kills:
                continue
            if not hit(command, fault, self._chance):  # it has not been started yet, or is not needed
                fault = self._chance.choice(FAULTS)
                continue
            done = steps_done(self._run_dir)
            for blow in self._open:
                blow.since = time.monotonic()
            self._open.append(Blow(fault, done, done <= began, time.monotonic()))
            fault = self._chance.choice(FAULTS)
            due = time.monotonic() + self._chance.random() * pace * _AFTER_KILL
        return self._ended(command)

    def _ended(self, command: Command) -> bool:
        """Handle the end of the command, which finished, was killed, or reported an error; return whether the run is at
        its end."""
        ended = command.end(60)
        self._settle()
        if ended.code == 0:
            self._settle(at_the_end=True)
            return True
        if ended.code > 0:
            ended.says()
            print(f"resumed: {ended.err.strip()}", flush=True)
            for blow in self._open:
                blow.ended = True
        return False

    def _settle(self, at_the_end: bool = False) -> None:
        """Count those open kills as survived after which the run has done another step; all of them `at_the_end`."""
        if self._open:
            done = steps_done(self._run_dir)
            over = [blow for blow in self._open if at_the_end or done > blow.at_step]
            self.kills += [blow.over(survived=True) for blow in over]
            self._open = [blow for blow in self._open if blow not in over]

    def _check(self) -> None:
        if (self._run_dir / "ledger.sqlite").exists():
            self.checks += 1
            self.broken += [f"{law}: {found[0]}" for law, found in check_run(self._run_dir).breaches.items() if found]


def flaky(prompt: str, completion: str, answer: str) -> bool:
    """Same as `final_answer`, but raises for one answer in five, at random."""
    if random.random() < 0.2:
        raise TimeoutError("the judge does not answer")
    return final_answer(prompt, completion, answer)


def victims(command: Command, fault: str, chance: random.Random) -> list[int]:
    """Pids of the processes that a fault hits. If several play the role, one of them, chosen at random."""
    role = fault.removesuffix(" stopped")
    match role:
        case "conductor":
            return [command.process.pid]
        case "all":
            return command.processes()
        case _:
            found = command.processes(MODULES[role])
    return [chance.choice(found)] if found else []


def hit(command: Command, fault: str, chance: random.Random) -> bool:
    """Kill or stop the processes of a fault; return False if there are none."""
    pids = victims(command, fault, chance)
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, signal.SIGSTOP if fault.endswith("stopped") else signal.SIGKILL)
    return bool(pids)


def until_gone(command: Command) -> None:
    """Wait for the end of the roles whose conductor is gone. Stopped roles are continued, and must end too."""
    for pid in command.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not command.processes(), "the end of all roles")


def one_run(
    laboratory: Laboratory, number: int, kills: int, recipe: Path, settings: Sequence[str], hang: float
) -> Record:
    """Play run number `number`; return its record, which is saved in the laboratory's folder."""
    path = _path(laboratory.folder, number, kills)
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Record)
    run_dir = path.with_suffix("")
    shutil.rmtree(run_dir, ignore_errors=True)
    seed, began = 1 + number % SEEDS, time.monotonic()
    chance = random.Random(f"kills {number}")
    run = Disturbed(laboratory, run_dir, (*settings, f"seed={seed}"), chance, recipe, hang)
    accuracy = run.play(kills)
    seconds = round(time.monotonic() - began, 1)
    record = Record(number, seed, tuple(run.kills), run.checks, tuple(run.broken), accuracy, seconds)
    path.write_bytes(msgspec.json.encode(record))
    if accuracy is not None and not run.broken and all(kill.survived for kill in run.kills):
        shutil.rmtree(run_dir)  # others are kept to be looked at
    print(record, flush=True)
    return record


def _path(records: Path, number: int, kills: int) -> Path:
    return records / f"{'disturbed' if kills else 'undisturbed'}-{number:03d}.json"


COLUMNS = ("hit", "faults", "while starting", "survived", "by a resume", "s to the next step", "longest")


def rows(disturbed: Sequence[Record]) -> list[tuple[object, ...]]:
    """Rows of a table: the results of the kills of each role, and of all."""
    found = [_row(fault, [k for r in disturbed for k in r.kills if k.fault == fault]) for fault in FAULTS]
    return [row for row in found if row[1]] + [
        _row("together", [kill for record in disturbed for kill in record.kills])
    ]


def _row(name: str, kills: Sequence[Kill]) -> tuple[object, ...]:
    seconds = [kill.seconds for kill in kills] or [0.0]
    resumed = sum(kill.ended or kill.fault in ("conductor", "all") for kill in kills)
    counts = (len(kills), sum(kill.starting for kill in kills), sum(kill.survived for kill in kills), resumed)
    return name, *counts, f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"


def conclusion(disturbed: Sequence[Record], undisturbed: Sequence[Record]) -> str:
    """Two sentences about the results of the runs."""
    hangs = sum(not kill.survived for record in disturbed for kill in record.kills)
    broken = [found for record in disturbed for found in record.broken]
    return (
        f"{len(disturbed)} runs, {sum(record.checks for record in disturbed)} looks of the checker: {hangs} hangs, "
        f"{len(broken) or 'no'} broken laws{''.join(f'; {found}' for found in broken)}. Held-out accuracy at the end "
        f"{_spread(disturbed)}, undisturbed {_spread(undisturbed)}."
    )


def summary(results: dict[str, Any]) -> str:
    """Markdown of the committed result, as in docs/explanation/faults.md."""
    disturbed, undisturbed = (msgspec.convert(results[kind], list[Record]) for kind in ("disturbed", "undisturbed"))
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows(disturbed)]
    table = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    notes = "".join(f"\n- {note}" for note in results["notes"])
    return f"{table}\n\n{conclusion(disturbed, undisturbed)}\n{notes}"


def show(disturbed: Sequence[Record], undisturbed: Sequence[Record]) -> None:
    """Print the table and the conclusion."""
    table = Table(*COLUMNS)
    for row in rows(disturbed):
        table.add(*row)
    table.show()
    print(conclusion(disturbed, undisturbed))


def _spread(records: Iterable[Record]) -> str:
    found = [record.final_accuracy for record in records if record.final_accuracy is not None]
    deviation = statistics.stdev(found) if len(found) > 1 else 0.0
    return f"{statistics.mean(found):.3f} ± {deviation:.3f} ({len(found)} runs)" if found else "unknown"


def counted(records: Sequence[Record]) -> tuple[dict[str, int], list[str]]:
    """Counts of a part of a longer campaign, and its problems."""
    kills = [kill for record in records for kill in record.kills]
    resumed = sum(kill.ended or kill.fault in ("conductor", "all") for kill in kills)
    counts = {"runs": len(records), "faults": len(kills), "while starting": sum(kill.starting for kill in kills)}
    counts |= {"by a resume": resumed, "checks": sum(record.checks for record in records)}
    counts |= {fault: found for fault in FAULTS if (found := sum(kill.fault == fault for kill in kills))}
    problems = [f"run {record.number}: {law}" for record in records for law in record.broken]
    for record in records:
        lost = [kill for kill in record.kills if not kill.survived]
        problems += [f"run {record.number}: a hang after {kill.fault} at step {kill.at_step}" for kill in lost]
    return counts, problems


def campaign(
    laboratory: Laboratory,
    kills: int,
    per_run: int,
    undisturbed: int,
    most: int,
    recipe: Path,
    settings: Sequence[str],
    first: int,
    hang: float,
) -> tuple[list[Record], list[Record], bool]:
    """Play disturbed and undisturbed runs, at most `most` new ones; return both, and whether all that are wanted exist.
    Disturbed runs are numbered from `first`."""
    calm, hit = list[Record](), list[Record]()
    while (calm_wanted := len(calm) < undisturbed) or sum(len(record.kills) for record in hit) < kills:
        found, kind = (calm, 0) if calm_wanted else (hit, per_run)
        number = len(found) + (0 if calm_wanted else first)
        if not _path(laboratory.folder, number, kind).exists():
            if most == 0:
                return hit, calm, False
            most -= 1
        found.append(one_run(laboratory, number, kind, recipe, settings, hang))
    return hit, calm, True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="of all runs together")
    parser.add_argument("--per-run", type=int, default=KILLS, help="kills of one run, at most")
    parser.add_argument("--save", action="store_true", help="where --most ends the campaign, save that part of it")
    parser.add_argument("--undisturbed", type=int, default=5, help="runs without")
    parser.add_argument("--records", type=Path, help="folder of the runs' records (default: a temporary one)")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="which run it is; another has other settings, too")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a setting of the run")
    parser.add_argument("--most", type=int, default=10_000, help="new runs before it leaves off")
    parser.add_argument("--note", action="append", default=[], help="what a reader of the result has to know")
    parser.add_argument("--hang", type=float, default=100.0, help="seconds without a step")
    parser.add_argument("--first", type=int, default=0, help="number of the first disturbed run")
    parser.add_argument("--warm", action="store_true", help="fork all processes from one that has imported everything")
    parser.add_argument("--add", type=Path, metavar="FILE", help="the file of a campaign that runs in parts")
    arguments, began = parser.parse_args(), time.monotonic()
    settings = (*SETTINGS, *(["warm_start.threads=1"] if arguments.recipe == RECIPE else []), *arguments.set)
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as temporary:
        records = arguments.records or Path(temporary)
        records.mkdir(parents=True, exist_ok=True)
        disturbed, undisturbed, all_of_them = campaign(
            Laboratory(records, cache_folder(), warm=arguments.warm),
            arguments.kills,
            arguments.per_run,
            arguments.undisturbed,
            arguments.most,
            arguments.recipe.resolve(),
            settings,
            arguments.first,
            arguments.hang,
        )
    show(disturbed, undisturbed)
    if arguments.add:
        last = arguments.first + len(disturbed) - 1
        seen = {"recipe": arguments.recipe.name, "warm": arguments.warm}
        tally = add(arguments.add, "kills", measured(arguments.first, last, began, *counted(disturbed), seen))
        print(f"{tally.total['faults']:,} faults in all, {tally.problems or 'no'} problems")
    elif all_of_them or arguments.save:
        found = {
            "recipe": arguments.recipe.name,
            "settings": settings,
            "disturbed": disturbed,
            "undisturbed": undisturbed,
        }
        save("faults" if all_of_them else "faults-part", found | {"notes": arguments.note})


if __name__ == "__main__":
    main()
