"""Held-out accuracy: completions for each prompt, sampled with seeds that never change; the best policy is kept, and a
run whose accuracy has reached its goal or no longer grows ends.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from stretto.core.engine import EVALUATION, Generate
from stretto.core.errors import several
from stretto.core.events import Span
from stretto.core.records import (
    Completion,
    GenerateRequest,
    Prompt,
    Record,
    Sampling,
    Trajectory,
    Update,
    derive_seed,
    trajectory_id,
)
from stretto.core.tasks import cancel_and_wait, gather_or_cancel
from stretto.loop.engines.router import attempts
from stretto.loop.records.evaluation import Evaluation, QuestionResult, asked_of
from stretto.loop.records.recorder import Recorder
from stretto.rollout.single_turn import Detokenize, Score, judge
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import EvaluationLine, SampledCompletion
from stretto_verify.thoughts import with_opening

BEST, _CANDIDATE = "best", "candidate"
_RECORD = "best.json"


class _Best(Record, frozen=True):
    """``best.json``: the best evaluation so far. The evaluation began at `step`. Training went on meanwhile, so
    versions `step` to `version` sampled its completions. `policy`: ``policy/best``, the folder in the run folder that
    has the policy of `step`; None if it was not kept."""

    step: int
    version: int
    accuracy: float
    policy: str | None = None


class BestPolicy:
    """Tracks the accuracy on one set of questions: keeps the record of the best evaluation, and its policy, in the run
    folder, and says when the run should end (`enough`)."""

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
        """Track the best version from the recorded evaluations on.

        Args:
            say: writes a log line.
            keeps: keep the policy of the best evaluation in ``policy/best``.
            patience, least_gain: the run should end once `patience` evaluations in a row (0: never) were not better
                than the best before by more than `least_gain`.
            goal, goal_holds: the run should end once `goal_holds` evaluations in a row reached the accuracy `goal` (0:
                never).
            earlier: the recorded evaluations of a resumed run, oldest first, without those that asked other questions
                than it asks now. ``best.json`` and ``policy/best`` are brought to what they say; they are removed if
                they are of another evaluation.
        """
        self.keeps = keeps
        self._folder, self._say, self._patience, self._least_gain = folder, say, patience, least_gain
        self._best: _Best | None = None
        self._goal, self._goal_holds = goal, goal_holds
        self._since = 0  # evaluations that were not better
        self._reached = 0  # newest evaluations that reached the goal
        for line in earlier:
            self._follow(line.step, line.version, line.accuracy)
        self._held: int | None = None
        self._shown = self._recorded({line.step: line.accuracy for line in earlier})
        self._bring_up_to_date()
        newest = max((line.step for line in earlier), default=-1)
        for path in self._folder.policies.glob(f"{_CANDIDATE}*"):  # the copy for an evaluation that is yet to end stays
            step = path.suffix[1:]
            if not step.isdigit() or int(step) <= newest:
                self._drop(path.name)

    @property
    def enough(self) -> bool:
        return bool(self.why)

    @property
    def why(self) -> str:
        """Reason why the run should end: the goal is reached, or patience is used up; empty while it should go on."""
        if self._goal and self._reached >= self._goal_holds:
            reached = several(self._reached, "evaluation")
            return f"accuracy {self._goal:g} reached in {reached} in a row (evaluation.goal)"
        if self._patience and self._since >= self._patience and self._best is not None:
            best = f"{self._best.accuracy:.4f} at step {self._best.step}"
            since = several(self._since, "evaluation in a row was", "evaluations in a row were")
            return f"{since} not better than {best} (evaluation.patience)"
        return ""

    def hold(self, step: int) -> None:
        """Copy the policy of `step` to ``policy/candidate.STEP`` while its evaluation runs: the policy's own folder may
        be removed meanwhile. If it is removed by now, a copy that an earlier process has made is used. Copies nothing
        without `keeps`, or if the policy is not saved."""
        if not self.keeps:
            return
        if (source := self._folder.policy(step)).is_dir():  # a copy may be of steps that a loss of power has taken
            self._drop(_CANDIDATE)
            self._drop(self._candidate(step).name)
            whole = shutil.copytree(source, self._folder.policies / _CANDIDATE, copy_function=_linked)
            whole.rename(self._candidate(step))
        self._held = step if self._candidate(step).is_dir() else None

    def measured(self, step: int, evaluation: Evaluation) -> None:
        """Count the evaluation that began at `step`. If it is the best so far by more than `least_gain`, write
        ``best.json`` and move the copy of its policy that `hold` made to ``policy/best``; otherwise delete the copy.
        An evaluation with a copy is the best if there is no ``policy/best`` yet; one without is never the best once
        there is. Log once when `enough` becomes true."""
        before = self.enough
        better = self._follow(step, evaluation.version, evaluation.accuracy)
        if self.enough and not before:  # said once
            self._say(f"stops early: {self.why}")
        self._show(_Best(step, evaluation.version, evaluation.accuracy), better)

    def _show(self, found: _Best, better: bool) -> None:
        """Write ``best.json`` and move the candidate (copied policy) of `found` to ``policy/best`` if `found` is the
        best; else delete the candidate. `better`: better than all evaluations before. If ``policy/best`` exists,
        `found` is compared with that one instead, and must have a candidate: the best of all may be an evaluation whose
        policy is gone. If it does not, a `found` with a candidate is always the best."""
        kept, shown = self._held == found.step, self._shown
        self._held = None
        if self.keeps and shown is not None and shown.policy is not None:
            better = kept and found.accuracy > shown.accuracy + self._least_gain
        if not better and not (kept and (shown is None or shown.policy is None)):
            self._drop(self._candidate(found.step).name)
            return
        self._shown = found = msgspec.structs.replace(found, policy=f"policy/{BEST}" if kept else None)
        self._folder.write(_RECORD, msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
        self._move(found.step)

    def _move(self, step: int) -> None:
        """Delete ``policy/best``, and put the candidate of `step`, if there is one, in its place."""
        self._drop(BEST)
        if (candidate := self._candidate(step)).is_dir():
            candidate.rename(self._folder.policies / BEST)

    def _candidate(self, step: int) -> Path:
        return self._folder.policies / f"{_CANDIDATE}.{step}"

    def _follow(self, step: int, version: int, accuracy: float) -> bool:
        """Count this evaluation towards `patience` and `goal`; True if it is the first, or better than the best before
        by more than `least_gain`, and so the best now."""
        better = self._best is None or accuracy > self._best.accuracy + self._least_gain
        self._since = 0 if better else self._since + 1
        if self._reached < self._goal_holds:  # a goal that was reached stays reached
            self._reached = self._reached + 1 if accuracy >= self._goal else 0
        if better:
            self._best = _Best(step, version, accuracy)
        return better

    def _recorded(self, earlier: Mapping[int, float]) -> _Best | None:
        """Return the content of ``best.json``; if it is missing, delete ``policy/best`` and return None. Finish a move
        of the policy that a kill cut short. If the record is of none of the evaluations `earlier` (accuracy by step),
        as after a resume from a step before it, or its policy is gone, log this, delete both, and return None."""
        record = self._folder.path / _RECORD
        if not record.exists():
            self._drop(BEST)
            return None
        found = msgspec.json.decode(record.read_bytes(), type=_Best)
        if found.policy is not None and self._candidate(found.step).is_dir():  # a kill came between record and move
            self._move(found.step)
        gone = found.policy is not None and not (self._folder.policies / BEST).is_dir()
        if gone or earlier.get(found.step) != found.accuracy:
            self._say(f"{_RECORD} of step {found.step} is removed: another evaluation, or none on record, chose it")
            record.unlink()
            self._drop(BEST)
            return None
        return found

    def _bring_up_to_date(self) -> None:
        """Write ``best.json`` of the best evaluation on record if a kill came between its line and the file. Does
        nothing if its policy should be kept and is gone."""
        best, shown = self._best, self._shown
        if best is not None and (shown is None or shown.step != best.step):
            self.hold(best.step)
            if self._held is not None or not self.keeps:
                self._show(best, better=True)

    def _drop(self, name: str) -> None:
        shutil.rmtree(self._folder.policies / name, ignore_errors=True)


def _linked(source: str, target: str) -> None:
    """Hard-link a file, because weight files never change once written; copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(Path(source), target)


