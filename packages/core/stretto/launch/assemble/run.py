"""Carrying out a run from its plan to its end: the roles start, the conductor runs, the roles end.

plan ─► warm start ─► policy/v000000 ─► roles up ─► evaluate ─► conduct ─► evaluate ─► roles down ─► plots
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial

from stretto.core.errors import StoreError, several
from stretto.core.records import Update
from stretto.core.tasks import run_beside
from stretto.doors.loading import from_package
from stretto.launch.assemble.beside import Conversing, conversing, workflow_groups
from stretto.launch.assemble.evaluations import evaluations
from stretto.launch.assemble.roles import Roles, kept_proving, running_roles
from stretto.launch.assemble.supervised import copy_policy, warm_start
from stretto.launch.preflight.base import loaded_files
from stretto.launch.preflight.checks import medium_of
from stretto.launch.preflight.plan import Plan
from stretto.launch.recipe.recipe import Recipe
from stretto.loop.checkpointing import Checkpointing
from stretto.loop.conductor import Conductor
from stretto.loop.engines.in_flight import GroupInFlight, InFlight, restore
from stretto.loop.engines.rounds import Rounds
from stretto.loop.evaluation import Evaluations, Evaluator
from stretto.loop.records.alarms import SlowReward
from stretto.loop.records.recorder import Recorder
from stretto.loop.records.reporter import Reporter
from stretto.loop.records.totals import RunClock, Tenure, carried_over, next_tenure, run_seconds
from stretto.loop.recovery import Recovery, seal_start
from stretto.processes.spawn import Spawner
from stretto.processes.stopping import StopSignal
from stretto.rollout.controller import CONTROLLER, Controller, ControllerState
from stretto.rollout.pacing import pacing_of
from stretto.rollout.prompts import Position, PromptStream
from stretto.rollout.single_turn import GroupWorkflow, SingleTurn
from stretto.rollout.tasks import DatasetTask
from stretto.rollout.workflow import WorkflowConfig
from stretto.store.checkpoints import Checkpoints
from stretto.store.ending import ENDING, Ending, record_end
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import UnfinishedGroup, last_step, read_batches, read_unfinished
from stretto.store.run_folder import RunFolder
from stretto.store.selection import SELECTION, SelectionBias, SelectionWatch
from stretto.store.series.lines import Extent
from stretto.store.series.metrics import WRITTEN, rewind_metrics, rewind_samples
from stretto.store.series.progress import LEGEND
from stretto.store.totals import ENGINES, TOTALS, Membership, Totals
from stretto.trainer.batch.credit import rewards_compared

_DRAIN_SECONDS = 5.0  # timeout for collecting the tokens in flight of an engine that leaves
#: Name of the ledger's fact with the tenure of the present conductor.
CONDUCTOR = "conductor"


@dataclass(frozen=True)
class StartState:
    """Starting point of a process of a run: version 0, or the version after the last recorded batch, which the trainer
    reaches from the checkpoint of `saved_step` (0: from none). `broken`, `changed`: sentences about broken checkpoints
    and changed sources. `done`: nothing is left to do; `early`: why, if before the last step."""

    version: int = 0
    saved_step: int = 0  # step of the checkpoint from which the trainer reaches `version`; 0: none
    broken: tuple[str, ...] = ()  # error messages of newer checkpoints
    changed: tuple[str, ...] = ()  # sentences: user-defined parts whose source has changed
    done: bool = False  # the run has ended after its last step or early, and its last version is evaluated
    early: str = ""  # why a run that is done has ended before its last step

    def sentences(self) -> list[str]:
        """Return log lines about the starting point: why nothing is left to do; or which checkpoints are broken, which
        sources have changed, and where the run continues. Empty for a new run."""
        if self.early:
            done = f"the run has ended early, after {several(self.version, 'step')}: {self.early}"
            return [f"{done}; nothing is left to do; another goal or patience of [evaluation] continues it"]
        if self.done:
            done = f"all {several(self.version, 'step')} of the run are done, and its last version is evaluated"
            return [f"{done}: nothing is left to do; trainer.steps=M with M > {self.version} continues it"]
        found = [f"a newer checkpoint is not whole: {sentence}" for sentence in self.broken]
        found += self.changed
        if self.version:
            start = (
                f"the checkpoint of step {self.saved_step}" if self.saved_step else "its start: it has no checkpoint"
            )
            behind = self.version - self.saved_step
            again = several(behind, "step is", "steps are")
            found.append(f"continues at version {self.version} from {start}; {again} done again")
        return found

    @classmethod
    def of(cls, folder: RunFolder, keep: int) -> StartState:
        """Find the starting point of a run to resume; `changed`, `done` and `early` are left to the caller. `keep`:
        number of checkpoints that the run keeps. Raises StoreError if the ledger, or every checkpoint, is damaged, or
        the ledger has no step and there is a checkpoint."""
        version = last_step(folder.ledger)
        if not version and (steps := Checkpoints(folder.checkpoints, keep).steps()):
            found = f"{folder.ledger}: has no step, and there is a checkpoint of step {steps[-1]}"
            raise StoreError(f"{found}: bring the ledger of this run back, or start a new run")
        checkpoint = Recovery(folder, keep).newest(version)
        return cls(version, checkpoint.step, checkpoint.broken) if checkpoint is not None else cls(version)


@dataclass(frozen=True)
class _RunContext:
    """Plan, folder, starting point, ledger, reporter and stop signal of the run that is being assembled. `behind`: what
    is to be ended after the roles."""

    plan: Plan
    folder: RunFolder
    start: StartState
    ledger: Ledger
    reporter: Reporter
    stop: StopSignal
    behind: AsyncExitStack

    def report(self, sentence: str) -> None:
        """Show a log line about the roles, and record it as an event in the ledger."""
        self.reporter.say(sentence)
        self.ledger.event("role", sentence)


def policies_to_go(plan: Plan, folder: RunFolder, version: int) -> Iterator[str]:
    """Yield a log line if the policy `version`, with which the run goes on, will be removed for a newer one."""
    keep = plan.recipe.trainer.keep_versions
    if version and keep != "all" and folder.policy(version).exists():
        name = folder.policy(version).relative_to(folder.path)
        yield f'{name} stays until newer ones are saved: trainer.keep_versions = {keep}; "all" keeps every policy'


async def run(plan: Plan, folder: RunFolder, start: StartState, reporter: Reporter, spawner: Spawner) -> int:
    """Train from `start` to the recipe's last step; returns the exit code: 0, or 128 + the signal that stopped the run.
    A run without its first policy gets it first: that of the warm start, or the base model. Evaluations may end the run
    before its last step, with 0. `spawner`: starts the processes of the roles.

    Raises:
        StrettoError: the run cannot continue. It can be resumed from its last checkpoint.
    """
    stop, began = StopSignal(), (time.monotonic(), run_seconds())
    stop.call(lambda: reporter.say(_stopping(plan, folder)))
    if not folder.policy(0).exists():
        log = folder.role_log("warm-start")
        source = await stop.unless(warm_start(plan, log, reporter.learning, spawner, reporter.say))
        if source is None:
            return stop.exit_code
        with closing(Ledger(folder.ledger, plan.recipe.store)) as ledger:
            reference = plan.recipe.algorithm.reference
            place = reference.path if reference is not None else None
            base = plan.base.path if source != plan.base.path else None
            loaded = loaded_files(plan.base.path)
            copy_policy(source, folder.policy(0), lambda policy: seal_start(ledger, policy, place, base, loaded))
    with closing(Ledger(folder.ledger, plan.recipe.store)) as ledger:
        context = _RunContext(plan, folder, start, ledger, reporter, stop, behind := AsyncExitStack())
        for sentence in (*start.sentences(), *policies_to_go(plan, folder, start.version)):
            reporter.say(sentence)
        _drop_what_came_later(context)
        unfinished = read_unfinished(folder.ledger)
        earlier = _earlier(ledger, unfinished)
        ledger.put("seed", plan.recipe.seed)
        ledger.put(CONDUCTOR, tenure := next_tenure(ledger.get(CONDUCTOR, Tenure)))
        ledger.flush()  # before another process hears of it
        reporter.say(f"starting the roles: {_roles_of(plan.recipe)}")
        async with _followed(context), behind:
            async with running_roles(
                plan=plan,
                folder=folder,
                version=start.version,
                saved_step=start.saved_step,
                tenure=tenure,
                stop=stop,
                report=context.report,
                spawner=spawner,
                proving=kept_proving(ledger, start.version),
            ) as roles:
                for fact in roles.rewards.facts.values():
                    reporter.say(fact)
                _keep_roster(context, roles)
                if not stop.requested:
                    selection = _selection(context)
                    recorder = _recorder(context, roles, RunClock(earlier, *began, roles.spent), earlier, selection)
                    await run_beside(roles.supervise(), _train(context, roles, recorder, selection, unfinished))
            record_end(ledger, stop.exit_code)  # before tools ask how the run ended
            ledger.flush()
        return stop.exit_code


def _followed(context: _RunContext) -> AbstractAsyncContextManager[None]:
    """Return a context manager during whose block the tools of ``[logging]`` follow the run. Without tools, the context
    manager does nothing."""
    recipe, reporter, stop = context.plan.recipe, context.reporter, context.stop
    if not recipe.logging.tools:
        return nullcontext()
    followed = from_package("stretto_report.outlets.supervision:followed", "logging.to")
    following: AbstractAsyncContextManager[None] = followed(
        recipe.logging, context.folder, reporter.say, lambda: stop.requested, recipe.path or ""
    )
    return following


def _earlier(ledger: Ledger, unfinished: Sequence[UnfinishedGroup]) -> Totals:
    """Read the totals of earlier processes of the run; empty totals if there are none. Generated tokens that are lost
    count as stopped: neither the ledger nor `unfinished`, groups in flight or buffered, has them."""
    if (totals := ledger.get(TOTALS, Totals)) is None:
        return Totals(max_staleness=None)
    members = (member for group in unfinished for member in group.members.values())
    go_on = sum(segment.sampled_length for member in members for segment in member.segments)
    return carried_over(totals, ledger.on_record.tokens + go_on)


def _roles_of(recipe: Recipe) -> str:
    """Return the names and numbers of the run's roles, for a log line."""
    local = recipe.cluster.placer == "local"
    engines = f"{recipe.engine.count} engine(s)" if local else "engines on other machines"
    workflows = ""
    if isinstance(recipe.workflow, WorkflowConfig):
        workflows = f", {recipe.workflow.workers} workflow process(es)"
    return f"{engines}, the trainer, {recipe.rewards.workers} reward worker(s){workflows}"


