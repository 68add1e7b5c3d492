"""One run from its plan to its summary: the roles are started, the conductor conducts, everything is put away.

plan ─► warm start ─► policy/v000000 ─► roles up ─► evaluate ─► conduct ─► evaluate ─► roles down ─► plots
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from stretto.core.events import Span
from stretto.launch.conductor import Conductor, Players
from stretto.launch.engine_role import EngineSpec
from stretto.launch.evaluation import Evaluator
from stretto.launch.fleet import Fleet
from stretto.launch.keeper import ConductorState, Examiner, Keeper, read_conductor_state
from stretto.launch.plan import Plan, digest
from stretto.launch.recipe import Recipe
from stretto.launch.recorder import Past, Recorder, RunClock, Work
from stretto.launch.stage import Stage
from stretto.launch.stopping import Stopped, beside, together
from stretto.launch.trainer_link import TrainerLink
from stretto.launch.trainer_role import TrainerSpec
from stretto.launch.warm_start import copy_policy, warm_start
from stretto.rewards.pool import RewardPool
from stretto.rollout.controller import Controller
from stretto.rollout.prompts import Position, PromptStream
from stretto.rollout.workflow import SingleTurn
from stretto.store.checkpoints import Checkpoint, Checkpoints
from stretto.store.inspection import TOTALS, Totals
from stretto.store.ledger import Ledger
from stretto.store.metrics import rewind_metrics
from stretto.store.run_folder import RunFolder
from stretto.weights.shared_memory import remove, shared_folder

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
            busy=busy,
        )


@dataclass(frozen=True)
class Beginning:
    """Where a run begins: at the start, or at a checkpoint."""

    version: int = 0
    position: Position = field(default_factory=Position)
    past: Past = field(default_factory=Past)
    checkpoint: Path | None = None
    broken: tuple[str, ...] = ()  # what is wrong with newer checkpoints

    @classmethod
    def at(cls, checkpoint: Checkpoint) -> Beginning:
        state: ConductorState = read_conductor_state(checkpoint.path)
        return cls(state.step, state.position, state.past, checkpoint.path, checkpoint.broken)


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
        _forget_what_came_later(plan, folder, beginning.version)
        ledger.abandon()
        if (ledger.last_step() or 0) > beginning.version:
            ledger.rewind(beginning.version)
        rewind_metrics(folder.metrics, beginning.version)
        totals = ledger.get(TOTALS, Totals)
        past = beginning.past if totals is None else Past.of(totals)
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


def _forget_what_came_later(plan: Plan, folder: RunFolder, version: int) -> None:
    """Policies and broken checkpoints of steps that are to be done again must not pass for the newest ones."""
    for path in folder.policies.glob("v*"):
        if path > folder.policy(version):
            shutil.rmtree(path)
    Checkpoints(folder.checkpoints, plan.recipe.store.keep_checkpoints).set_aside_after(version)


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
    stream = PromptStream(plan.training, recipe.seed, beginning.position)
    controller = Controller(recipe.rollout, stream, ledger, plan.sampling, recipe.seed, beginning.version)
    checkpoints = Checkpoints(folder.checkpoints, recipe.store.keep_checkpoints)
    keeper = Keeper(folder, checkpoints, recipe.trainer, crew.trainer, controller, recorder, recipe.deadlines)
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
    workflow = SingleTurn(crew.fleet.generate, crew.rewards.score_group, plan.tokenizer.decode)
    players = Players(controller, workflow, crew.fleet, crew.trainer, crew.look, recorder, keeper, examiner)

    def report(sentence: str) -> None:
        stage.say(sentence)
        ledger.event("engine", sentence)

    crew.fleet.report_to(report)
    try:
        await _conduct(recipe, players, crew, stage, stopped)
    finally:
        await examiner.close()
    recorder.conclude()


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
    recorder.rl_ends()
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
    trainer = TrainerLink(folder.role_log("trainer"), recipe.deadlines)
    specs = [
        engine_spec(plan, folder.policy(0), mailbox, mailbox_folder, sockets, k) for k in range(recipe.engine.count)
    ]
    fleet = Fleet(specs, folder.logs, recipe.deadlines, load_interval=recipe.engine.load_interval)
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
        checkpoint=str(beginning.checkpoint) if beginning.checkpoint else None,
    )
    try:
        await stopped.unless(together(rewards.start(), trainer.start(spec), fleet.start(beginning.version)))
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
