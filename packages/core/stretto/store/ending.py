"""State of a run (running, finished, stopped, failed), kept as a fact of its ledger.

    running   since a process of the run began; if no process holds the folder's lock, the run was killed
    finished  after the last step, or earlier, with the reason
    stopped   by a signal
    failed    with an error

Runs of earlier versions of stretto have no such fact; for these, `_ending_of_log` infers the state from the end of the
log.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from stretto.core.errors import UNREADABLE, StoreError
from stretto.core.records import Record
from stretto.store import lock
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import fact
from stretto.store.ledger.schema import once_at_rest, reading
from stretto.store.run_folder import ORIGIN, Branch, RunFolder
from stretto.store.series.lines import open_plain

#: Name of the fact in the ledger.
ENDING = "ending"
_LARGEST_LOG = 1 << 16  # bytes that are read from the end of the log
_LARGEST_ORIGIN = 1 << 20
_LONGEST_REASON = 600
_STARTED = re.compile(r"^[\d-]{10} [\d:]{8}  starts at version \d+$", re.MULTILINE)
_ENDED = re.compile(r"^[\d-]{10} [\d:]{8}  ends with exit code (\d+)$", re.MULTILINE)
_FAILED = re.compile(r"^[\d-]{10} [\d:]{8}  failed: (.*)", re.MULTILINE | re.DOTALL)


class Ending(Record, frozen=True):
    """State that the newest process of a run has recorded (see the module). `reason`: why it stopped, failed, or
    finished before the last step; "" if none is known."""

    how: Literal["running", "finished", "stopped", "failed"]
    reason: str = ""

    @classmethod
    def of_code(cls, code: int) -> Ending:
        """Return the ending of a process with this exit code: 0 is finished, 128 + n is stopped by signal n, any other
        is failed.

        >>> Ending.of_code(143).reason
        'stopped by SIGTERM'
        """
        if code == 0:
            return cls("finished")
        try:
            return cls("stopped", f"stopped by {signal.Signals(code - 128).name}")
        except ValueError:
            return cls("failed", f"ended with exit code {code}")

    @classmethod
    def of_error(cls, error: BaseException, told: str = "") -> Ending:
        """Return the ending of a process that raised `error`: failed, with its message, cut to 600 characters, or its
        type if there is none. `told`: message to record in place of the error's own; "": the error's own."""
        return cls("failed", cut(told or str(error)) or type(error).__name__)


def record_end(ledger: Ledger, code: int) -> None:
    """Record in the ledger, as the fact ``ENDING``, how a process with this exit code has ended; it waits for a flush.
    If the same `how` is on record already, it stays with its reason."""
    ending, known = Ending.of_code(code), ledger.get(ENDING, Ending)
    if known is None or known.how != ending.how:
        ledger.put(ENDING, ending)


class Condition(Record, frozen=True):
    """State of a run, as a reader of its folder sees it: ``running``, ``finished``, ``stopped`` (by a signal) or
    ``dead`` (failed or killed). `reason`: why it is not running, if known."""

    state: str
    reason: str = ""


def condition(path: str | Path) -> Condition:
    """Determine the state of the run in the folder `path` (`condition_of`). A folder without a run is ``dead``. Raises
    StoreError if its ledger or its log cannot be read."""
    folder = RunFolder(Path(path))
    return condition_of(folder.path, lambda: read_ending(folder.ledger), lambda: _end_of(folder.log))


def condition_of(folder: Path, ending: Callable[[], Ending | None], log: Callable[[], str]) -> Condition:
    """Determine the state of the run in `folder`: running if a process holds it; else as the ledger's ending says, or
    else the end of the log; "dead", with the reason, if it failed or its process has vanished. A branch of `stretto
    replay` that no process holds is finished.

    Args:
        ending: reads the ending from the ledger; None: there is none.
        log: reads the end of the log, as text; "" if there is none. Neither is called for a branch or a running run,
            and errors of both are raised unchanged.
    """
    if lock.is_held(folder):
        return Condition("running")
    if (folder / ORIGIN).is_file():
        return Condition("finished", str(branch_of(folder) or "a replay"))
    found, text = ending(), log()
    how = found if found is not None else _ending_of_log(text)
    if how.how != "running":
        return Condition("dead" if how.how == "failed" else how.how, how.reason)
    if lock.is_held(folder):  # it was resumed meanwhile
        return Condition("running")
    last = text.strip().rpartition("\n")[2]
    said = f"; the log ends with: {cut(last)}" if last else ""
    return Condition("dead", "its process is gone without a word" + said)


def branch_of(folder: Path) -> Branch | None:
    """Read the origin of the run in `folder` if it is a branch of `stretto replay`; None if it is none, or its origin
    cannot be read."""
    try:
        with open(open_plain(folder / ORIGIN), "rb") as file:
            return msgspec.json.decode(file.read(_LARGEST_ORIGIN), type=Branch)
    except (OSError, StoreError, *UNREADABLE):
        return None


def read_ending(ledger: Path) -> Ending | None:
    """Read the ending from the ledger at this path; None if there is no file, or an earlier version of stretto wrote
    it. Raises StoreError if it cannot be read."""
    if not ledger.exists():
        return None

    def read() -> Ending | None:
        with reading(ledger) as connection:
            return fact(connection, ENDING, Ending)

    return once_at_rest(ledger, read)


def cut(text: str) -> str:
    """Strip a text, and shorten it to 600 characters and an ellipsis if it is longer."""
    text = text.strip()
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}…"


def _ending_of_log(text: str) -> Ending:
    begins = [found.start() for found in _STARTED.finditer(text)]
    text = text[begins[-1] :] if begins else text
    if ended := _ENDED.findall(text):
        return Ending.of_code(int(ended[-1]))
    if failed := _FAILED.search(text):
        return Ending("failed", cut(failed[1]))
    return Ending("running")


def _end_of(log: Path) -> str:
    try:
        descriptor = open_plain(log)
    except FileNotFoundError:
        return ""
    with open(descriptor, "rb") as file:
        file.seek(max(0, os.fstat(descriptor).st_size - _LARGEST_LOG))
        return file.read(_LARGEST_LOG).decode("utf-8", errors="replace")
