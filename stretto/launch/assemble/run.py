"""One run from its plan to its summary: the roles are started, the conductor conducts, everything is put away.

plan ─► warm start ─► policy/v000000 ─► roles up ─► evaluate ─► conduct ─► evaluate ─► roles down ─► plots
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from stretto.core.records import Update
from stretto.core.tasks import run_beside
from stretto.launch.assemble.roles import Roles, roles
from stretto.launch.assemble.specs import in_rounds
from stretto.launch.assemble.warm_start import copy_policy, warm_start
from stretto.launch.preflight.plan import Plan
from stretto.launch.recipe.recipe import Recipe
from stretto.loop.checkpointing import Checkpointing
from stretto.loop.conductor import Conductor
from stretto.loop.engines.in_flight import GroupInFlight, InFlight, restore
from stretto.loop.engines.pool import EnginePool
from stretto.loop.engines.rounds import Rounds, WholeGroups
from stretto.loop.evaluation import Evaluator, PeriodicEvaluation
from stretto.loop.learner.recovery import Recovery, seal_start
from stretto.loop.records.recorder import EarlierTotals, Recorder, RunClock
from stretto.loop.records.reporter import Reporter
from stretto.loop.records.slow_reward import SlowReward
from stretto.processes.spawn import Spawner
from stretto.processes.stopping import StopSignal
from stretto.rollout.controller import Controller, ControllerState
from stretto.rollout.pacing import Continuous, InRounds
from stretto.rollout.prompts import PromptStream
from stretto.store.folder.checkpoints import Checkpoints
from stretto.store.folder.run_folder import RunFolder
from stretto.store.inspection import TOTALS, Totals
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import last_step, read_batches, read_unfinished
from stretto.store.series.metrics import rewind_metrics
from stretto.store.series.samples import rewind_samples
from stretto.worlds.single_turn import SingleTurn, Workflow

_LEGEND = (
    "a line shows: held-out = accuracy on prompts that are never trained on (of which version) | accuracy, reward = of "
    "the completions judged since the step before | length = tokens of a completion | staleness = versions from "
    "sampling to training | in flight, buffered = groups | percentages = how busy each role is"
)
STANDING = "standing"  #: where the controller stood, in the ledger


@dataclass(frozen=True)
class StartState:
    """Where a run begins: at its start, or behind the last batch on record."""

    version: int = 0
    saved_step: int = 0  # of the checkpoint from which the trainer gets there
    broken: tuple[str, ...] = ()  # what is wrong with newer checkpoints

    def told(self) -> list[str]:
        """What a reader of the run should know of it."""
        told = [f"a newer checkpoint is not whole: {sentence}" for sentence in self.broken]
        if self.version:
            start = (
                f"the checkpoint of step {self.saved_step}" if self.saved_step else "its start: it has no checkpoint"
            )
            behind = self.version - self.saved_step
            told.append(f"goes on at version {self.version} from {start}; {behind} steps are done again")
        return told

    @classmethod
    def of(cls, folder: RunFolder, keep: int) -> StartState:
        """Behind the last batch of the ledger.

        Raises:
            StoreError: the ledger, or every checkpoint, is broken.
        """
        version = last_step(folder.ledger)
        checkpoint = Recovery(folder, keep).newest(version)
        return cls(version, checkpoint.step, checkpoint.broken) if checkpoint is not None else cls(version)


async def run(plan: Plan, folder: RunFolder, beginning: StartState, stage: Reporter, spawner: Spawner) -> int:
    """Train from `beginning` to the recipe's last step; the exit code: 0, or 128 + the signal that stopped it.

    Raises:
        StrettoError: what the run could not go on from; its folder stays resumable from the last checkpoint.
    """
    stopped, began = StopSignal(), time.monotonic()
    stopped.call(lambda: stage.say(_stopping(plan, folder)))
    if not folder.policy(0).exists():
        source = await stopped.unless(
            warm_start(plan, folder.role_log("warm-start"), stage.learning, spawner, stage.say)
        )
        if source is None:
            return stopped.exit_code
        with closing(Ledger(folder.ledger, plan.recipe.store)) as ledger:
            reference = plan.recipe.algorithm.reference
            place = reference.path if reference is not None else None
            copy_policy(source, folder.policy(0), lambda policy: seal_start(ledger, policy, place))
    ledger = Ledger(folder.ledger, plan.recipe.store)
    try:
        for sentence in beginning.told():
            stage.say(sentence)
        _forget_what_came_later(plan, folder, beginning)
        rewind_metrics(folder.metrics, ledger.last_update())
        rewind_samples(folder.held_out, beginning.version)
        totals = ledger.get(TOTALS, Totals)
        past = EarlierTotals() if totals is None else EarlierTotals.of(totals)
        ledger.put("seed", plan.recipe.seed)

        def report(sentence: str) -> None:
            stage.say(sentence)
            ledger.event("role", sentence)

        began_at, saved_at = beginning.version, beginning.saved_step
        engines, workers = plan.recipe.engine.count, plan.recipe.rewards.workers
        stage.say(f"starting the roles: {engines} engine(s), the trainer, {workers} reward worker(s)")
        async with roles(plan, folder, began_at, saved_at, stopped, report, spawner) as crew:
            for fact in crew.rewards.facts.values():
                stage.say(fact)
            if not stopped.requested:
                slow = SlowReward(plan.recipe.rewards.function, crew.rewards.workers)
                bound, clock = plan.recipe.rollout.max_staleness, RunClock(past, began)
                seconds = plan.recipe.store.sample_seconds
                recorder = Recorder(folder, ledger, stage, crew.work, bound, past, clock, slow, seconds)
                training = _train(plan, folder, beginning, ledger, crew, recorder, stage, stopped)
                await run_beside(crew.supervise(), training)
        return stopped.exit_code
    finally:
        ledger.close()


def _stopping(plan: Plan, folder: RunFolder) -> str:
    return (
        f"stopping after the step in progress, or in {plan.recipe.deadlines.stop:g} s (Ctrl-C again: at once); "
        f"go on with `stretto train --resume {folder.path}`"
    )


def _phase(recipe: Recipe, number: int) -> str:
    """Which of the three phases begins; a run without a warm start has the last two."""
    return f"phase {number} of 3" if recipe.warm_start is not None else f"phase {number - 1} of 2"


def _forget_what_came_later(plan: Plan, folder: RunFolder, beginning: StartState) -> None:
    """Broken checkpoints must not pass for the newest ones; a policy without its batch on record is of no lineage."""
    for path in folder.policies.glob("v*"):
        if path > folder.policy(beginning.version):
            shutil.rmtree(path)
    Checkpoints(folder.checkpoints, plan.recipe.store.keep_checkpoints).set_aside_after(beginning.saved_step)


async def _train(
    plan: Plan,
    folder: RunFolder,
    beginning: StartState,
    ledger: Ledger,
    crew: Roles,
    recorder: Recorder,
    stage: Reporter,
    stopped: StopSignal,
) -> None:
    recipe = plan.recipe
    state = ledger.get(STANDING, ControllerState) or ControllerState()
    controller = Controller(
        recipe.rollout,
        PromptStream(plan.training, recipe.seed, state.position),
        ledger,
        recipe.seed,
        beginning.version,
        InRounds() if in_rounds(recipe) else Continuous(),
    )
    restored = restore(controller, state, read_unfinished(folder.ledger))
    ledger.watch(STANDING, controller.standing)
    in_flight, workflow = _generation(plan, crew, controller, ledger, restored)
    conductor = Conductor(
        controller=controller,
        workflow=workflow,
        engines=crew.fleet,
        trainer=crew.trainer,
        in_flight=in_flight,
        recorder=recorder,
        checkpointing=_checkpointing(plan, folder, beginning, ledger, crew, controller),
        evaluation=PeriodicEvaluation(_evaluator(plan, crew, recorder), recorder, recipe.evaluation.every),
        poll=crew.poll,
        progress=crew.progress,
        steps=recipe.trainer.steps,
        deadlines=recipe.deadlines,
    )
    _record_again(folder, crew.trainer.replayed, ledger.last_update(), recorder)
    try:
        await _conduct(recipe, conductor, crew, stage, stopped)
    finally:
        await conductor.evaluation.close()
        await conductor.checkpointing.close()
    recorder.conclude()


def _generation(
    plan: Plan, crew: Roles, controller: Controller, ledger: Ledger, restored: Mapping[str, GroupInFlight]
) -> tuple[InFlight, Workflow]:
    """What generates and judges a group; in a synchronous run, whose groups begin and leave together, in rounds."""
    in_flight = InFlight(crew.fleet, ledger, restored)
    rounds: Rounds | None = None
    if in_rounds(plan.recipe):
        rounds = Rounds(crew.fleet.generate, lambda: controller.tickets, plan.recipe.engine.count)
        in_flight = WholeGroups(rounds, ledger)
    workflow: Workflow = SingleTurn(in_flight.generate, crew.rewards.score_group, plan.tokenizer.decode, plan.sampling)
    return in_flight, workflow if rounds is None else rounds.together(workflow)


def _checkpointing(
    plan: Plan, folder: RunFolder, beginning: StartState, ledger: Ledger, crew: Roles, controller: Controller
) -> Checkpointing:
    recipe = plan.recipe
    return Checkpointing(
        folder,
        Checkpoints(folder.checkpoints, recipe.store.keep_checkpoints),
        recipe.trainer,
        crew.trainer,
        controller,
        ledger,
        recipe.deadlines,
        beginning.saved_step,
    )


def _evaluator(plan: Plan, crew: Roles, recorder: Recorder) -> Evaluator:
    return Evaluator(
        plan.held_out,
        plan.sampling,
        plan.recipe.evaluation.seed,
        crew.fleet.generate,
        crew.rewards.score_group,
        plan.tokenizer.decode,
        recorder.examined,
        recorder.held_out,
    )


def _record_again(folder: RunFolder, updates: Sequence[Update], recorded: int, recorder: Recorder) -> None:
    """The run ended between a batch and the line of its step: the step was done again, and is recorded now."""
    for update in (update for update in updates if update.step > recorded):
        (batch,) = read_batches(folder.ledger, update.step - 1, update.step)
        for group in batch.groups:
            recorder.answered(group.prompt, group.trajectories)
        recorder.updated(batch, update)


async def _conduct(recipe: Recipe, conductor: Conductor, crew: Roles, stage: Reporter, stopped: StopSignal) -> None:
    """Evaluate, train, save, evaluate."""
    controller, recorder = conductor.controller, conductor.recorder
    checkpointing, evaluation = conductor.checkpointing, conductor.evaluation
    stopped.call(conductor.request_stop)
    if recorder.initial_accuracy is None:
        stage.say(f"{_phase(recipe, 2)}: measuring the held-out accuracy of version 0")
        await stopped.unless(evaluation.examine(controller.published))
    if not stopped.requested:
        # A run that was killed may have come as far as its checkpoint.
        await checkpointing.save_policy(controller.published)
        recorder.spans(await crew.poll_unless(stopped))
        stage.say(
            f"{_phase(recipe, 3)}: reinforcement learning, steps {controller.published + 1} to {recipe.trainer.steps}"
        )
        stage.say(_LEGEND)
        recorder.rl_begins()
        await conductor.run()
    if stopped.requested:
        crew.trainer.retire()  # a stop does not wait for another one to get here
    if crew.trainer.ready or not stopped.requested:
        await checkpointing.save_checkpoint()
        await checkpointing.save_policy(controller.published)
    else:
        stage.say(f"the trainer did not finish its step in time; --resume goes on from step {checkpointing.saved_step}")
    await stopped.unless(evaluation.end())
    recorder.spans(await crew.poll_unless(stopped))
    recorder.rl_ends(conductor.in_flight.unjudged)
    if not stopped.requested:
        stage.say("measuring the held-out accuracy of the last version")
        await stopped.unless(_examine_last(crew.fleet, evaluation, controller.published))


async def _examine_last(fleet: EnginePool, evaluation: PeriodicEvaluation, version: int) -> None:
    await fleet.reach(version)
    await evaluation.examine(version)
