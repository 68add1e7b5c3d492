"""Which engines a run has had: what each is, where it runs, when it came and went. The ledger keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import msgspec

from stretto.store.totals import Membership

_RUN_ENDED = "the run ended, and was resumed"


class EngineState(Enum):
    """Where an engine stands: DOWN ─► STARTING ─► UP ◄─► SUSPECTED, from each of them back to DOWN, and by LEAVING to
    its last DOWN."""

    DOWN = auto()  # it has no process, or that has ended
    STARTING = auto()  # it loads its model, and what was published meanwhile
    UP = auto()  # it gets requests
    SUSPECTED = auto()  # a request broke off: it gets no more until it replies, or is replaced
    LEAVING = auto()  # it gets no requests, and what it has is given up


class Roster:
    """The engines by name; one that comes back under its name goes on with its row.

    Example::

        roster = Roster()
        roster.serves("engine-0", "native", "node-3", 0)
        roster.left("engine-0", "was killed by SIGKILL")
        ledger.watch(ENGINES, roster.rows)

    Attributes:
        step: the newest step that is done; that of a join or a leave.
    """

    def __init__(self) -> None:
        self.step = 0
        self._rows: dict[str, Membership] = {}

    def rows(self) -> list[Membership]:
        """In the order of the steps at which they joined, and of their names (engine-2 before engine-10)."""
        return sorted(self._rows.values(), key=lambda row: (row.joined_step, len(row.name), row.name))

    def restore(self, earlier: Sequence[Membership], step: int) -> None:
        """Begin with the rows of an earlier process of the run, whose engines have ended with it; `step` is the newest
        that is done."""
        self.step = step
        present, self._rows = self._rows, {row.name: row for row in earlier}
        for row in earlier:
            self.left(row.name, _RUN_ENDED)
        for row in present.values():
            self.serves(row.name, row.kind, row.host, row.version)

    def serves(self, name: str, kind: str, host: str, version: int) -> None:
        """An engine has joined, is back, or has loaded a version."""
        row = self._rows.get(name) or Membership(name, kind, host, version, self.step)
        self._rows[name] = msgspec.structs.replace(row, kind=kind, host=host, version=version, left_step=None)

    def left(self, name: str, reason: str) -> None:
        """An engine is gone, for good or until it is replaced; one that never served is not on the roster."""
        if (row := self._rows.get(name)) is not None and row.left_step is None:
            self._rows[name] = msgspec.structs.replace(row, left_step=self.step, reason=reason)
