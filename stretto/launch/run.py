"""One run from its plan to its summary: the roles are started, the conductor conducts, everything is put away.

plan ─► warm start ─► policy/v000000 ─► roles up ─► evaluate ─► conduct ─► evaluate ─► roles down ─► plots
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from stretto.core.events import Span
from stretto.core.records import Update
from stretto.launch.answers import Answers, restore
from stretto.launch.conductor import Conductor, Players
from stretto.launch.engine_role import EngineSpec
from stretto.launch.evaluation import Evaluator
from stretto.launch.fleet import Fleet
from stretto.launch.keeper import Examiner, Keeper
from stretto.launch.lineage import Lineage
from stretto.launch.plan import Plan, digest
from stretto.launch.recipe import Recipe
from stretto.launch.recorder import Past, Recorder, RunClock, Work
from stretto.launch.rounds import Rounds
from stretto.launch.stage import Stage
from stretto.launch.stopping import Stopped, beside, together
from stretto.launch.trainer_link import TrainerLink
from stretto.launch.trainer_role import TrainerSpec
from stretto.launch.warm_start import copy_policy, warm_start
from stretto.rewards.pool import RewardPool
from stretto.rollout.controller import Controller, Standing
from stretto.rollout.prompts import PromptStream
from stretto.rollout.workflow import SingleTurn, Workflow
from stretto.store.checkpoints import Checkpoints
from stretto.store.inspection import TOTALS, Totals
from stretto.store.ledger import Ledger
from stretto.store.metrics import rewind_metrics
from stretto.store.reading import last_step, read_batches, read_unfinished
from stretto.store.run_folder import RunFolder
from stretto.weights.shared_memory import remove, shared_folder

STANDING = "standing"  #: where the controller stood, in the ledger
_STOP_GRACE = 1.0
_LAST_LOOK_SECONDS = 1.0
_LONGEST_SOCKET_FOLDER = 70


@dataclass(frozen=True)
class Roles:
    """The processes of a run, and where they meet."""

    fleet: Fleet
    trainer: TrainerLink
    rewards: RewardPool

    async def look(self, patience: float | None = None) -> list[Span]:
        """Ask the engines how they are (`work` counts that), each for `patience` seconds at most; what everybody did
        since the last look."""
        return [*await self.fleet.look(patience), *self.trainer.drain_spans(), *self.rewards.drain_spans()]

    async def look_unless(self, stopped: Stopped) -> list[Span]:
        """`look`; but a requested stop waits no longer than a second for an engine that does not reply."""
        spans = None if stopped.requested else await stopped.unless(self.look())
        return await self.look(_LAST_LOOK_SECONDS) if spans is None else spans

    async def supervise(self) -> NoReturn:
        """Replace engines that die, for as long as it is awaited; a trainer that dies is raised."""
        await together(self.fleet.supervise(), self.trainer.supervise())
        raise AssertionError("a watcher never ends by itself")

    def progress(self) -> object:
        """Changes whenever a role gets anything done; engines as they were looked at last."""
        work = self.work()
        busy = {role: seconds for role, seconds in (work.busy or {}).items() if role != "conductor"}
        return work.generated, work.recomputed, busy

    def work(self) -> Work:
        """What everybody has done so far; engines as they were looked at last."""
        busy = self.fleet.busy() | {
            "trainer": self.trainer.busy_seconds,
            "rewards": self.rewards.busy_seconds / self.rewards.workers,
            "conductor": time.process_time(),
        }
        return Work(
            generated=round(self.fleet.counted(lambda health: health.generated)),
            recomputed=round(self.fleet.counted(lambda health: health.recomputed)),
            stopped=round(self.fleet.counted(lambda health: health.wasted)),
            unfinished=round(self.fleet.counted(lambda health: health.unfinished)),
            busy=busy,
        )


@dataclass(frozen=True)
class Beginning:
    """Where a run begins: at its start, or behind the last batch on record."""

    version: int = 0
    saved_step: int = 0  # of the checkpoint from which the trainer gets there
    broken: tuple[str, ...] = ()  # what is wrong with newer checkpoints

    @classmethod
    def of(cls, folder: RunFolder, keep: int) -> Beginning:
        """Behind the last batch of the ledger.

        Raises:
            StoreError: the ledger, or every checkpoint, is broken.
        """
        version = last_step(folder.ledger)
        checkpoint = Lineage(folder, keep).newest(version)
        return cls(version, checkpoint.step, checkpoint.broken) if checkpoint is not None else cls(version)


async def run(plan: Plan, folder: RunFolder, beginning: Beginning, stage: Stage) -> int:
    """Train from `beginning` to the recipe's last step; the exit code: 0, or 128 + the signal that stopped it.

    Raises:
        StrettoError: what the run could not go on from; its folder stays resumable from the last checkpoint.
    """
    stopped, began = Stopped(), time.monotonic()
    if not folder.policy(0).exists():
        source = await stopped.unless(warm_start(plan, folder.role_log("warm-start"), stage.learning))
        if source is None:
            return stopped.exit_code
        copy_policy(source, folder.policy(0))
    ledger = Ledger(folder.ledger, plan.recipe.store)
    try:
        for sentence in beginning.broken:
            stage.say(f"a newer checkpoint is not whole: {sentence}")
        _forget_what_came_later(plan, folder, beginning)
        rewind_metrics(folder.metrics, ledger.last_update())
        totals = ledger.get(TOTALS, Totals)
        past = Past() if totals is None else Past.of(totals)
        ledger.put("seed", plan.recipe.seed)
        async with roles(plan, folder, beginning, stopped) as crew:
            for fact in crew.rewards.facts.values():
                stage.say(fact)
            if not stopped.requested:
                recorder = Recorder(
                    folder, ledger, stage, crew.work, plan.recipe.rollout.max_staleness, past, RunClock(past, began)
                )
                await _train(plan, folder, beginning, ledger, crew, recorder, stage, stopped)
        return stopped.exit_code
    finally:
        ledger.close()


def _forget_what_came_later(plan: Plan, folder: RunFolder, beginning: Beginning) -> None:
    """Broken checkpoints must not pass for the newest ones; a policy without its batch on record is of no lineage."""
    for path in folder.policies.glob("v*"):
        if path > folder.policy(beginning.version):
            shutil.rmtree(path)
    Checkpoints(folder.checkpoints, plan.recipe.store.keep_checkpoints).set_aside_after(beginning.saved_step)


async def _train(
    plan: Plan,
    folder: RunFolder,
    beginning: Beginning,
    ledger: Ledger,
    crew: Roles,
    recorder: Recorder,
    stage: Stage,
    stopped: Stopped,
) -> None:
    recipe = plan.recipe
    standing = ledger.get(STANDING, Standing) or Standing()
    stream = PromptStream(plan.training, recipe.seed, standing.position)
    controller = Controller(
        recipe.rollout, stream, ledger, plan.sampling, recipe.seed, beginning.version, in_rounds(recipe)
    )
    begun = restore(controller, standing, read_unfinished(folder.ledger))
    ledger.watch(STANDING, controller.standing)
    checkpoints = Checkpoints(folder.checkpoints, recipe.store.keep_checkpoints)
    keeper = Keeper(
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
    )
    examiner = Examiner(evaluator, recorder, recipe.evaluation.every)
    rounds = Rounds(crew.fleet, lambda: controller.tickets, recipe.engine.count) if in_rounds(recipe) else None
    answers = Answers(rounds or crew.fleet, ledger, begun, whole=rounds is not None)
    workflow: Workflow = SingleTurn(answers.generate, crew.rewards.score_group, plan.tokenizer.decode)
    workflow = workflow if rounds is None else rounds.together(workflow)
    players = Players(
        controller, workflow, crew.fleet, crew.trainer, crew.look, recorder, keeper, examiner, answers, crew.progress
    )
    _record_again(folder, crew.trainer.replayed, ledger.last_update(), recorder)

    def report(sentence: str) -> None:
        stage.say(sentence)
        ledger.event("replaced", sentence)

    crew.fleet.report_to(report)
    crew.trainer.report_to(report)
    try:
        await _conduct(recipe, players, crew, stage, stopped)
    finally:
        await examiner.close()
    recorder.conclude()


def _record_again(folder: RunFolder, updates: Sequence[Update], recorded: int, recorder: Recorder) -> None:
    """The run ended between a batch and the line of its step: the step was done again, and is recorded now."""
    for update in (update for update in updates if update.step > recorded):
        (batch,) = read_batches(folder.ledger, update.step - 1, update.step)
        for group in batch.groups:
            recorder.answered(group.trajectories)
        recorder.updated(batch, update)


async def _conduct(recipe: Recipe, players: Players, crew: Roles, stage: Stage, stopped: Stopped) -> None:
    """Evaluate, train, save, evaluate."""
    controller, recorder, keeper, examiner = players.controller, players.recorder, players.keeper, players.examiner
    conductor = Conductor(players, recipe.trainer.steps, recipe.deadlines)
    stopped.call(conductor.request_stop)
    if recorder.initial_accuracy is None:
        stage.say("measuring the held-out accuracy of version 0")
        await stopped.unless(beside(crew.supervise(), examiner.examine(controller.published)))
    if not stopped.requested:
        await keeper.save_policy(controller.published)  # a run that was killed may have come as far as its checkpoint
        recorder.spans(await crew.look_unless(stopped))
        recorder.rl_begins()
        await conductor.run()
    if crew.trainer.ready:
        await keeper.save_checkpoint()
        await keeper.save_policy(controller.published)
    else:
        stage.say(f"the trainer did not finish its step in time; --resume goes on from step {keeper.saved_step}")
    await stopped.unless(beside(crew.supervise(), examiner.end()))
    recorder.spans(await crew.look_unless(stopped))
    recorder.rl_ends(players.answers.unjudged)
    if not stopped.requested:
        stage.say("measuring the held-out accuracy of the last version")
        await stopped.unless(beside(crew.supervise(), _examine_last(crew.fleet, examiner, controller.published)))


async def _examine_last(fleet: Fleet, examiner: Examiner, version: int) -> None:
    await fleet.reach(version)
    await examiner.examine(version)


@asynccontextmanager
async def roles(plan: Plan, folder: RunFolder, beginning: Beginning, stopped: Stopped) -> AsyncIterator[Roles]:
    """Start every role, unless a stop is requested meanwhile; whatever happens, none of them, no socket and no shared
    memory is left afterwards."""
    recipe = plan.recipe
    sockets = socket_folder()
    mailbox = digest(folder.path.resolve())  # the folder's lock lets one run at a time use it
    mailbox_folder = shared_folder(plan.base.parameters * 4, sockets)
    remove(mailbox, mailbox_folder)  # of a run that was killed
    lineage = Lineage(folder, recipe.store.keep_checkpoints)
    trainer = TrainerLink(folder.role_log("trainer"), recipe.deadlines, lineage)
    specs = [
        engine_spec(plan, folder.policy(0), mailbox, mailbox_folder, sockets, k) for k in range(recipe.engine.count)
    ]
    fleet = Fleet(
        specs, folder.logs, recipe.deadlines, load_interval=recipe.engine.load_interval, alone=in_rounds(recipe)
    )
    rewards = RewardPool(recipe.rewards, log=folder.role_log("rewards"))
    spec = TrainerSpec(
        parent=os.getpid(),
        model=str(folder.policy(0)),
        mailbox=mailbox,
        mailbox_folder=str(mailbox_folder),
        trainer=recipe.trainer.model_dump_json(),
        algorithm=recipe.algorithm.model_dump_json(),
        sampling=plan.sampling,
        threads=recipe.trainer.threads,
    )
    # Steps that are done again may take longer than an engine waits for its first weights.
    weights, engines = trainer.start(spec, beginning.version), fleet.start(beginning.version)
    ways = (weights, engines) if beginning.version == beginning.saved_step else (_in_turn(weights, engines),)
    try:
        await stopped.unless(together(rewards.start(), *ways))
        record_facts(folder, rewards.facts)
        yield Roles(fleet, trainer, rewards)
    finally:
        try:
            ends = fleet.stop(_STOP_GRACE), trainer.stop(_STOP_GRACE), rewards.close()
            await asyncio.gather(*ends, return_exceptions=True)
        finally:  # also when a second signal cuts the wait short; the kernel ends the roles then
            remove(mailbox, mailbox_folder)
            shutil.rmtree(sockets, ignore_errors=True)


def record_facts(folder: RunFolder, facts: Mapping[str, str]) -> None:
    """What a reward says about itself, such as the level of its sandbox: ``rewards.json``."""
    if facts:
        folder.write("rewards.json", msgspec.json.format(msgspec.json.encode(facts)).decode() + "\n")


async def _in_turn(*coroutines: Coroutine[Any, Any, None]) -> None:
    for coroutine in coroutines:
        await coroutine


def in_rounds(recipe: Recipe) -> bool:
    """Whether groups begin and end together, so that a run can be repeated bit for bit (`launch.rounds`)."""
    batching = recipe.engine.batching
    return batching == "rounds" or (batching == "auto" and recipe.rollout.max_staleness == 0)


def socket_folder() -> Path:
    """A folder of its own whose path is short: a socket's has 107 bytes at most."""
    root = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="stretto-", dir=root if len(root) < _LONGEST_SOCKET_FOLDER else "/tmp"))


def engine_spec(
    plan: Plan, model: Path, mailbox: str, mailbox_folder: Path, sockets: Path, number: int, *, published: bool = True
) -> EngineSpec:
    """Engine `number` of a run; `published` False: nothing ever is, the folder is served as it is."""
    config = plan.recipe.engine
    unix = config.transport == "unix"
    return EngineSpec(
        parent=os.getpid(),
        name=f"engine-{number}",
        address=f"unix:{sockets}/engine-{number}.sock" if unix else f"127.0.0.1:{config.base_port + number}",
        model=str(model),
        mailbox=mailbox,
        mailbox_folder=str(mailbox_folder),
        config=config.model_dump_json(),
        threads=config.threads,
        publication_seconds=plan.recipe.deadlines.start if published else 0.0,
    )
