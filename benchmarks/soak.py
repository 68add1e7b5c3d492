"""Two hours with a fault every minute: does the run go on, does it break no law, and does the memory of each role stay
constant?

    python -m benchmarks.soak --hours 2                    two hours, with checks after every ten minutes
    python -m benchmarks.soak --hours 1 --run-dir FOLDER   a part: the run can go on in its folder later

One run of recipes/arithmetic.toml goes on all the time. Every minute there is a fault. In turn, these are killed: its
conductor, a reward worker, its engine, its trainer, all processes at once; then one of them is stopped (SIGSTOP), and
the fork server is killed, with which the kernel also ends trainer and engine. If the conductor is gone, the run is
resumed. The next fault waits until two steps are on record after the last one. The learning rate is an eightieth of the
recipe's: every version differs from the one before, but completions do not become much longer or shorter.

A *problem* is a hang (no step within `--hang` seconds), a run that ends by itself, or a broken law. The checker checks
the whole run after every ten minutes (`--checked-after`), and once more at the end.

*Flat* is judged from samples: every two seconds the resident memory and the open descriptors of each process are read.
Because processes are replaced all the time, each process gives one number, the median of at least two samples taken
while the run did the 20th to the 100th step of the process's life. (Age is counted in steps because memory depends on
the work done, and its seconds depend on the load of the machine.) Samples between which the run did no step do not
count, since nothing is in flight then. A role is flat if its median in the last third of the minutes is within 2 % of
that in the first third. Processes that were forked from the fork server are listed apart from those that have an
interpreter of their own, as all have once it was killed. Growth of one process over hours is measured elsewhere
(`benchmarks.growth`); here it shows whether a new process needs more memory because the run has grown. Private memory,
which is shared neither with the fork server nor through a file, is on record too, but not judged.

Every ten minutes are a part, which is added to a file at once (`--add`); its faults are also added to the file of all
kills (`--kills`), as faults in turn (`benchmarks.tally`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.faults import FAULTS, Kill, Record, counted
from benchmarks.goodput import Going
from benchmarks.report import RESULTS, Table
from benchmarks.runs import RECIPE
from benchmarks.tally import Part, Tally, add, measured, read
from stretto.core.machine import cache_folder
from stretto_report.reading.inspection import inspect_run
from tests.launch.running import Laboratory, said

KILLS = ("conductor", "rewards", "engine", "trainer", "all")
STOPS = ("engine stopped", "trainer stopped", "rewards stopped", "fork server stopped")  # one of them in a round
LAST = "fork server"  # until the next resume there is no other one
SETTINGS = (
    "trainer.steps=1000000",
    "trainer.learning_rate=1e-6",
    "trainer.checkpoint_every=30",
    "warm_start.threads=1",
    "deadlines.hung=30",
    "deadlines.trainer_restarts=1000",
    "deadlines.engine_restarts=1000",
)
OLD = (20, 100)  # steps of the run since a process was begun: many come to them, and have by then what they need
FLAT = 0.02
_LOOKS = 2  # of a process, at least
_LIVES = 3  # of a role in a third, at least
_PART = 10  # minutes
_EVERY = 60.0  # seconds from fault to fault
_LOOK_SECONDS, _POLL_SECONDS = 2.0, 0.5
_TAIL = 1 << 17  # bytes at the end of metrics.jsonl, with a step among them
_FIRST_OF_ALL = 10_001  # number in the tally of kills of the soak's first minute: runs have those below


@dataclass(frozen=True)
class Life:
    """Medians of the samples of one process at an age of `OLD`. `minute` is that of the last sample."""

    role: str
    minute: int
    resident_mib: float
    private_mib: float
    descriptors: float


@dataclass
class _Looks:
    role: str
    since: int  # the run's newest step when it was seen first
    minute: int
    seen: list[tuple[float, float, float]] = field(default_factory=list)

    def life(self) -> Life | None:
        if len(self.seen) < _LOOKS:
            return None
        resident, private, descriptors = (statistics.median(kind) for kind in zip(*self.seen, strict=True))
        return Life(self.role, self.minute, round(resident, 2), round(private, 2), descriptors)


class Scales:
    """Samples the memory of processes repeatedly."""

    def __init__(self) -> None:
        self._looks: dict[tuple[int, str], _Looks] = {}
        self._over: list[Life] = []
        self._step = 0

    def look(self, roles: dict[int, str], step: int, minute: int) -> None:
        """Sample the current processes; `step` is the newest of the run."""
        for gone in [key for key in self._looks if roles.get(key[0]) != key[1]]:
            self._close(gone)
        for pid, role in roles.items():
            looks = self._looks.setdefault((pid, role), _Looks(_named(pid, role, roles), step, minute))
            if OLD[0] <= step - looks.since < OLD[1] and step > self._step:
                with suppress(OSError):  # it has ended meanwhile
                    looks.seen += _weigh(pid)
                    looks.minute = minute
        self._step = step

    def _close(self, key: tuple[int, str]) -> None:
        if (looks := self._looks.pop(key, None)) and (life := looks.life()):
            self._over.append(life)

    def take(self) -> list[Life]:
        """Processes that have ended since the last call."""
        over, self._over = self._over, []
        return over


def _named(pid: int, role: str, roles: dict[int, str]) -> str:
    """Name of a role, and whether its process was forked from the fork server."""
    with suppress(OSError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return f"{role}, forked" if roles.get(parent) == "fork server" else role
    return role


def _weigh(pid: int) -> list[tuple[float, float, float]]:
    """Resident and private MiB of a process, and its open descriptors; nothing if it is about to end."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    sizes = {line[0]: int(line[1]) / 1024 for line in lines}
    private = sizes.get("Private_Clean:", 0) + sizes.get("Private_Dirty:", 0)
    return [(sizes["Rss:"], private, len(os.listdir(f"/proc/{pid}/fd")))] if sizes else []


