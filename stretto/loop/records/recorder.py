"""What a run writes about itself: a line of metrics per step, the spans of all roles, the totals.

All of it is small and none of it is waited for: a run whose logs cannot be written goes on training.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from stretto.core.events import Span
from stretto.core.records import Batch, Outcome, Prompt, Record, Trajectory, Update
from stretto.loop.records.evaluation import Evaluation
from stretto.loop.records.reporter import Reporter
from stretto.loop.records.sampled import Sampled
from stretto.loop.records.slow_reward import SlowReward
from stretto.store.folder.run_folder import RunFolder
from stretto.store.inspection import TOTALS, Totals
from stretto.store.ledger.ledger import Ledger
from stretto.store.series.metrics import EvaluationLine, MetricsLog, StepMetrics
from stretto.store.series.spans import SpanLog


class EarlierTotals(Record, frozen=True):
    """What the run had come to at the checkpoint that it goes on from; all zero for a new run."""

    wall_seconds: float = 0.0
    rl_seconds: float = 0.0
    generated: int = 0
    recomputed: int = 0
    stopped: int = 0
    busy: Mapping[str, float] = {}
    initial_accuracy: float | None = None

    @classmethod
    def of(cls, totals: Totals) -> EarlierTotals:
        """What the totals say, all work counted, that of steps which are to be done again too."""
        return cls(**{name: getattr(totals, name) for name in cls.__struct_fields__})


@dataclass(frozen=True)
class Work:
    """What the roles have done since they were started: tokens sampled, recomputed, sampled for answers that were
    stopped or that have not ended; seconds of work by role."""

    generated: int = 0
    recomputed: int = 0
    stopped: int = 0
    unfinished: int = 0  # of requests that are open
    busy: Mapping[str, float] | None = None


class RunClock:
    """Seconds of the whole run and of its reinforcement part, those of its past included."""

    def __init__(self, past: EarlierTotals, began: float) -> None:
        """`began`: when this run was started, by `time.monotonic`."""
        self._past = past
        self._began = began
        self._rl_began: float | None = None
        self._rl_seconds = past.rl_seconds

    def rl_begins(self) -> None:
        self._rl_began = time.monotonic()

    def updated(self) -> None:
        """An update is done."""
        if self._rl_began is not None:
            self._rl_seconds = self._past.rl_seconds + time.monotonic() - self._rl_began

    @property
    def rl_seconds(self) -> float:
        """Until the last update."""
        return self._rl_seconds

    @property
    def wall_seconds(self) -> float:
        return self._past.wall_seconds + time.monotonic() - self._began


class Recorder:
    """Told by the conductor what happened; asks `work` how busy everybody was."""

    def __init__(
        self,
        folder: RunFolder,
        ledger: Ledger,
        stage: Reporter,
        work: Callable[[], Work],
        max_staleness: float,
        past: EarlierTotals,
        clock: RunClock,
        slow_reward: SlowReward | None = None,
        sample_seconds: float = 0.0,
    ) -> None:
        self.clock = clock
        self._shown = Sampled(folder, stage.say, sample_seconds)
        self.held_out = self._shown.held_out
        self._slow_reward = slow_reward
        self.initial_accuracy = past.initial_accuracy
        self.final_accuracy: float | None = None
        self._ledger, self._stage, self._work = ledger, stage, work
        self._metrics, self._spans = MetricsLog(folder.metrics), SpanLog(folder.spans)
        self._max_staleness, self._past = max_staleness, past
        self.latest = Totals(
            max_staleness=max_staleness,
            generated=past.generated,
            recomputed=past.recomputed,
            stopped=past.stopped,
            busy=past.busy,
            rl_seconds=past.rl_seconds,
            initial_accuracy=past.initial_accuracy,
        )
        self._before = Work()
        self._examined = self._not_trained_for = 0  # tokens of evaluations: now, and when the engines were looked at
        self._sampled: Counter[Outcome] = Counter()
        self._accuracy = 0.0
        self._queues: Mapping[str, float] = {}
        self._busy: Mapping[str, float] = {}
        self._busy_then: Mapping[str, float] = {}
        self._looked = time.monotonic()

    def rl_begins(self) -> None:
        """The first prompt is about to be admitted; what was done before (the first evaluation) does not count."""
        self._before = self._work()
        self._busy_then, self._looked = self._before.busy or {}, time.monotonic()
        self._examined = self._not_trained_for = 0
        self.clock.rl_begins()

    def rl_ends(self, unjudged: int = 0) -> None:
        """The roles were looked at for the last time: what they had done by now counts, up to the last update. So many
        tokens are of answers that had ended and were not judged.
        """
        self._not_trained_for = self._examined
        totals = self.totals()
        self.latest = msgspec.structs.replace(
            self.latest,
            generated=totals.generated,
            recomputed=totals.recomputed,
            stopped=totals.stopped,
            unfinished=self._work().unfinished + unjudged,
        )

    def answered(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> None:
        """A group was judged, whether or not it will be trained on."""
        self._shown.judged(prompt, trajectories)
        self._sampled.update(trajectory.verdict.outcome for trajectory in trajectories)

    def taken(self, batch: Batch, in_flight: int, buffered: int) -> None:
        """A batch went to the trainer; so many groups were left behind."""
        self._queues = {"in_flight": float(in_flight), "buffered": float(buffered)}

    def updated(self, batch: Batch, update: Update) -> None:
        """A step is done: its line of metrics, its row in the ledger, the totals."""
        self._ledger.record_update(update)
        self.clock.updated()
        self.latest = totals = self.totals()
        self._metrics.append(metrics := self._line(batch, update, totals))
        self._ledger.put(TOTALS, totals)
        self._stage.step(metrics)
        if update.skipped:
            found = f"NaN or infinite gradients over {len(update.skipped)} answers, {update.skipped[0]} among them"
            self._stage.say(f"step {update.step}: {found}; that update was not taken (metrics.jsonl has all of them)")

    def _line(self, batch: Batch, update: Update, totals: Totals) -> StepMetrics:
        trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
        lengths = [len(trajectory.token_ids) for trajectory in trajectories]
        ages = [
            batch.version - version
            for trajectory in trajectories
            for version in trajectory.versions
            if version >= batch.oldest_trainable
        ]
        decided = self._sampled[Outcome.RIGHT] + self._sampled[Outcome.WRONG]
        if decided:  # else two batches left the buffer one after the other: the last accuracy stands
            self._accuracy = self._sampled[Outcome.RIGHT] / decided
            self._sampled.clear()
        return StepMetrics(
            step=update.step,
            version=update.version,
            wall_seconds=totals.wall_seconds,
            rl_seconds=totals.rl_seconds,
            accuracy=self._accuracy,
            reward=sum(trajectory.reward for trajectory in trajectories) / len(trajectories),
            length_mean=sum(lengths) / len(lengths),
            length_max=max(lengths),
            staleness_mean=sum(ages) / max(1, len(ages)),
            staleness_max=max(ages, default=0),
            trained_tokens=update.trained_tokens,
            masked_tokens=update.masked_tokens,
            skipped=update.skipped,
            generated_tokens=totals.generated,
            trainer=update.metrics,
            queues=self._queues,
            busy=self._busy,
            slower_than_generation=self._slow_reward.found if self._slow_reward is not None else "",
        )

    def looked(self) -> None:
        """The engines' counters are fresh: how busy was everybody since they were fresh before?

        This happens once a second: the ledger writes what it holds back.
        """
        now, busy = time.monotonic(), self._work().busy or {}
        elapsed = now - self._looked
        self._busy = {
            # Work is counted a little later than it is done, so a second may have more or less than all of it.
            role: min(1.0, max(0.0, (seconds - self._busy_then.get(role, 0.0)) / elapsed))
            for role, seconds in busy.items()
        }
        self._looked, self._busy_then, self._not_trained_for = now, busy, self._examined
        if self._slow_reward is not None and (sentence := self._slow_reward.poll(now, busy)) is not None:
            self._stage.say(sentence)
        self._ledger.flush()

    def filtered(self, groups: int) -> None:
        """So many groups were filtered since the last batch: a run that may never come to a batch must say so."""
        self._stage.say(f"{groups} groups were filtered since the last batch (the filters of [rollout])")

    def examined(self, tokens: int) -> None:
        """An answer of an evaluation has ended; its tokens are not for training."""
        self._examined += tokens

    def evaluated(self, evaluation: Evaluation, step: int) -> None:
        """Held-out accuracy was measured; the first is the initial one, the last the final one."""
        if self.initial_accuracy is None:
            self.initial_accuracy = evaluation.accuracy
        if step > 0:
            self.final_accuracy = evaluation.accuracy
        line = EvaluationLine(
            step=step,
            version=evaluation.version,
            wall_seconds=self.clock.wall_seconds,
            rl_seconds=self.clock.rl_seconds,
            accuracy=evaluation.accuracy,
            prompts=evaluation.prompts,
            undecided=evaluation.undecided,
        )
        self._metrics.append(line)
        self._stage.evaluated(line)

    def spans(self, spans: Iterable[Span]) -> None:
        self._spans.append(spans)

    def totals(self) -> Totals:
        """Everything up to now; the reinforcement clock stands at the last update."""
        work, before, past = self._work(), self._before, self._past
        busy = {
            role: seconds - (before.busy or {}).get(role, 0.0) + past.busy.get(role, 0.0)
            for role, seconds in (work.busy or {}).items()
        }
        return Totals(
            max_staleness=self._max_staleness,
            generated=work.generated - before.generated + past.generated - self._not_trained_for,
            recomputed=work.recomputed - before.recomputed + past.recomputed,
            stopped=work.stopped - before.stopped + past.stopped,
            busy=busy,
            wall_seconds=self.clock.wall_seconds,
            rl_seconds=self.clock.rl_seconds,
            initial_accuracy=self.initial_accuracy,
            final_accuracy=self.final_accuracy,
        )

    def conclude(self) -> None:
        """Write the run's last totals: those of the last update, with the evaluations and the whole wall time."""
        totals = msgspec.structs.replace(
            self.latest,
            wall_seconds=self.clock.wall_seconds,
            initial_accuracy=self.initial_accuracy,
            final_accuracy=self.final_accuracy,
        )
        self._ledger.put(TOTALS, totals)
