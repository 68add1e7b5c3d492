"""`stretto watch RUN --terminal`: the display of `stretto train` for any run, from its folder alone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from stretto.core.errors import Problem, RunFolderError, several
from stretto.store.inspection import CanaryProof
from stretto.store.run_folder import RunFolder, why_no_folder
from stretto.store.series.lines import LineFollower
from stretto.store.series.metrics import METRICS, EvaluationLine, MetricsLine, StepMetrics
from stretto_report.audit.alarms import AlarmWatch, last_step_of
from stretto_report.dashboard.terminal.progress import Display, open_display
from stretto_report.watch.runs.catalog import Catalog
from stretto_report.watch.runs.run import WatchedRun

_POLL_SECONDS = 0.5
_NAMED = 3  # most runs named in the message

Leaves = Callable[[float], bool]


def watch_in_terminal(folders: Sequence[Path], leaves: Leaves | None = None) -> None:
    """Show the run in the only folder of `folders` until it ends, or the user leaves by ``q``, Ctrl-C or SIGTERM; the
    run is not affected.

    Args:
        leaves: waits for the given seconds and returns whether to leave; None: it reads the keyboard.

    Raises:
        RunFolderError: there is not exactly one folder, or it is no run folder.
        StoreError: the metrics are no regular file.
    """
    run = _run_of(folders)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
            _follow(run, leaves or stack.enter_context(_keyboard(sys.stdin)))
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_of(folders: Sequence[Path]) -> WatchedRun:
    if len(folders) != 1:
        raise RunFolderError([Problem("--terminal", several(len(folders), "folder"), "shows one run: give its folder")])
    (folder,) = folders
    if found := why_no_folder(folder):
        raise RunFolderError([Problem(str(folder), found, "give a run folder")])
    runs = Catalog([folder]).all()
    for run in runs:
        if run.folder == folder.resolve():
            return run
    names = ", ".join(str(folder / run.name) for run in runs[:_NAMED])
    remedy = f"give one of those in it: {names}" if runs else "give a folder that `stretto train` created"
    raise RunFolderError([Problem(str(folder), "is no run folder", remedy)])


def _follow(run: WatchedRun, leaves: Leaves) -> None:
    follower = LineFollower(RunFolder(run.folder).metrics, METRICS)
    lines: list[MetricsLine] = []
    while True:  # again if the file was rewritten, because the run was resumed from an earlier step
        recipe, title = run.recipe(), f"stretto: {run.name}"
        alarms = AlarmWatch(run.folder, recipe)
        with open_display(
            last_step_of(recipe) or 0, alarms=alarms, title=title, proofs=lambda: _proofs(run)
        ) as display:
            again = _show_on(run, follower, display, lines, leaves)
        if again is None:
            break
        lines = again
    if follower.fault is not None:
        display.say(follower.fault)
    now = run.condition()
    display.say(f"{run.name}: {now.state}" + (f": {now.reason}" if now.reason else ""))


def _proofs(run: WatchedRun) -> Sequence[CanaryProof]:
    found = run.inspection()
    return () if found is None else found.canary_proofs


def _show_on(
    run: WatchedRun,
    follower: LineFollower[MetricsLine],
    display: Display,
    lines: list[MetricsLine],
    leaves: Leaves,
) -> list[MetricsLine] | None:
    """Show `lines` and all that `follower` reads after them. Return None when the run has ended or the user leaves. If
    the metrics file was rewritten, return its first lines, which are not shown yet."""
    while True:
        for line in lines:
            if isinstance(line, StepMetrics):
                display.step(line)
            elif type(line) is EvaluationLine:  # further sets are shown in the browser
                display.evaluated(line)
        runs = run.condition().state == "running"  # checked before reading, so that its last lines are read
        lines, again = follower.read_on()
        if again:
            return lines
        display.refresh()
        if not lines and not follower.more and (not runs or leaves(_POLL_SECONDS)):
            return None


@contextlib.contextmanager
def _keyboard(stream: TextIO) -> Iterator[Leaves]:
    """Context manager: yield a function that waits some seconds for a key, and returns whether it was ``q`` or the
    terminal has gone. If `stream` is no terminal, the function only waits, and returns False. The terminal's mode is
    restored at the end."""
    if not stream.isatty():
        yield lambda seconds: bool(select.select([], [], [], seconds)[0])
        return
    descriptor = stream.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def leaves(seconds: float) -> bool:
        if not select.select([descriptor], [], [], seconds)[0]:
            return False
        keys = os.read(descriptor, 64)
        return not keys or b"q" in keys.lower()  # no keys: the terminal has gone

    try:
        yield leaves
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
