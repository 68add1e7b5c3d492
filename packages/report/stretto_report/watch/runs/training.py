"""Training of each token of a trajectory, from the ledger and, where kept, the token file of the step.

Axes: S sampled token of the trajectory.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.core.errors import StoreError
from stretto.core.records import Record, Segment, State
from stretto.store.ledger.rows import BatchMember
from stretto.store.run_folder import RunFolder
from stretto.store.series.lines import open_plain
from stretto.store.series.tokens import SampledTokens, TokenOutcome, read_tokens, tokens_file
from stretto_report.watch.runs.table import TableRow

_STEP = "SELECT version, oldest_trainable, committed, batch FROM steps WHERE step = ?"
_LARGEST = 256 << 20


class TrainedIn(Record, frozen=True):
    """The training step that a trajectory was part of. `version`: of the policy before the step. `oldest`: tokens of
    older versions were context only. `committed`: Unix time at which the batch was recorded. `skipped`: the optimizer
    step of this trajectory was skipped."""

    step: int
    version: int
    oldest: int
    committed: float
    skipped: bool


class TrainingSums(Record, frozen=True):
    """Counts over the sampled tokens of a trajectory. `in_loss`: tokens in the loss; `clipped_high`, `clipped_low`:
    clipped by the loss, with a ratio above 1 or not; `corrected`, `masked_by_correction`: weight changed, or set to 0,
    by the correction; `masked`: too old. A token may be both clipped and masked by the correction."""

    in_loss: int
    clipped_high: int
    clipped_low: int
    corrected: int
    masked_by_correction: int
    masked: int


@dataclass(frozen=True)
class Training:
    """Training record of one trajectory, token by token. `trained`: the step that trained it; None: no step has.
    `tokens`: columns over its sampled tokens, [S]; None if there is no record. `fault`: why there is no record; "":
    there is one, or the trajectory was not trained."""

    row: TableRow
    trained: TrainedIn | None
    tokens: SampledTokens | None = None
    fault: str = ""

    @classmethod
    def of(cls, folder: Path, row: TableRow, trained: TrainedIn | None, segments: Sequence[Segment]) -> Training:
        """Read the record of trajectory `row` from the token file of the step that trained it. A missing or damaged
        file raises nothing; the reason is in `fault`.

        Args:
            folder: folder of the run.
            trained: the step that trained it; None: the trajectory was not trained, and no file is read.
            segments: all segments of the trajectory. A record that does not have one entry for each of their sampled
                tokens counts as missing.
        """
        if trained is None:
            return cls(row, trained)
        step = f"what became of each token in step {trained.step}"
        try:
            found = read_step(folder, trained.step, [row.id]).get(row.id)
        except FileNotFoundError:
            return cls(row, trained, fault=f"{step} is not on record; the recipe's logging.tokens says what is kept")
        except StoreError as error:
            return cls(row, trained, fault=f"{step} cannot be read: {error}")
        if found is None or len(found.outcome) != sum(segment.sampled_length for segment in segments):
            return cls(row, trained, fault=f"{step} is not on record of this trajectory")
        return cls(row, trained, found)

    def numbers(self, name: str, first: int, count: int) -> list[float | None] | None:
        """Return the column `name` of the record, for `count` sampled tokens from index `first` on, with None in place
        of unknown values; None if there is no record."""
        if self.tokens is None:
            return None
        column: list[float] = getattr(self.tokens, name)[first : first + count].tolist()
        return [number if math.isfinite(number) else None for number in column]

    def fates(self, segment: Segment, window: slice, first: int) -> list[str]:
        """Return the outcome of each token in `window`, a slice of the segment: context (given), pending (the
        trajectory is in flight or buffered), untrained, trained, skipped (with its optimizer step), masked (too old),
        masked_by_correction, clipped_high or clipped_low. Without a record, only the first six can be told. `first`:
        index of the window's first token among all sampled tokens of the trajectory."""
        count = len(range(segment.length)[window])
        if not segment.sampled:
            return ["context"] * count
        if self.trained is None:
            return ["pending" if self.row.state in (State.IN_FLIGHT, State.BUFFERED) else "untrained"] * count
        if self.tokens is None or self.trained.skipped:
            kept, oldest = "skipped" if self.trained.skipped else "trained", self.trained.oldest
            return [kept if version >= oldest else "masked" for version in segment.versions[window]]
        outcomes, ratios = self.tokens.outcome[first : first + count], self.tokens.ratio[first : first + count]
        return [_fate(outcome, ratio) for outcome, ratio in zip(outcomes.tolist(), ratios.tolist(), strict=True)]

    @property
    def sums(self) -> TrainingSums | None:
        """Counts over the whole trajectory; None without a record. Summed over a step's trajectories, they equal the
        step's metrics."""
        if self.tokens is None:
            return None
        outcome, high = self.tokens.outcome, self.tokens.ratio > 1
        clipped = _has(outcome, TokenOutcome.BOUNDED)
        return TrainingSums(
            in_loss=_count(_has(outcome, TokenOutcome.IN_LOSS)),
            clipped_high=_count(clipped & high),
            clipped_low=_count(clipped & ~high),
            corrected=_count(_has(outcome, TokenOutcome.CORRECTED)),
            masked_by_correction=_count(_has(outcome, TokenOutcome.WEIGHTLESS)),
            masked=_count(outcome == 0),
        )


