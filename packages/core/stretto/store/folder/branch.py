"""The origin of a branch. A branch is a folder made by `stretto replay`: it has steps of a run that were trained
again."""

from __future__ import annotations

from stretto.core.records import Record

BRANCHES = "branches"  #: sub-folder of a run with the branches that were given no folder
ORIGIN = "branch.json"  #: name of the file in a branch's folder that holds its `Branch`

#: Sections that a replay may change: those that decide what a batch does to the weights.
CHANGEABLE = ("algorithm", "trainer")


class Branch(Record, frozen=True):
    """``branch.json``: the origin of a branch. `changes`: settings that differ from the run, each with both values."""

    run: str
    first_step: int  # trained after this step
    last_step: int
    changes: dict[str, str]

    def __str__(self) -> str:
        return f"a replay of {self.run} from step {self.first_step}"
