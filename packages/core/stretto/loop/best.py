"""Keep the policy with the best evaluation, and stop a run whose accuracy has reached its goal or no longer grows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence, Set
from pathlib import Path

import msgspec

from stretto.core.records import Record
from stretto.loop.records.evaluation import Evaluation
from stretto.store.folder.run_folder import RunFolder
from stretto.store.series.metrics import EvaluationLine

BEST, _CANDIDATE = "best", "candidate"
_RECORD = "best.json"


class Best(Record, frozen=True):
    """``best.json``: the best evaluation so far. The evaluation began at `step`. Training went on meanwhile, so
    versions `step` to `version` sampled its completions. `policy`: folder of the policy of `step`; None if it was not
    kept."""

    step: int
    version: int
    accuracy: float
    policy: str | None = None


class BestPolicy:
    """Tracks the accuracy on one set of questions and decides when training has been long enough.

    With `keeps`, ``policy/best`` holds the policy of the best evaluation. `enough` becomes true in two cases: the last
    `patience` evaluations were not better than the best by more than `least_gain` (patience 0: never); or `goal_holds`
    evaluations in a row reached the accuracy `goal` (0: never).
    """

    def __init__(
        self,
        folder: RunFolder,
        say: Callable[[str], None],
        *,
        keeps: bool,
        patience: int = 0,
        least_gain: float = 0.0,
        goal: float = 0.0,
        goal_holds: int = 1,
        earlier: Sequence[EvaluationLine] = (),
    ) -> None:
        """`say`: writes a log line. `earlier`: the recorded evaluations of a resumed run; a ``best.json`` of a later
        step is removed."""
        self.keeps = keeps
        self._folder, self._say, self._patience, self._least_gain = folder, say, patience, least_gain
        self._best: Best | None = None
        self._goal, self._goal_holds = goal, goal_holds
        self._since = 0  # evaluations that were not better
        self._reached = 0  # newest evaluations that reached the goal
        for line in earlier:
            self._follow(line.step, line.version, line.accuracy)
        self._forget_what_came_later({line.step for line in earlier})
        self._held: int | None = None
        self._drop(_CANDIDATE)

    @property
    def enough(self) -> bool:
        return bool(self.why)

    @property
    def why(self) -> str:
        """Why the run should end; empty while it should go on."""
        if self._goal and self._reached >= self._goal_holds:
            return f"accuracy {self._goal:g} reached in {self._reached} evaluations in a row (evaluation.goal)"
        if self._patience and self._since >= self._patience and self._best is not None:
            best = f"{self._best.accuracy:.4f} at step {self._best.step}"
            return f"{self._since} evaluations in a row were not better than {best} (evaluation.patience)"
        return ""

    def hold(self, step: int) -> None:
        """Keep a copy of the policy of `step` in ``policy/candidate`` while its evaluation runs: the policy's own
        folder may be removed meanwhile."""
        if self.keeps and (source := self._folder.policy(step)).is_dir():
            self._drop(_CANDIDATE)
            shutil.copytree(source, self._folder.policies / _CANDIDATE, copy_function=_linked)
            self._held = step

    def measured(self, step: int, evaluation: Evaluation) -> None:
        """Count the evaluation that began at `step`. If it is the best so far, write ``best.json`` and move the policy
        kept by `hold` to ``policy/best``; otherwise delete that copy. Log once when `enough` becomes true."""
        before = self.enough
        better = self._follow(step, evaluation.version, evaluation.accuracy)
        if self.enough and not before:  # said once
            self._say(f"stops early: {self.why}")
        if not better:
            self._drop(_CANDIDATE)
            return
        kept = self._held == step and self.keeps
        if kept:
            self._drop(BEST)
            (self._folder.policies / _CANDIDATE).rename(self._folder.policies / BEST)
        self._held = None
        found = Best(step, evaluation.version, evaluation.accuracy, f"policy/{BEST}" if kept else None)
        self._folder.write(_RECORD, msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")

    def _follow(self, step: int, version: int, accuracy: float) -> bool:
        """Count this evaluation; True if it is the best so far."""
        better = self._best is None or accuracy > self._best.accuracy + self._least_gain
        self._since = 0 if better else self._since + 1
        if self._reached < self._goal_holds:  # a goal that was reached stays reached
            self._reached = self._reached + 1 if accuracy >= self._goal else 0
        if better:
            self._best = Best(step, version, accuracy)
        return better

    def _forget_what_came_later(self, steps: Set[int]) -> None:
        """Remove ``best.json`` and ``policy/best`` if their step is not among `steps`: the resumed run repeats it."""
        record = self._folder.path / _RECORD
        if record.exists() and msgspec.json.decode(record.read_bytes(), type=Best).step not in steps:
            record.unlink()
            self._drop(BEST)

    def _drop(self, name: str) -> None:
        shutil.rmtree(self._folder.policies / name, ignore_errors=True)


def _linked(source: str, target: str) -> None:
    """Hard-link instead of copying: weight files never change once written."""
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(Path(source), target)