def _keep_roster(context: _RunContext, roles: Roles) -> None:
    """Restore the roster of engines from the ledger, which stores it at each flush from now on."""
    ledger, roster = context.ledger, roles.engines.roster
    roster.restore(ledger.get(ENGINES, list[Membership]) or [], context.start.version)
    ledger.watch(ENGINES, roster.rows)


def _selection(context: _RunContext) -> SelectionWatch:
    """Return the watch for selection bias, restored from the ledger, which stores its state at each flush."""
    ledger = context.ledger
    watch = SelectionWatch(ledger, time.monotonic, ledger.get(SELECTION, SelectionBias), context.report)
    ledger.watch(SELECTION, lambda: watch.known)
    return watch


def _recorder(
    context: _RunContext, roles: Roles, clock: RunClock, earlier: Totals, selection: SelectionWatch
) -> Recorder:
    """Return the recorder of the run. `earlier`: totals of earlier processes."""
    recipe = context.plan.recipe
    return Recorder(
        context.folder,
        context.ledger,
        context.reporter,
        work=roles.work,
        max_staleness=recipe.rollout.staleness_bounds[1],
        earlier=earlier,
        clock=clock,
        medium=medium_of(recipe).medium,
        slow_reward=SlowReward(recipe.rewards.title, roles.rewards.workers),
        sample_seconds=recipe.store.sample_seconds,
        selection=selection,
        resident=roles.resident,
        canary=roles.engines.shares,
    )


