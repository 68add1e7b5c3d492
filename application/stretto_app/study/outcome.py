"""Result of one run of a study, read from its run folder."""

from __future__ import annotations

from pathlib import Path

from stretto.core.records import Record
from stretto.store.ending import condition
from stretto.store.folder.run_folder import RunFolder
from stretto.store.inspection import inspect_run
from stretto.store.series.metrics import read_metrics
from stretto_app.study.statistics import Evaluated


class RunOutcome(Record, frozen=True):
    """Result of a finished run. `seconds`: from the first admitted prompt to the last update; rates are over this
    time."""

    seed: int
    digest: str
    accuracy: float  # held-out accuracy of the last version
    seconds: float
    trajectories: int  # trained trajectories
    trained_tokens: int
    generated_tokens: int
    recomputed_tokens: int
    wasted_tokens: int
    staleness_mean: float
    staleness_max: int
    evaluations: tuple[Evaluated, ...]

    @property
    def trained_per_second(self) -> float:
        """Trained tokens per second (effective throughput)."""
        return self.trained_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def generated_per_second(self) -> float:
        """Generated tokens per second."""
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0

    def seconds_to(self, accuracy: float) -> float | None:
        """Seconds until an evaluation first reached this held-out accuracy; None if none reached it."""
        return next((one.seconds for one in self.evaluations if one.accuracy >= accuracy), None)


def read_outcome(path: Path, steps: int, seed: int, digest: str) -> RunOutcome | None:
    """Read the outcome of the run in a folder; None if there is no run, it is not finished, or it had fewer than
    `steps` steps. `seed` and `digest` are copied into the outcome.

    Raises:
        StoreError: the run folder cannot be read.
    """
    if not (path / "ledger.sqlite").is_file() or condition(path).state != "finished":
        return None
    _, lines = read_metrics(RunFolder.open(path).metrics)
    seen = inspect_run(path)
    last = [line.accuracy for line in lines if line.version == steps]
    if seen.steps < steps or not last:
        return None
    return RunOutcome(
        seed=seed,
        digest=digest,
        accuracy=last[-1],
        seconds=seen.rl_seconds,
        trajectories=seen.trajectories.trained,
        trained_tokens=seen.tokens.trained,
        generated_tokens=seen.tokens.generated,
        recomputed_tokens=seen.tokens.recomputed,
        wasted_tokens=seen.tokens.wasted,
        staleness_mean=seen.staleness.mean,
        staleness_max=seen.staleness.max,
        evaluations=tuple(Evaluated(line.step, line.rl_seconds, line.accuracy) for line in lines),
    )
