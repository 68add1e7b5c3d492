"""Training of a trajectory's tokens, from the ledger and, where kept, the step's token file.

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
from stretto.store.folder.run_folder import RunFolder
from stretto.store.ledger.rows import BatchMember
from stretto.store.series.follower import open_plain
from stretto.store.series.tokens import SampledTokens, TokenOutcome, read_tokens, tokens_file
from stretto_report.watch.runs.table import TableRow

_STEP = "SELECT version, oldest_trainable, committed, batch FROM steps WHERE step = ?"
_LARGEST = 256 << 20


class TrainedIn(Record, frozen=True):
    """The step that trained a trajectory: its `version`; tokens older than `oldest` were context only."""

    step: int
    version: int
    oldest: int
    committed: float
    skipped: bool


class TrainingSums(Record, frozen=True):
    """Counts over the sampled tokens of a trajectory; a token may be both clipped and masked by the correction."""

    in_loss: int
    clipped_high: int  # the bound of the loss acts on a ratio above 1
    clipped_low: int
    corrected: int  # the correction has changed their weight
    masked_by_correction: int  # to 0
    masked: int  # too old


@dataclass(frozen=True)
class Training:
    """Per-token training record of one trajectory. `tokens` is None without a record; `fault` says why, if it was
    trained."""

    row: TableRow
    trained: TrainedIn | None
    tokens: SampledTokens | None = None  # [S]
    fault: str = ""

    @classmethod
    def of(cls, folder: Path, row: TableRow, trained: TrainedIn | None, segments: Sequence[Segment]) -> Training:
        """Read the record from the step's file, as far as possible."""
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
        """A column of the record, for `count` sampled tokens from `first` on; None for unknown values."""
        if self.tokens is None:
            return None
        column: list[float] = getattr(self.tokens, name)[first : first + count].tolist()
        return [number if math.isfinite(number) else None for number in column]

    def fates(self, segment: Segment, window: slice, first: int) -> list[str]:
        """Outcome of each token in a window of a segment; `first` is the index of its first token among the sampled
        ones."""
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
        """Counts over the whole trajectory. Summed over a step's trajectories, they equal the step's metrics."""
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
    """The step that trained a trajectory, from the ledger."""
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
    """Mean advantage over the loss tokens of each recorded trajectory, by id."""
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
    """Read a step's record from an untrusted run folder.

    Raises:
        FileNotFoundError: there is none.
        StoreError: it is damaged, no regular file, or too large.
    """
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
