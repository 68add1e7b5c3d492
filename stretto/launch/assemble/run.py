"""One run from its plan to its summary: the roles are started, the conductor conducts, everything is put away.

plan ─► warm start ─► policy/v000000 ─► roles up ─► evaluate ─► conduct ─► evaluate ─► roles down ─► plots
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.core.records import Update
from stretto.launch.assemble.roles import Roles, roles
from stretto.launch.assemble.specs import in_rounds
from stretto.launch.assemble.warm_start import copy_policy, warm_start
from stretto.launch.preflight.plan import Plan
from stretto.launch.recipe.recipe import Recipe
from stretto.loop.checkpointing import Checkpointing, PeriodicEvaluation
from stretto.loop.conductor import Components, Conductor
from stretto.loop.engines.in_flight import InFlight, restore
from stretto.loop.engines.pool import EnginePool
from stretto.loop.engines.rounds import Rounds
from stretto.loop.evaluation import Evaluator
from stretto.loop.learner.recovery import Recovery
from stretto.loop.records.recorder import EarlierTotals, Recorder, RunClock
from stretto.loop.records.reporter import Reporter
from stretto.loop.records.slow_reward import SlowReward
from stretto.processes.spawn import Spawner
from stretto.processes.stopping import StopSignal, run_beside
from stretto.rollout.controller import Controller, ControllerState
from stretto.rollout.prompts import PromptStream
from stretto.store.folder.checkpoints import Checkpoints
from stretto.store.folder.run_folder import RunFolder
from stretto.store.inspection import TOTALS, Totals
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import last_step, read_batches, read_unfinished
from stretto.store.samples import rewind_samples
from stretto.store.series.metrics import rewind_metrics
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


async def run(plan: Plan, folder: RunFolder, beginning: StartState, stage: Reporter, starter: Spawner) -> int:
    """Train from `beginning` to the recipe's last step; the exit code: 0, or 128 + the signal that stopped it.

    Raises:
        StrettoError: what the run could not go on from; its folder stays resumable from the last checkpoint.
    """
    stopped, began = StopSignal(), time.monotonic()
    stopped.call(lambda: stage.say(_stopping(plan, folder)))
    if not folder.policy(0).exists():
        source = await stopped.unless(
            warm_start(plan, folder.role_log("warm-start"), stage.learning, starter, stage.say)
        )
        if source is None:
            return stopped.exit_code
        copy_policy(source, folder.policy(0))
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
        async with roles(plan, folder, began_at, saved_at, stopped, report, starter) as crew:
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
    standing = ledger.get(STANDING, ControllerState) or ControllerState()
    stream = PromptStream(plan.training, recipe.seed, standing.position)
    controller = Controller(
        recipe.rollout, stream, ledger, plan.sampling, recipe.seed, beginning.version, in_rounds(recipe)
    )
    begun = restore(controller, standing, read_unfinished(folder.ledger))
    ledger.watch(STANDING, controller.standing)
    checkpoints = Checkpoints(folder.checkpoints, recipe.store.keep_checkpoints)
    keeper = Checkpointing(
        folder, checkpoints, recipe.trainer, crew.trainer, controller, ledger, recipe.deadlines, beginning.saved_step
    )
    evaluator = Evaluator(
        plan.held_out,
        plan.sampling,
        recipe.evaluation.seed,
        crew.fleet.generate,
        crew.rewards.score_group,
        plan.tokenizer.decode,
        recorder.examined,
        recorder.held_out,
    )
    examiner = PeriodicEvaluation(evaluator, recorder, recipe.evaluation.every)
    rounds = Rounds(crew.fleet, lambda: controller.tickets, recipe.engine.count) if in_rounds(recipe) else None
    answers = InFlight(rounds or crew.fleet, ledger, begun, whole=rounds is not None)
    workflow: Workflow = SingleTurn(answers.generate, crew.rewards.score_group, plan.tokenizer.decode)
    workflow = workflow if rounds is None else rounds.together(workflow)
    players = Components(
        controller, workflow, crew.fleet, crew.trainer, crew.look, recorder, keeper, examiner, answers, crew.progress
    )
    _record_again(folder, crew.trainer.replayed, ledger.last_update(), recorder)
    try:
        await _conduct(recipe, players, crew, stage, stopped)
    finally:
        await examiner.close()
        await keeper.close()
    recorder.conclude()


def _record_again(folder: RunFolder, updates: Sequence[Update], recorded: int, recorder: Recorder) -> None:
    """The run ended between a batch and the line of its step: the step was done again, and is recorded now."""
    for update in (update for update in updates if update.step > recorded):
        (batch,) = read_batches(folder.ledger, update.step - 1, update.step)
        for group in batch.groups:
            recorder.answered(group.prompt, group.trajectories)
        recorder.updated(batch, update)


async def _conduct(recipe: Recipe, players: Components, crew: Roles, stage: Reporter, stopped: StopSignal) -> None:
    """Evaluate, train, save, evaluate."""
    controller, recorder, keeper, examiner = players.controller, players.recorder, players.keeper, players.examiner
    conductor = Conductor(players, recipe.trainer.steps, recipe.deadlines)
    stopped.call(conductor.request_stop)
    if recorder.initial_accuracy is None:
        stage.say(f"{_phase(recipe, 2)}: measuring the held-out accuracy of version 0")
        await stopped.unless(examiner.examine(controller.published))
    if not stopped.requested:
        await keeper.save_policy(controller.published)  # a run that was killed may have come as far as its checkpoint
        recorder.spans(await crew.look_unless(stopped))
        stage.say(
            f"{_phase(recipe, 3)}: reinforcement learning, steps {controller.published + 1} to {recipe.trainer.steps}"
        )
        stage.say(_LEGEND)
        recorder.rl_begins()
        await conductor.run()
    if stopped.requested:
        crew.trainer.retire()  # a stop does not wait for another one to get here
    if crew.trainer.ready or not stopped.requested:
        await keeper.save_checkpoint()
        await keeper.save_policy(controller.published)
    else:
        stage.say(f"the trainer did not finish its step in time; --resume goes on from step {keeper.saved_step}")
    await stopped.unless(examiner.end())
    recorder.spans(await crew.look_unless(stopped))
    recorder.rl_ends(players.answers.unjudged)
    if not stopped.requested:
        stage.say("measuring the held-out accuracy of the last version")
        await stopped.unless(_examine_last(crew.fleet, examiner, controller.published))


async def _examine_last(fleet: EnginePool, examiner: PeriodicEvaluation, version: int) -> None:
    await fleet.reach(version)
    await examiner.examine(version)