def _stopping(plan: Plan, folder: RunFolder) -> str:
    return (
        f"stopping after the step in progress, or in {plan.recipe.deadlines.stop:g} s (Ctrl-C again: at once); "
        f"continue with `stretto train --resume {folder.path}`"
    )


def _phase(recipe: Recipe, number: int) -> str:
    """Return the title of phase `number` (2 or 3; 1 is the warm start) for a log line. Without a warm start they are
    phases 1 and 2 of 2."""
    return f"phase {number} of 3" if recipe.warm_start is not None else f"phase {number - 1} of 2"


def _drop_what_came_later(context: _RunContext) -> None:
    """Remove from the run folder what is of later steps than the ledger has: policies, metric lines and held-out
    samples. Checkpoints after `start.saved_step` are set aside; ``samples.jsonl`` stays as it is."""
    folder, start = context.folder, context.start
    for number, path in folder.saved_policies():
        if number > start.version:
            shutil.rmtree(path)
    Checkpoints(folder.checkpoints, context.plan.recipe.store.keep_checkpoints).set_aside_after(start.saved_step)
    written = context.ledger.get(WRITTEN, dict[str, Extent]) or {}
    rewind_metrics(folder.metrics, context.ledger.last_update(), written.get(folder.metrics.name))
    rewind_samples(folder.held_out, start.version, written.get(folder.held_out.name))


