"""Cost of a command before it does any work: CPU seconds of all its processes.

    python -m benchmarks.commands --name before            a dozen commands, five times each: about two minutes
    python -m benchmarks.commands --name after --times 9

Each command ends by itself: it has a mistake in a path or in a key, or does little. CPU seconds (user and system, of
the command and the processes that it waited for) are reported, because wall seconds depend on other work of the
machine. They are medians, because other work evicts caches. A command with an unexpected exit code stops the benchmark.
Results of the same name are replaced; other results of this processor stay. Of `stretto train`, which begins a run, the
seconds until its first line are taken; it is killed then.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import Table, earlier, save
from benchmarks.watch import make_run

_RECIPE = str(Path(__file__).parents[1] / "recipes" / "arithmetic.toml")
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "--help": ("--help",),
    "train nosuch.toml": ("train", "nosuch.toml"),
    "train FOLDER": ("train", "."),
    "train, a wrong key": ("train", _RECIPE, "trainer.step=3"),
    "train, no such model": ("train", _RECIPE, 'model={path="nosuch"}'),
    "eval NOMODEL": ("eval", "nosuch", "--task", _RECIPE),
    "serve NOMODEL": ("serve", "nosuch"),
    "plan nosuch.toml": ("plan", "nosuch.toml", "--gpu", "h100"),
    "plan, a wrong key": ("plan", _RECIPE, "trainer.step=3", "--gpu", "h100"),
    "plan, too few GPUs": ("plan", _RECIPE, "--gpu", "h100", "--gpus", "1"),
    "study nosuch.toml": ("study", "nosuch.toml"),
    "inspect NORUN": ("inspect", "nosuch"),
    "inspect RUN": ("inspect", "run"),
}
RIGHT = frozenset({"--help", "inspect RUN"})  # all others are mistakes: exit code 2
_FIRST_LINE = "train, to its first line"
_DEADLINE_SECONDS = 120.0
_STRETTO = ("-m", "stretto_app.cli.main")


@contextmanager
def _killed_late(command: subprocess.Popen[bytes]) -> Iterator[None]:
    """Context manager: the command is killed if it has not ended, or written its line, within the deadline."""
    alarm = threading.Timer(_DEADLINE_SECONDS, os.kill, (command.pid, signal.SIGKILL))
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


def of_nothing(folder: Path) -> float:
    """CPU seconds of an empty interpreter."""
    return cpu_seconds((), folder, 0, ("-c", "pass"))


def cpu_seconds(words: Sequence[str], folder: Path, code: int, program: Sequence[str] = _STRETTO) -> float:
    """CPU seconds of a command and of the processes that it waited for.

    Raises:
        RuntimeError: it ended with another exit code than `code`.
    """
    command = subprocess.Popen(
        [sys.executable, *program, *words],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with _killed_late(command):
        _, status, usage = os.wait4(command.pid, 0)
    command.returncode = os.waitstatus_to_exitcode(status)
    if command.returncode != code:
        raise RuntimeError(f"stretto {' '.join(words)}: exit code {command.returncode} instead of {code}")
    return usage.ru_utime + usage.ru_stime


def seconds_to_first_line(words: Sequence[str], folder: Path) -> float:
    """CPU seconds of a command until it has written its first line, with those of the processes that it waited for. It
    is killed, with its children, before it does more.

    Raises:
        RuntimeError: it ended without a line.
    """
    command = subprocess.Popen(
        [sys.executable, *_STRETTO, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert command.stdout is not None
    with command.stdout, _killed_late(command):
        line = command.stdout.readline()
        os.killpg(command.pid, signal.SIGKILL)
        _, _, usage = os.wait4(command.pid, 0)
    command.returncode = -signal.SIGKILL
    if not line:
        raise RuntimeError(f"stretto {' '.join(words)}: ended before its first line")
    return usage.ru_utime + usage.ru_stime


def measured(times: int) -> dict[str, dict[str, float]]:
    """Run each command in turn, `times` times, after once to fill the caches; medians by command."""
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as root:
        folder = Path(root)
        make_run(folder / "run", 1000, 100, 1000)
        found: dict[str, list[float]] = {name: [] for name in [*COMMANDS, _FIRST_LINE]}
        for again in range(times + 1):
            costs = {name: cpu_seconds(words, folder, 0 if name in RIGHT else 2) for name, words in COMMANDS.items()}
            costs[_FIRST_LINE] = seconds_to_first_line(("train", _RECIPE), folder)
            for name, cpu in costs.items() if again else ():
                found[name].append(cpu)
    return {
        name: {"times": times, "cpu": round(statistics.median(costs), 3), "most": round(max(costs), 3)}
        for name, costs in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="now", help="under which the result is kept beside others")
    parser.add_argument("--times", type=int, default=5, help="that each command is run")
    words = parser.parse_args()
    before = earlier("commands")
    before.pop(words.name, None)  # the newest is the last
    results = {**before, words.name: {"load": round(os.getloadavg()[0], 1), "commands": measured(words.times)}}
    table = Table("measured", "command", "times", "CPU s, median", "most")
    for name, found in results.items():
        for command, row in found["commands"].items():
            table.add(name, command, row["times"], row["cpu"], row["most"])
    table.show()
    save("commands", results)


if __name__ == "__main__":
    main()
