"""Writing the records of a run: a line of metrics per step, the time spans of all roles, the totals.

If metrics or spans cannot be written, training goes on without them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stretto.core.admission import loss_tokens
from stretto.core.errors import several
from stretto.core.events import Span
from stretto.core.records import Batch, Completion, Outcome, Prompt, StopReason, Trajectory, Update
from stretto.loop.records.alarms import SlowReward, WatchedSamples
from stretto.loop.records.evaluation import Evaluation, mean_rewards
from stretto.loop.records.reporter import Reporter
from stretto.loop.records.totals import (
    SPAN_AXIS,
    RunClock,
    Work,
    over_the_run,
    span_offset,
    with_activities,
    with_transfers,
)
from stretto.store.run_folder import RunFolder
from stretto.store.selection import SelectionWatch
from stretto.store.series.lines import SpanLog
from stretto.store.series.metrics import (
    WRITTEN,
    EvaluationLine,
    MetricsLog,
    SampledCompletion,
    SetEvaluationLine,
    StepMetrics,
    alike,
    read_evaluations,
)
from stretto.store.totals import BESIDE, JUDGED, TOTALS, WAITING, Carried, Judged, Totals, goodput, tokens_by_category

if TYPE_CHECKING:  # a loop without a ledger loads no SQLite
    from stretto.store.ledger.ledger import Ledger

Value = TypeVar("Value")

_WEIGH_SECONDS = 5.0  # seconds between memory readings; the roles may have hundreds of processes


class Recorder:
    """Turns the conductor's events into the run's records: ``metrics.jsonl``, ``spans.jsonl``, samples, and the totals
    in the ledger."""

    def __init__(
        self,
        folder: RunFolder,
        ledger: Ledger,
        reporter: Reporter,
        work: Callable[[], Work],
        max_staleness: float,
        earlier: Totals,
        clock: RunClock,
        medium: str = "shared_memory",
        slow_reward: SlowReward | None = None,
        sample_seconds: float = 0.0,
        selection: SelectionWatch | None = None,
        resident: Callable[[], Mapping[str, int]] = dict,
        canary: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Create the recorder of one process of the run. It reads the evaluations on record, and stores totals and
        verdict counts at each flush of the ledger from now on. Raises StoreError or OSError if those evaluations cannot
        be read.

        Args:
            work: returns the work of this process's roles since they started.
            max_staleness: staleness bound of the recipe, for the totals.
            earlier: totals of earlier processes of the run.
            clock: measures wall time and RL time; the recorder starts and advances its RL part.
            medium: how weights reach the engines: shared_memory, http or broadcast. If an earlier process of the run
                used another medium, its transfers are left out of the totals.
            slow_reward: detects a reward that is the bottleneck; None: not watched.
            sample_seconds: seconds between sampled completions in the log; 0: none.
            selection: measures selection bias; None: not measured.
            resident: returns the resident memory of each role in bytes, by name; called every 5 seconds.
            canary: returns the distance of each engine from the trainer, as a share of its tolerance, by name
                (`EnginePool.shares`).
        """
        self._canary = canary
        self.clock = clock
        self._selection = selection
        self._judged = judged = ledger.get(JUDGED, Judged) or Judged()
        right = bool(judged.right or judged.accuracy)
        self._samples = WatchedSamples(folder, reporter.say, sample_seconds, right)
        self._slow_reward = slow_reward
        #: Evaluations on record, by the name of their set ("": the main set).
        self.on_record = read_evaluations(folder.metrics)
        main = self.on_record.get("", [])
        self._main = list(main)
        self.initial_accuracy = self._initial(earlier.initial_accuracy)
        self.final_accuracy = next((line.known for line in reversed(main) if line.step), None)
        self._ledger, self._reporter, self._work = ledger, reporter, work
        self._metrics, self._spans = MetricsLog(folder.metrics), SpanLog(folder.spans)
        before = earlier.carried
        self._carried = before if before is not None and before.medium == medium else Carried(medium)
        self._earlier = self.latest = msgspec.structs.replace(earlier, max_staleness=max_staleness)
        self._before: Work | None = None  # when RL began; None: it has not
        self._conducting = False  # between `rl_begins` and `rl_ends`
        self._stopped: int | None = None  # tokens stopped before the end of the run
        self._left_over = 0  # tokens of whole turns that are in no trajectory
        self._activities: Mapping[str, Mapping[str, float]] = {}
        self._beside: Mapping[str, Mapping[str, float]] = {}
        # Tokens of evaluations by engine: now, and at the last poll.
        self._evaluation_tokens, self._not_trained_for = Counter[str](), Counter[str]()
        ledger.watch(TOTALS, self._on_record)  # a run may die before its next step
        ledger.watch(JUDGED, lambda: self._judged)
        metrics, held_out = folder.metrics.name, folder.held_out.name
        ledger.watch(WRITTEN, lambda: {metrics: self._metrics.extent, held_out: self._samples.extent})
        monotonic, unix = time.monotonic(), ledger.unix_time
        axis = ledger.get(SPAN_AXIS, tuple[float, float])
        self._span_offset = span_offset(axis, monotonic, unix)
        self._span_axis = axis or (unix - monotonic, 0.0)
        ledger.watch(SPAN_AXIS, lambda: self._span_axis)
        self._rewards: Mapping[str, float] = {}
        self._queues: Mapping[str, float] = {}
        self._in_force: float | None = None
        self._busy: Mapping[str, float] = {}
        self._busy_before: Mapping[str, float] = {}
        self._polled = time.monotonic()
        self._resident, self._memory = resident, dict[str, float]()
        self._weighed = -math.inf

    def rl_begins(self) -> None:
        """Start the RL clock, just before the first prompt is admitted. Work of the roles before this call, such as the
        first evaluation, is not counted in the totals."""
        self._before = work = self._work()
        self._busy_before, self._polled = work.busy, time.monotonic()
        self._evaluation_tokens, self._not_trained_for = Counter(), Counter()
        self._activities, self._beside = self.latest.activities, self.latest.beside
        self.clock.rl_begins()
        self._conducting = True

    def gives_up(self) -> None:
        """Keep the number of stopped tokens as it is now, before the end of the run aborts the completions in flight:
        `rl_ends` then counts the tokens of these as unfinished, not as stopped."""
        self._stopped = self.totals().stopped

    def rl_ends(self) -> None:
        """Take the final counters of the engines into the totals, with the tokens still in flight as `unfinished`; to
        be called after the last poll. The RL clock stays at the last update."""
        self._not_trained_for, on_record = self._evaluation_tokens.copy(), self._ledger.on_record
        totals = self._on_record()
        self._conducting = False
        # What else has been generated is in flight, also a completion whose last tokens a slow engine sent too late.
        unfinished = tokens_by_category(totals, on_record)[WAITING] - on_record.buffered
        self.latest = msgspec.structs.replace(totals, unfinished=unfinished)

    def judged(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> None:
        """Record a judged group, whether it will be trained on or not: log samples and alarms (`WatchedSamples`), and
        count its verdicts for the next step's accuracy. The ledger is flushed if much is buffered
        (`Ledger.relieve`)."""
        undecided = self._samples.judged(prompt, trajectories)
        found, before = Counter(trajectory.verdict.outcome for trajectory in trajectories), self._judged
        right, wrong = before.right + found[Outcome.RIGHT], before.wrong + found[Outcome.WRONG]
        self._judged = Judged(right, wrong, before.accuracy, before.undecided + undecided)
        self._ledger.relieve()

    def left_over(self, tokens: int) -> None:
        """Count `tokens`, sampled for turns that are in no trajectory, as stopped: their group was given up, or a
        program that started again made other requests."""
        self._left_over += tokens

    def taken(self, queues: Mapping[str, float], max_staleness: float | None = None) -> None:
        """Set values of the next line of metrics after a batch is taken. `queues`: sizes of the controller's queues by
        name; `max_staleness`: the bound for groups admitted from now on (None: unknown)."""
        self._queues = queues
        self._in_force = max_staleness

    def in_force(self, max_staleness: float) -> None:
        """Set the staleness bound for the next line of metrics, for a batch that an earlier process of the run took.
        `taken` sets it for the others."""
        self._in_force = max_staleness

    def updated(self, batch: Batch, update: Update) -> None:
        """Record a finished step: append a line of metrics, put the update into the ledger, advance the
        RL clock, and show the step. An update that skipped completions (NaN or infinite gradients) is logged."""
        self.clock.updated()
        self._rewards = mean_rewards(one.verdict.rewards for group in batch.groups for one in group.trajectories)
        self.latest = totals = self.totals()
        self._metrics.append(metrics := self._line(batch, update, totals))
        # After the line: a step whose update is on record is not repeated, and would never get its line.
        self._ledger.record_update(update)
        self._reporter.step(metrics)
        if update.skipped:
            over = f"{several(len(update.skipped), 'completion')}, {update.skipped[0]} among them"
            found = f"NaN or infinite gradients over {over}"
            self._reporter.say(f"step {update.step}: {found}; the update was skipped (metrics.jsonl lists them)")

    def _line(self, batch: Batch, update: Update, totals: Totals) -> StepMetrics:
        trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
        lengths = [trajectory.sampled_length for trajectory in trajectories]
        ages = loss_tokens(batch)
        judged = self._judged
        decided = judged.right + judged.wrong
        # Without a decided completion between two batches, the last accuracy is repeated.
        self._judged = Judged(accuracy=judged.right / decided if decided else judged.accuracy)
        return StepMetrics(
            step=update.step,
            version=update.version,
            wall_seconds=totals.wall_seconds,
            rl_seconds=totals.rl_seconds,
            accuracy=self._judged.accuracy,
            reward=sum(trajectory.reward for trajectory in trajectories) / len(trajectories),
            length_mean=sum(lengths) / len(lengths),
            length_max=max(lengths),
            staleness_mean=sum(age * count for age, count in ages.items()) / max(1, ages.total()),
            staleness_max=max(ages, default=0),
            trained_tokens=update.trained_tokens,
            masked_tokens=update.masked_tokens,
            skipped=update.skipped,
            generated_tokens=max(totals.generated, self._ledger.on_record.tokens),  # engines are polled now and then
            trainer=update.metrics,
            queues=self._queues,
            max_staleness=self._in_force,
            busy=self._busy,
            memory=self._memory,
            canary=self._canary(),
            slower_than_generation=self._slow_reward.found if self._slow_reward is not None else "",
            rewards=self._rewards,
            goodput=goodput(totals, self._ledger.on_record).budget,
            truncated=sum(one.stop_reason is StopReason.LENGTH for one in trajectories) / len(trajectories),
            selection_bias=self._selection.known.newest if self._selection is not None else {},
            undecided=judged.undecided / (decided + judged.undecided) if decided + judged.undecided else None,
            undecided_reason=self._samples.usual_reason(),
        )

    def polled(self) -> None:
        """Take the busy share of each role since the last poll, and every 5 seconds its memory, for the next line of
        metrics; warn of a slow reward; flush the ledger, then let the reporter look for alarms. To be called after each
        poll of the roles."""
        now, work = time.monotonic(), self._work()
        self.clock.read_cores()
        busy = {role: seconds for role, seconds in work.busy.items() if role not in work.left}
        elapsed = now - self._polled
        self._busy = {
            # Work is counted a little after it is done, so a share may come out above 1.
            role: min(1.0, max(0.0, (seconds - self._busy_before.get(role, 0.0)) / elapsed))
            for role, seconds in busy.items()
        }
        self._polled, self._busy_before, self._not_trained_for = now, busy, self._evaluation_tokens.copy()
        if now - self._weighed >= _WEIGH_SECONDS:
            self._weighed = now
            self._memory = {role: size / 2**20 for role, size in self._resident().items()}
        if self._slow_reward is not None and (sentence := self._slow_reward.poll(now, busy)) is not None:
            self._reporter.say(sentence)
        self._ledger.flush()
        self._reporter.refresh()

    def filtered(self, sentence: str) -> None:
        """Log the sentence of `Controller.without_a_batch`, if there is one."""
        if sentence:
            self._ledger.flush()  # the alarm about it reads the ledger
            self._reporter.say(sentence)

    def evaluation_sampled(self, completion: Completion) -> None:
        """Count the tokens of a finished completion of an evaluation. The totals have them as `evaluated`, not as
        `generated`."""
        for engine, tokens in completion.segment.writers:
            self._evaluation_tokens[engine] += tokens

    def held_out(self, samples: Sequence[SampledCompletion]) -> None:
        """Append the samples of a finished evaluation to ``held_out.jsonl``; its line of metrics follows (`evaluated`).
        Flushes the ledger: after a kill, a resume drops the line if it does not find the update of that version."""
        self._ledger.flush()
        self._samples.held_out(samples)

    def evaluated(self, evaluation: Evaluation, step: int, name: str = "", asked: str = "") -> None:
        """Append a held-out accuracy, whose evaluation began at `step`, to the metrics, and show it. `name`: name of
        the set of questions; "" for the main set, whose accuracy at step 0 is the run's initial one, and whose last
        after step 0 is its final one; both go into the totals in the ledger. `asked`: digest of the questions
        (`asked_of`). If it differs from that of step 0, the initial accuracy cannot be compared, and becomes None."""
        line = self._evaluation_line(evaluation, step, asked)
        if name:
            self._metrics.append(SetEvaluationLine(**msgspec.structs.asdict(line), name=name))
            self._reporter.say(f"{name} at step {step}, version {evaluation.version}: {evaluation}")
            return
        self._main.append(line)
        self.initial_accuracy = self._initial(self.initial_accuracy)
        if step > 0:
            self.final_accuracy = line.known
        self._metrics.append(line)
        self._ledger.put(TOTALS, self._on_record())
        self._reporter.evaluated(line)

    def _initial(self, without: float | None) -> float | None:
        """The accuracy of version 0 on record; `without` if it was not evaluated, None if none of its completions has a
        verdict, or the last evaluation asked other questions."""
        first = next((line for line in self._main if not line.step), None)
        return without if first is None else first.known if first in alike(self._main) else None

    def _evaluation_line(self, evaluation: Evaluation, step: int, asked: str) -> EvaluationLine:
        return EvaluationLine(
            step=step,
            version=evaluation.version,
            wall_seconds=self.clock.wall_seconds,
            rl_seconds=self.clock.rl_seconds,
            accuracy=evaluation.accuracy,
            prompts=evaluation.prompts,
            undecided=evaluation.undecided,
            samples=evaluation.samples,
            truncated=evaluation.truncated,
            length_mean=evaluation.length_mean,
            pass_at=evaluation.pass_at,
            maj=evaluation.maj,
            ci95=evaluation.ci95,
            rewards=evaluation.rewards,
            asked=asked,
        )

    def say(self, sentence: str) -> None:
        """Log a sentence and show it to the user."""
        self._reporter.say(sentence)

    def spans(self, spans: Sequence[Span]) -> None:
        """Append time spans of this process's roles to ``spans.jsonl``, shifted to the time axis of the run, and count
        their work and weight transfers in the totals."""
        placed = [span.shifted(self._span_offset) for span in spans]
        zero, last = self._span_axis
        self._span_axis = zero, max([last, *(span.end for span in placed)])
        self._spans.append(placed)
        self._carried = with_transfers(self._carried, spans)
        self._activities = with_activities(self._activities, spans)
        beside = [msgspec.structs.replace(one, name=BESIDE[one.name]) for one in spans if one.name in BESIDE]
        self._beside = with_activities(self._beside, beside)

    def totals(self) -> Totals:
        """Compute the totals up to now, earlier processes of the run included. Their RL seconds end at the last update.
        Of this process, no work before `rl_begins` counts. Tokens of evaluations count as `evaluated`, not
        `generated`."""
        earlier = msgspec.structs.replace(
            self._earlier,
            carried=self._carried,
            wall_seconds=self.clock.wall_seconds,
            rl_seconds=self.clock.rl_seconds,
            initial_accuracy=self.initial_accuracy,
            final_accuracy=self.final_accuracy,
            rewards=self._rewards,
            starting_seconds=self.clock.starting_seconds,
            cores=self.clock.cores,
        )
        if (before := self._before) is None:  # a resume records steps that an earlier process has trained
            return earlier
        work = self._work()
        sampled = over_the_run(work.generated_by, before.generated_by, earlier.generated_by)
        return msgspec.structs.replace(
            earlier,
            generated=work.generated - before.generated + earlier.generated - self._not_trained_for.total(),
            recomputed=work.recomputed - before.recomputed + earlier.recomputed,
            stopped=work.stopped - before.stopped + earlier.stopped + self._left_over,
            busy=over_the_run(work.busy, before.busy, earlier.busy),
            generated_by={name: tokens - self._not_trained_for[name] for name, tokens in sampled.items()},
            evaluated=self._not_trained_for.total() + earlier.evaluated,
            activities=self._activities,
            beside=self._beside,
        )

    def _on_record(self) -> Totals:
        """The totals of the last update, or of `rl_ends` if it was called, with the initial and final accuracy and the
        whole wall time; while the conductor runs, with all tokens up to now."""
        latest = msgspec.structs.replace(
            self.latest,
            wall_seconds=self.clock.wall_seconds,
            initial_accuracy=self.initial_accuracy,
            final_accuracy=self.final_accuracy,
            cores=self.clock.cores,
        )
        if not self._conducting:
            return latest
        now = self.totals()
        return msgspec.structs.replace(
            latest,
            generated=max(now.generated, self._ledger.on_record.tokens),
            recomputed=now.recomputed,
            stopped=now.stopped if self._stopped is None else self._stopped,
            generated_by=now.generated_by,
            carried=now.carried,
            evaluated=now.evaluated,
            starting_seconds=now.starting_seconds,
        )

    def conclude(self) -> None:
        """Put the final totals into the ledger: those of the last update, or of `rl_ends` if it was called, with the
        initial and final accuracy and the whole wall time."""
        self.clock.read_cores(0.0)
        self._ledger.put(TOTALS, self._on_record())