async def _train(
    context: _RunContext,
    roles: Roles,
    recorder: Recorder,
    selection: SelectionWatch,
    unfinished: Sequence[UnfinishedGroup],
) -> None:
    """Assemble the conductor, restored from the ledger, and let it train; the roles run. Records why evaluations ended
    the run early, if they did."""
    recipe, ledger = context.plan.recipe, context.ledger
    state = ledger.get(CONTROLLER, ControllerState) or ControllerState()
    controller = Controller(
        recipe.rollout,
        _prompts(context.plan, state.position),
        selection,
        recipe.seed,
        version=context.start.version,
        pacing=pacing_of(recipe.rollout, recipe.in_rounds),
        state=state,
        compared=partial(rewards_compared, recipe.algorithm),
    )
    restored = restore(controller, state, unfinished)
    for group in unfinished:
        selection.restore(group.id, recipe.rollout.group_size, group.trajectories)
    ledger.watch(CONTROLLER, controller.state)
    in_flight, workflow = (
        _generation(context, roles, controller, restored)
        if roles.workflows is None
        else _conversations(context, roles, roles.workflows, unfinished)
    )
    selection.sampled = in_flight.sampled
    roles.engines.keep = lambda: in_flight.keep(_DRAIN_SECONDS)
    conductor = Conductor(
        controller=controller,
        workflow=workflow,
        engines=roles.engines,
        trainer=roles.trainer,
        in_flight=in_flight,
        recorder=recorder,
        checkpointing=_checkpointing(context, roles, controller),
        evaluation=evaluations(
            context.plan, context.folder, _evaluator(context, roles, recorder), recorder, context.reporter.say
        ),
        poll=roles.poll,
        progress=roles.progress,
        steps=recipe.trainer.steps,
        deadlines=recipe.deadlines,
    )
    roles.engines.proving.withdraw = conductor.withdraw
    context.behind.push_async_exit(partial(conductor.checkpointing.close, context.reporter.say))
    _record_again(context, roles.trainer.replayed, controller, recorder)
    try:
        await _conduct(context, roles, conductor)
        if (why := conductor.evaluation.why) and controller.published < recipe.trainer.steps:
            ledger.put(ENDING, Ending("finished", why))
    finally:
        await conductor.evaluation.close()
    recorder.conclude()


def _prompts(plan: Plan, position: Position) -> PromptStream:
    """Return the stream of training prompts from `position`, by the task's curriculum if it has one."""
    task = plan.recipe.task
    chosen = task.curriculum if isinstance(task, DatasetTask) else None
    rests = (lambda rate: not chosen.hard < rate < chosen.easy) if chosen is not None else (lambda rate: False)
    return PromptStream(plan.training, plan.recipe.seed, position, plan.sources, rests)


def _generation(
    context: _RunContext, roles: Roles, controller: Controller, restored: Mapping[str, GroupInFlight]
) -> tuple[InFlight, GroupWorkflow]:
    """Return what sends requests to the engines, and the workflow of single turns that uses it; in rounds if the recipe
    has rounds. `restored`: tokens of groups in flight, by group id; in rounds they are not used."""
    plan = context.plan
    in_flight = InFlight(roles.engines, context.ledger, restored)
    rounds: Rounds | None = None
    if plan.recipe.in_rounds:
        rounds = Rounds(roles.engines.generate, lambda: controller.tickets, plan.recipe.engine.count)
        in_flight = InFlight(rounds, journal=None)
    workflow: GroupWorkflow = SingleTurn(
        in_flight.generate, roles.rewards.score_group, plan.tokenizer.decode, plan.sampling
    )
    return in_flight, workflow if rounds is None else rounds.together(workflow)


def _conversations(
    context: _RunContext, roles: Roles, pool: Conversing, unfinished: Sequence[UnfinishedGroup]
) -> tuple[InFlight, GroupWorkflow]:
    """Return what sends requests to the engines, and the recipe's workflow on sessions that use it. `unfinished`:
    groups whose sessions continue from their record."""
    in_flight = InFlight(roles.engines, context.ledger)
    score = roles.rewards.score_group
    return in_flight, workflow_groups(context.plan, pool, in_flight, context.ledger, unfinished, score)


