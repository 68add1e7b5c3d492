"""`stretto check` and `stretto inspect --ledger`: check the laws of a run from its records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.core.errors import harmless
from stretto.core.states import FINAL, OPEN
from stretto.store import lock
from stretto.store.ledger.schema import check_resting_log
from stretto_report.audit.history import read_history
from stretto_report.audit.laws import LAWS
from stretto_report.audit.presence import noted_files

_SHOWN = 5


@dataclass(frozen=True)
class Findings:
    """Result of `check_run`. `breaches`: sentences by law, empty where it was kept. `balance`: number of trajectories
    by state, and of all, as ``issued``. `notes`: what could not be checked."""

    breaches: Mapping[str, tuple[str, ...]]
    balance: Mapping[str, int]
    notes: tuple[str, ...] = ()

    @property
    def kept(self) -> bool:
        return not any(self.breaches.values())


def check_run(folder: str | Path) -> Findings:
    """Check every law against the records of a running, finished or dead run. Breaches are returned, not raised.

    Raises:
        RunFolderError: there is no run, or no recipe beside its ledger.
        StoreError: the ledger, its write-ahead log or the recipe cannot be read at all.
    """
    check_resting_log(Path(folder) / "ledger.sqlite")
    history = read_history(Path(folder))
    breaches = {law.__name__.replace("_", " "): tuple(law(history)) for law in LAWS}
    states = Counter(trajectory.state for trajectory in history.trajectories)
    issued = sum(group.members for group in history.groups)
    published = [step.step for step in history.steps if step.published_version is not None]
    notes = (*history.notes, *noted_files(Path(folder), published, lock.is_held(Path(folder))))
    return Findings(breaches, {"issued": issued, **{state: states[state] for state in (*FINAL, *OPEN)}}, notes)


def print_findings(findings: Findings) -> int:
    """Print a line for each law, with its first five breaches, and the notes. Return the exit code: 1 if a law was
    broken, else 0."""
    for law, breaches in findings.breaches.items():
        print(f"{'BROKEN' if breaches else 'kept  '}  {law}" + (f" ({len(breaches)})" if breaches else ""))
        for breach in breaches[:_SHOWN]:
            print(f"        {harmless(breach)}")
    for note in findings.notes:
        print(f"note    {harmless(note)}")
    return 0 if findings.kept else 1


def print_balance(folder: str | Path) -> int:
    """Check the run, and print the number of trajectories in each state, then the findings. Return the exit code: 1 if
    a law was broken, else 0. Raises RunFolderError if there is no run or no recipe, and StoreError if its ledger or
    recipe cannot be read."""
    findings = check_run(folder)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title_justify="left")
    table.title = Text(harmless(str(folder)), style="table.title")
    table.add_column(style="dim", justify="right")
    table.add_column(justify="right")
    for state, count in findings.balance.items():
        table.add_row(state.replace("_", " "), f"{count:,}")
    total = sum(count for state, count in findings.balance.items() if state != "issued")
    table.add_row("sum of the states", f"{total:,}")
    Console().print(table)
    return print_findings(findings)