def newest_step(run_dir: Path) -> int:
    """Newest step on record, read from the end of a long file."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().split(b"\n")[1 if file.tell() > _TAIL else 0 : -1]
    except FileNotFoundError:
        return 0
    steps = [line for line in lines if b'"kind":"step"' in line]
    return int(json.loads(steps[-1])["step"]) if steps else 0


def in_turn(number: int) -> str:
    """Fault number `number`: each round has all of `KILLS`, one of `STOPS`, and `LAST`."""
    turn, place = divmod(number, len(KILLS) + 2)
    return (*KILLS, STOPS[turn % len(STOPS)], LAST)[place]


class Soak:
    """A run that is disturbed by faults and sampled."""

    def __init__(self, going: Going, laboratory: Laboratory, run_dir: Path, hang: float, turn: int) -> None:
        """`hang`: seconds without a step after a fault that count as a hang. `turn`: number of the first fault."""
        self._going, self._laboratory, self._run_dir, self._hang = going, laboratory, run_dir, hang
        self._turn = turn
        self._scales, self._next_look = Scales(), 0.0
        self._minute = 0
        self._kills, self._problems = list[Kill](), list[str]()

    def part(self, first: int, *, checked: bool) -> Part:
        """Do the minutes from `first` on, with a check at the end if `checked`."""
        began, self._kills, self._problems = time.monotonic(), [], []
        self._minute = first
        if newest_step(self._run_dir) == 0:
            self._until_step(0, "the start")
        before = inspect_run(self._run_dir)
        start = time.monotonic()
        while (passed := time.monotonic() - start) < _PART * 60:
            self._minute = first + int(passed // 60)
            due = time.monotonic() + _EVERY
            self._fault()
            self._watch(self._ended, max(0.0, due - time.monotonic()))
            self._go_on()
        broken = self.check() if checked else []
        found = inspect_run(self._run_dir)
        record = Record(first, 0, tuple(self._kills), int(checked), tuple(broken), None, 0.0)
        counts, problems = counted([record])
        counts["minutes"] = _PART
        counts["steps"] = found.steps - before.steps
        counts["tokens trained"] = found.tokens.trained - before.tokens.trained
        seen: dict[str, Any] = {"run": self._run_dir.name, "settings": SETTINGS, "steps": found.steps}
        seen["longest recovery"] = max((kill.seconds for kill in self._kills), default=0.0)
        seen["lives"] = [asdict(life) for life in self._scales.take()]
        return measured(first, first + _PART - 1, began, counts, [*problems, *self._problems], seen)

    def check(self) -> list[str]:
        """Laws that `stretto check` finds broken."""
        with self._laboratory.start("check", self._run_dir) as command:
            self._watch(lambda: command.process.poll() is not None, 3600)
            ended = command.end(1)
        if ended.code not in (0, 1):
            return [f"the checker ended with {ended.code}: {ended.err[-300:]}"]
        return [line for line in ended.out.splitlines() if line.startswith("BROKEN")]

    def _fault(self) -> None:
        """Do the next fault in turn that has a process to hit."""
        step, start = newest_step(self._run_dir), time.monotonic()
        while not self._going.hit(fault := in_turn(self._turn)):
            self._turn += 1
        self._turn += 1
        survived = self._until_step(step, fault)
        self._kills.append(Kill(fault, step, False, round(time.monotonic() - start, 2), survived))
        print(f"minute {self._minute}: {fault} at step {step}, {self._kills[-1].seconds} s", flush=True)

    def _until_step(self, step: int, fault: str) -> bool:
        """Wait for two steps after `step`, since one may be nearly done already. If none comes, the run is killed and
        started again."""
        if self._watch(lambda: newest_step(self._run_dir) > step + 1 or self._ended(), self._hang):
            self._go_on()
            return True
        print(f"a hang after {fault}:\n{said(self._run_dir)[-3000:]}", flush=True)
        self._going.start()
        return False

    def _ended(self) -> bool:
        return self._going.command.process.poll() is not None

    def _go_on(self) -> None:
        """Start the run again if it has ended by itself, which is a problem."""
        if self._ended():
            ended = self._going.command.end()
            self._problem(f"minute {self._minute}: the run ended with {ended.code}: {ended.err.strip()[-300:]}")
            self._going.start()

    def _problem(self, text: str) -> None:
        print(text, flush=True)
        self._problems.append(text)

    def _watch(self, over: Callable[[], bool], seconds: float) -> bool:
        """Sample until something is over; False if it is not over in time."""
        until = time.monotonic() + seconds
        while not over():
            if (now := time.monotonic()) >= until:
                return False
            if now >= self._next_look:
                self._scales.look(self._going.command.roles(), newest_step(self._run_dir), self._minute)
                self._next_look = now + _LOOK_SECONDS
            time.sleep(_POLL_SECONDS)
        return True


@dataclass(frozen=True)
class Flatness:
    """One quantity of one role in the first and in the last third of the minutes."""

    role: str
    what: str
    lives: int
    first: float
    last: float

    @property
    def growth(self) -> float:
        return self.last / self.first - 1

    @property
    def flat(self) -> bool:
        return abs(self.growth) <= FLAT


def flatness(lives: Sequence[Life]) -> list[Flatness]:
    """Compare the first and the last third of the minutes, by medians over processes, for each role with enough
    processes in both."""
    first, last = min(life.minute for life in lives), max(life.minute for life in lives)
    third, found = (last - first + 1) / 3, list[Flatness]()
    for role in sorted({life.role for life in lives}):
        own = [life for life in lives if life.role == role]
        early = [life for life in own if life.minute < first + third]
        late = [life for life in own if life.minute >= last + 1 - third]
        if min(len(early), len(late)) < _LIVES:
            continue
        for what, key in (("resident MiB", "resident_mib"), ("descriptors",) * 2):
            begin, end = (statistics.median(getattr(life, key) for life in some) for some in (early, late))
            found.append(Flatness(role, what, len(own), begin, end))
    return found


def lives_of(parts: Iterable[Part]) -> list[Life]:
    return [msgspec.convert(life, Life) for part in parts for life in part.seen["lives"]]


COLUMNS = ("role", "processes", "what", "first third", "last third", "change", "flat")


def rows(tally: Tally) -> list[tuple[object, ...]]:
    """Rows of the table that says what is flat and what is not."""
    return [
        (
            one.role,
            one.lives,
            one.what,
            f"{one.first:.1f}",
            f"{one.last:.1f}",
            f"{one.growth:+.1%}",
            "yes" if one.flat else "NO",
        )
        for one in flatness(lives_of(tally.parts))
    ]


def conclusion(tally: Tally) -> str:
    """Result of the minutes so far, in words."""
    total = tally.total
    faults = ", ".join(f"{total[fault]} {fault}" for fault in FAULTS if fault in total)
    longest = max((part.seen["longest recovery"] for part in tally.parts), default=0.0)
    return (
        f"{total['minutes']} minutes, {total['steps']:,} steps, {total['tokens trained']:,} trained tokens, "
        f"{total['faults']} faults ({faults}), {total['by a resume']} resumes, {total['checks']} looks of the checker: "
        f"{tally.problems or 'no'} problems. The longest that a step took after a fault: {longest:.0f} s."
    )


def summary(tally: Tally) -> str:
    """The table as Markdown and its conclusion, as docs/explanation/faults.md shows them."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows(tally)]
    table = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    return f"{table}\n\n{conclusion(tally)}"


