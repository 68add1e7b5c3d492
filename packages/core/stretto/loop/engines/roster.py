"""The engines that a run has had: make, machine, when each joined and left. The roster is kept in the ledger."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stretto.store.totals import Membership

_RUN_ENDED = "the run ended, and was resumed"


class Roster:
    """The run's engines, one row per name; an engine that returns under the same name keeps its row.

    Example::

        roster = Roster()
        roster.serves("engine-0", "native", "node-3", 0)  # it serves version 0
        roster.left("engine-0", "was killed by SIGKILL")
        ledger.watch(ENGINES, roster.rows)

    Attributes:
        step: the newest finished step, recorded with each join and leave.
    """

    def __init__(self) -> None:
        self.step = 0
        self._rows: dict[str, Membership] = {}

    def rows(self) -> list[Membership]:
        """Rows ordered by the step of joining, then by name (engine-2 before engine-10)."""
        return sorted(self._rows.values(), key=lambda row: (row.joined_step, len(row.name), row.name))

    def restore(self, earlier: Sequence[Membership], step: int) -> None:
        """Take over the rows of an earlier process of the run, with its engines marked as left. `step`: the newest
        finished step. Engines that have joined this process already are marked as serving, at the step that their
        earlier row has, or at `step`."""
        self.step = step
        present, self._rows = self._rows, {row.name: row for row in earlier}
        for row in earlier:
            self.left(row.name, _RUN_ENDED)
        for row in present.values():
            self.serves(row.name, row.kind, row.host, row.version)

    def serves(self, name: str, kind: str, host: str, version: int) -> None:
        """Record that an engine serves `version`: it has joined, is back, or has loaded it. `kind`: make of the engine;
        `host`: name of its machine."""
        row = self._rows.get(name) or Membership(name, kind, host, version, self.step)
        self._rows[name] = msgspec.structs.replace(row, kind=kind, host=host, version=version, left_step=None)

    def left(self, name: str, reason: str) -> None:
        """Record that an engine is gone, for good or until it is replaced, and why. Ignored if its row says so already,
        and for a name without a row: the engine has never served."""
        if (row := self._rows.get(name)) is not None and row.left_step is None:
            self._rows[name] = msgspec.structs.replace(row, left_step=self.step, reason=reason)