def _checkpointing(context: _RunContext, roles: Roles, controller: Controller) -> Checkpointing:
    recipe = context.plan.recipe
    return Checkpointing(
        context.folder,
        Checkpoints(context.folder.checkpoints, recipe.store.keep_checkpoints),
        recipe.trainer,
        roles.trainer,
        controller,
        context.ledger,
        recipe.deadlines,
        context.start.saved_step,
    )


def _evaluator(context: _RunContext, roles: Roles, recorder: Recorder) -> Evaluator:
    plan, generate, score = context.plan, roles.engines.generate, roles.rewards.score_group
    return Evaluator(
        prompts=plan.held_out,
        sampling=plan.sampling,
        seed=plan.recipe.evaluation.seed,
        generate=generate,
        score=score,
        detokenize=plan.tokenizer.decode,
        count=recorder.evaluation_sampled,
        keep=recorder.held_out,
        converse=conversing(plan, roles.workflows, generate, score, recorder.evaluation_sampled),
    )


def _record_again(context: _RunContext, updates: Sequence[Update], controller: Controller, recorder: Recorder) -> None:
    """Record those of the repeated steps `updates` that are not on record yet: the earlier process ended between the
    batch and its update. The batch has been counted as judged, in the transaction that committed it."""
    recorded = context.ledger.last_update()
    for update in (update for update in updates if update.step > recorded):
        (batch,) = read_batches(context.folder.ledger, update.step - 1, update.step)
        recorder.in_force(controller.max_staleness)
        controller.observe(update.step, update.metrics)
        recorder.updated(batch, update)


async def _conduct(context: _RunContext, roles: Roles, conductor: Conductor) -> None:
    """Measure the initial accuracy, train, save checkpoint and policy, and measure the final accuracy. A resumed run
    measures no initial accuracy that is on record or of a version that is gone. After a requested stop none is
    measured, and only a trainer that is ready saves its state."""
    recipe, stop, say = context.plan.recipe, context.stop, context.reporter.say
    controller, recorder = conductor.controller, conductor.recorder
    checkpointing, evaluation = conductor.checkpointing, conductor.evaluation
    stop.call(conductor.request_stop)
    if not controller.published and not evaluation.has(0):  # no later version is the initial one
        say(f"{_phase(recipe, 2)}: measuring the held-out accuracy of version 0")
        await stop.unless(evaluation.evaluate(controller.published))
    if not stop.requested:
        # A run that was killed after its last checkpoint may lack the policy of that step.
        await checkpointing.save_policy(controller.published)
        recorder.spans(await roles.poll_unless(stop))
        for sentence in _what_is_left(recipe, controller.published, evaluation):
            say(sentence)
        recorder.rl_begins()
        evaluation.catch_up(controller.published)
        await conductor.run()
    if stop.requested:
        roles.trainer.retire()  # a stopped run does not wait for a replacement
    if roles.trainer.ready or not stop.requested:
        await checkpointing.save_checkpoint()
        await checkpointing.save_policy(controller.published)
    else:
        say(f"the trainer did not finish its step in time; --resume continues from step {checkpointing.saved_step}")
    await stop.unless(evaluation.end())
    recorder.spans(await roles.poll_unless(stop))
    recorder.rl_ends()
    if not stop.requested:
        if not evaluation.has(controller.published):
            say("measuring the held-out accuracy of the last version")
        await stop.unless(_evaluate_last(roles, evaluation, controller.published))


def _what_is_left(recipe: Recipe, version: int, evaluation: Evaluations) -> Iterator[str]:
    """Yield log lines: the steps to do from `version` on; behind the last step, whether its evaluation is owed."""
    if version < recipe.trainer.steps:
        yield f"{_phase(recipe, 3)}: reinforcement learning, steps {version + 1} to {recipe.trainer.steps}"
        yield LEGEND
        return
    owed = "only its end is not on record" if evaluation.has(version) else "an evaluation of its last version is owed"
    yield f"all {several(version, 'step')} of the run are done, and {owed}"


async def _evaluate_last(roles: Roles, evaluation: Evaluations, version: int) -> None:
    """Make all engines load the version, and evaluate it."""
    await roles.engines.reach(version)
    await evaluation.evaluate(version)