def show(tally: Tally) -> None:
    """Print the same."""
    table = Table(*COLUMNS)
    for row in rows(tally):
        table.add(*row)
    table.show()
    for part in tally.parts:
        for problem in part.problems:
            print(f"problem: {problem}")
    print(conclusion(tally), flush=True)


def as_kills(part: Part, kills: Tally) -> Part:
    """The faults of a part of the soak, as the next part of the tally of all kills: a soak that is done again adds to
    those of the one before."""
    names = {*FAULTS, "faults", "while starting", "by a resume", "checks"}
    counts = {name: count for name, count in part.counts.items() if name in names}
    counts |= {"in turn": counts["faults"]}
    seen = {"of": f"the soak, minutes {part.first} to {part.last}: in turn, a minute apart", "recipe": RECIPE.name}
    first = max(kills.next, _FIRST_OF_ALL)
    return replace(part, first=first, last=first + part.last - part.first, counts=counts, seen=seen)


def _minutes(text: str) -> int:
    if not text.isdecimal() or not int(text) or int(text) % _PART:
        raise argparse.ArgumentTypeError(f"{text!r} is no multiple of ten minutes: give 10, 20, 30, …")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--run-dir", type=Path, help="folder of the run (default: a temporary one)")
    parser.add_argument("--hang", type=float, default=100.0, help="seconds without a step")
    parser.add_argument("--checked-after", type=_minutes, default=_PART, metavar="MINUTES", help="a multiple of ten")
    parser.add_argument("--add", type=Path, default=RESULTS / "soak.json", metavar="FILE", help="what is added to")
    parser.add_argument("--kills", type=Path, default=RESULTS / "kills.json", metavar="FILE", help="the tally of kills")
    parser.add_argument("--show", action="store_true", help="show what there is, and run nothing")
    words = parser.parse_args()
    broken = list[str]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no run is left behind
    if not words.show:
        with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as root:
            run_dir = (words.run_dir or Path(root) / "run").resolve()
            laboratory = Laboratory(Path(root), cache_folder())
            with Going(laboratory, run_dir, SETTINGS) as going:
                turn = read(words.add, "soak").total.get("faults", 0)
                soak = Soak(going, laboratory, run_dir, words.hang, turn)
                for _ in range(round(words.hours * 60 / _PART)):
                    first = read(words.add, "soak").next
                    part = soak.part(first, checked=(first + _PART - 1) % words.checked_after == 0)
                    add(words.kills, "kills", as_kills(part, read(words.kills, "kills")))
                    show(add(words.add, "soak", part))
            broken = soak.check()
    show(read(words.add, "soak"))
    if broken:
        sys.exit("the run that has been ended is broken:\n" + "\n".join(broken))


if __name__ == "__main__":
    main()