_PORTION = 64  # completions of one request; at least one prompt's
_PORTIONS_IN_FLIGHT = 4

#: Returns the final answer in a completion, None if it has none, by (prompt, completion) as texts; for maj@n.
FinalAnswerOf = Callable[[str, str], str | None]


#: Runs the workflow once for a prompt, by (trajectory id, prompt, member, seed); returns the judged trajectory.
Converse = Callable[[str, Prompt, int, int], Coroutine[Any, Any, Trajectory]]


@dataclass(frozen=True)
class Evaluator:
    """Samples and judges completions of held-out prompts, during training or alone; each call is one evaluation.

    `seed`: completions of a prompt get the same seeds in every evaluation, derived from it. `generate`: sends requests
    to an engine. `score`: judges texts. `count` is called with each completion as it ends, even if the evaluation is
    cut short later. After a finished evaluation, `keep` is called with its judged completions, and `rows` with its
    results by question. `final_answer`: None: there is no maj@n. `name`: name of the set of questions; "" for the main
    set. `converse`: generates a trajectory by the recipe's workflow, and counts its tokens itself; None: single turns.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    seed: int
    generate: Generate
    score: Score
    detokenize: Detokenize
    count: Callable[[Completion], None] = lambda completion: None
    keep: Callable[[Sequence[SampledCompletion]], None] = lambda samples: None
    samples: int = 1  # completions of each prompt
    final_answer: FinalAnswerOf | None = None
    rows: Callable[[Sequence[QuestionResult]], None] = lambda results: None
    name: str = ""
    converse: Converse | None = None

    @cached_property
    def asked(self) -> str:
        """Digest of its prompts, `samples` and `seed` (`asked_of`)."""
        return asked_of(self.prompts, self.samples, self.seed)

    async def __call__(self) -> Evaluation:
        """Sample and judge `samples` completions of every prompt, pass them to `keep` and `rows`, and return the
        combined result. Each wait inside has a deadline of its own. The prompts are always split into the same requests
        of about 64 completions, four at a time, so that a repeated evaluation on idle engines computes the same
        numbers."""
        free = asyncio.Semaphore(_PORTIONS_IN_FLIGHT)
        size = max(1, _PORTION // self.samples)
        parts = [self.prompts[start : start + size] for start in range(0, len(self.prompts), size)]
        judged = list(chain.from_iterable(await gather_or_cancel(*(self._judged(part, free) for part in parts))))
        results = [result for result, _ in judged]
        evaluation = Evaluation.of(results)
        kept = chain.from_iterable(samples for _, samples in judged)
        self.keep([msgspec.structs.replace(sample, version=evaluation.version) for sample in kept])
        self.rows(results)
        return evaluation

    async def _judged(
        self, prompts: Sequence[Prompt], free: asyncio.Semaphore
    ) -> list[tuple[QuestionResult, list[SampledCompletion]]]:
        if (converse := self.converse) is not None:
            async with free:
                judged = await gather_or_cancel(*(self._conversed(converse, prompt) for prompt in prompts))
        else:
            async with free:
                completions = await self._completions(prompts)
            judging = (judge(self._id(one), one, completions[one.id], self.score, self.detokenize) for one in prompts)
            judged = await gather_or_cancel(*judging)
        return [self._result(prompt, trajectories) for prompt, trajectories in zip(prompts, judged, strict=True)]

    def _result(
        self, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> tuple[QuestionResult, list[SampledCompletion]]:
        final = self.final_answer
        texts = [with_opening(one.text, prompt.opens) for one in trajectories]
        finals = [final(prompt.text, text) for text in texts] if final is not None else None
        samples = [SampledCompletion.of(prompt, one.versions, one.text, one.verdict) for one in trajectories]
        return QuestionResult.of(prompt, trajectories, finals), samples

    def _seeds(self, prompt: Prompt) -> tuple[int, ...]:
        further = (derive_seed(self.seed, prompt.id, number) for number in range(1, self.samples))
        return derive_seed(self.seed, prompt.id), *further

    async def _conversed(self, converse: Converse, prompt: Prompt) -> list[Trajectory]:
        """Run the workflow `samples` times for one prompt; returns the judged trajectories."""
        ids = [trajectory_id(self._id(prompt), number) for number in range(self.samples)]
        members = enumerate(zip(ids, self._seeds(prompt), strict=True))
        return await gather_or_cancel(*(converse(id, prompt, number, seed) for number, (id, seed) in members))

    def _id(self, prompt: Prompt) -> str:
        return f"{EVALUATION}{self.name}.{prompt.id}"

    async def _completions(self, prompts: Sequence[Prompt]) -> dict[str, list[Completion]]:
        """Sample the completions of these prompts; returns them by prompt id, in the order of their seeds. If the
        engine is lost, all of these prompts are sampled again together, so that the batches stay the same. Raises
        EngineLost at the fourth loss (`attempts`)."""
        found: dict[tuple[str, int], Completion] = {}
        requests = [GenerateRequest(self._id(one), one.token_ids, self._seeds(one), self.sampling) for one in prompts]
        for attempt in attempts():
            with attempt:
                async for completion in self.generate(*requests):
                    self.count(completion)
                    found[completion.request, completion.member] = completion
                break
        return {prompt.id: [found[self._id(prompt), member] for member in range(self.samples)] for prompt in prompts}


class PeriodicEvaluation:
    """Evaluates one set of questions while training goes on, one evaluation at a time.

    An evaluation is due every `every` steps (0: never), and at the first step after `minutes` minutes since the last
    one began (0: never). `evaluate` computes the result; `best`, if given, gets it too. A step is evaluated once: not
    again if it is among those of `earlier`, the evaluations on record. `name`: name of the set, "" for the main one.
    `asked`: digest of the questions (`Evaluator.asked`), for the record.
    """

    def __init__(
        self,
        evaluate: Callable[[], Awaitable[Evaluation]],
        recorder: Recorder,
        every: int,
        minutes: float = 0.0,
        name: str = "",
        best: BestPolicy | None = None,
        earlier: Sequence[EvaluationLine] = (),
        asked: str = "",
    ) -> None:
        self._asked, self._measured = asked, {line.step for line in earlier}
        self._evaluate, self._recorder, self._every, self._seconds = evaluate, recorder, every, 60.0 * minutes
        self._name, self._best = name, best
        self._started = time.monotonic()
        self._running: asyncio.Task[None] | None = None

    def due(self, update: Update) -> bool:
        """Whether an evaluation should start after the step of `update`: it is a multiple of `every`, or `minutes` have
        passed since the last one began. False while one is running."""
        waited = bool(self._seconds) and time.monotonic() - self._started >= self._seconds
        by_steps = bool(self._every) and update.step % self._every == 0
        return (by_steps or waited) and (self._running is None or self._running.done())

    def after(self, update: Update) -> None:
        """Start an evaluation in the background if one is due after this step. If one is due and the previous one
        failed, raises that error instead."""
        if self.due(update):
            self.check()
            self._begin(update.step)

    def catch_up(self, version: int) -> None:
        """Start the newest evaluation that was due by steps at `version` or before, in the background, unless it or a
        later one is on record: a kill or a stop cut it short."""
        due = version - version % self._every if self._every else 0
        if due > max(self._measured, default=0):
            self._begin(due)

    def has(self, step: int) -> bool:
        """Whether an evaluation of `step` is on record."""
        return step in self._measured

    def _begin(self, step: int) -> None:
        self._started = time.monotonic()
        self._running = asyncio.create_task(self.evaluate(step))

    async def evaluate(self, step: int) -> None:
        """Evaluate now, record result and time span under `step`, and let `best` keep the policy if it is the best.
        Returns when that is done. Does nothing if an evaluation of `step` is on record."""
        if self.has(step):
            return
        start = time.monotonic()
        if self._best is not None:
            self._best.hold(step)
        evaluation = await self._evaluate()
        self._recorder.evaluated(evaluation, step, self._name, self._asked)
        self._measured.add(step)
        span = Span(role="conductor", name="evaluate", start=start, end=time.monotonic(), version=evaluation.version)
        self._recorder.spans([span])
        if self._best is not None:
            self._best.measured(step, evaluation)

    def check(self) -> None:
        """Raise the error of the last evaluation, if it failed."""
        if self._running is not None and self._running.done() and not self._running.cancelled():
            self._running.result()

    async def end(self) -> None:
        """Wait for the running evaluation, if any; raises its error. Each of its waits has a deadline."""
        if self._running is not None:
            await self._running

    async def close(self) -> None:
        """Cancel the running evaluation, if any."""
        if self._running is not None:
            await cancel_and_wait([self._running])


class Evaluations:
    """All evaluations of a run: the held-out questions and further sets. `best` tracks the accuracy on one set."""

    def __init__(self, evaluations: Sequence[PeriodicEvaluation], best: BestPolicy | None = None) -> None:
        self._all, self._best = tuple(evaluations), best

    @property
    def enough(self) -> bool:
        """Whether training should stop early."""
        return bool(self.why)

    @property
    def why(self) -> str:
        """Reason why training should stop early (`BestPolicy.why`); empty: it should not."""
        return self._best.why if self._best is not None else ""

    def keeps(self, update: Update) -> bool:
        """Whether the policy of this step must be saved: an evaluation is due, and the best policy is kept."""
        return self._best is not None and self._best.keeps and self.due(update)

    def due(self, update: Update) -> bool:
        """Whether an evaluation of any set should start after this step."""
        return any(one.due(update) for one in self._all)

    def after(self, update: Update) -> None:
        """Start the evaluations that are due after this step, in the background. If the previous one of such a set
        failed, raises that error instead."""
        for one in self._all:
            one.after(update)

    def catch_up(self, version: int) -> None:
        """Start the evaluations that an earlier process has begun, or was about to, and not finished
        (`PeriodicEvaluation.catch_up`). `version`: where the run is resumed. Starts none if training should stop."""
        for one in self._all if not self.enough else ():
            one.catch_up(version)

    def has(self, step: int) -> bool:
        """Whether all sets have an evaluation of `step` on record."""
        return all(one.has(step) for one in self._all)

    async def evaluate(self, step: int) -> None:
        """Evaluate all sets now, one after the other, and record the results under `step`; leaves out a set that has an
        evaluation of `step` on record."""
        for one in self._all:
            await one.evaluate(step)

    def check(self) -> None:
        """Raise the error of the last evaluation of any set, if it failed."""
        for one in self._all:
            one.check()

    async def end(self) -> None:
        """Wait for the running evaluations, set by set; raises the first error."""
        for one in self._all:
            await one.end()

    async def close(self) -> None:
        """Cancel the running evaluations."""
        for one in self._all:
            await one.close()