def trained_in(connection: sqlite3.Connection, row: TableRow, skipped: Mapping[int, Sequence[str]]) -> TrainedIn | None:
    """Return the step that trained a trajectory, from the ledger; None if it was not trained, or the step is not on
    record. `skipped`: ids of the trajectories of skipped optimizer steps, by step."""
    if row.trained_step is None:
        return None
    found = connection.execute(_STEP, (row.trained_step,)).fetchone()
    if found is None:
        return None
    version, oldest, committed, batch = found
    placed = msgspec.json.decode(batch, type=list[BatchMember])
    own = next((one.oldest_trainable for one in placed if one.group == row.id.rpartition("/")[0]), None)
    oldest = oldest if own is None else own
    return TrainedIn(row.trained_step, version, oldest, committed, row.id in skipped.get(row.trained_step, ()))


def mean_advantages(folder: Path, rows: Sequence[TableRow]) -> dict[str, float]:
    """Return the mean advantage of each trajectory over its tokens in the loss, by id. Trajectories without a record or
    without such tokens are left out."""
    means = dict[str, float]()
    for step in {row.trained_step for row in rows if row.trained_step is not None}:
        try:
            found = read_step(folder, step, [row.id for row in rows if row.trained_step == step])
        except (FileNotFoundError, StoreError):  # the trajectory's own page says why
            continue
        for id, tokens in found.items():
            advantages = tokens.advantage[np.isfinite(tokens.advantage)]
            means |= {id: float(advantages.mean(dtype=np.float64))} if len(advantages) else {}
    return means


def read_step(folder: Path, step: int, ids: Sequence[str]) -> dict[str, SampledTokens]:
    """Read the records of the trajectories `ids` from a step's token file in an untrusted run folder, and return them
    by id. Ids that the file lacks are left out. Raises FileNotFoundError if the step has no token file, and StoreError
    if the file is damaged, no regular file, or too large."""
    tokens = RunFolder(folder).tokens
    if tokens.is_symlink():
        raise StoreError(f"{tokens.name}: is not read: it is a link")
    descriptor = open_plain(path := tokens_file(tokens, step))
    try:
        if os.fstat(descriptor).st_size > _LARGEST:
            raise StoreError(f"{path.name}: is not read: it is larger than {_LARGEST >> 20} MiB")
        return read_tokens(tokens, step, ids)
    finally:
        os.close(descriptor)


def _fate(outcome: int, ratio: float) -> str:
    if not outcome:
        return "masked"
    if outcome & TokenOutcome.WEIGHTLESS:
        return "masked_by_correction"
    if outcome & TokenOutcome.BOUNDED:
        return "clipped_high" if ratio > 1 else "clipped_low"
    return "trained"


def _has(outcome: NDArray[np.uint8], flag: TokenOutcome) -> NDArray[np.bool_]:
    return outcome & flag > 0


def _count(chosen: NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(chosen))
