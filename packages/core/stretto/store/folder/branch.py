"""A branch of `stretto replay`: a folder with steps of a run that were trained again, and where it comes from."""

from __future__ import annotations

from stretto.core.records import Record

ORIGIN = "branch.json"  #: the file of a branch that has its `Branch`

#: Sections that a replay may change: those that decide what a batch does to the weights.
CHANGEABLE = ("algorithm", "trainer")


class Branch(Record, frozen=True):
    """``branch.json``: the origin of a branch. `changes` are the settings that differ, each with both values."""

    run: str
    first_step: int  # trained after this step
    last_step: int
    changes: dict[str, str]
