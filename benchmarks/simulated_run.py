"""A run with the real conductor, but with simulated machines and a simulated trainer (`benchmarks.fleet`).

Real: gate, machines, engine pool and HTTP clients, controller, ledger, journal of the completions in flight, recorder,
conductor. Simulated: the engines' completions, a trainer that replies at once, a reward that costs nothing, and a text
that is not decoded from the tokens.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, cast

import msgspec

from benchmarks.fleet import FleetReport, FleetSpec
from benchmarks.runs import RECIPE
from stretto.core.events import Span
from stretto.core.records import Batch, Outcome, Prompt, Sampling, Update, Verdict
from stretto.core.tasks import cancel_and_wait
from stretto.launch.assemble.roles import Roles
from stretto.launch.assemble.specs import Endpoints
from stretto.launch.preflight.plan import Plan
from stretto.launch.recipe.recipe import Recipe, load_recipe, to_toml
from stretto.launch.train import collected_seldom
from stretto.loop.checkpointing import Checkpointing
from stretto.loop.conductor import Conductor
from stretto.loop.engines.in_flight import InFlight
from stretto.loop.engines.pool import EnginePool
from stretto.loop.evaluation import Evaluations
from stretto.loop.records.recorder import Recorder
from stretto.loop.records.reporter import SilentReporter
from stretto.loop.records.totals import RunClock, next_tenure
from stretto.loop.trainer_link import TrainerLink
from stretto.processes.spawn import FRESH
from stretto.rewards.service.pool import RewardPool
from stretto.rollout.controller import CONTROLLER, Controller
from stretto.rollout.prompts import PromptStream
from stretto.rollout.single_turn import SingleTurn
from stretto.store.checkpoints import Checkpoints
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.schema import page_for
from stretto.store.run_folder import RunFolder
from stretto.store.totals import ENGINES, Totals
from stretto_app.extensions.machines import Cluster, identity_of

_PROMPTS = [Prompt(id=str(i), token_ids=tuple(range(64)), text=f"{i}?", answer=str(i)) for i in range(4096)]
_VERDICTS = (Verdict(outcome=Outcome.RIGHT, reward=1.0), Verdict(outcome=Outcome.WRONG, reward=0.0))
_POLL_SECONDS = 0.002
_PATIENCE = 300.0


@dataclass(frozen=True)
class Setting:
    """`seconds` is the mean time of a completion, 0 for none; `batch` and `in_flight` are numbers of groups; `core` is
    the core of the simulated machines, -1 for any."""

    engines: int
    steps: int
    batch: int = 512
    group: int = 16
    in_flight: int = 2048
    tokens: int = 64
    seconds: float = 0.0
    lease: float = 15.0
    core: int = -1

    def recipe(self) -> Recipe:
        """Recipe with the keys that a user would set."""
        words = {
            "rollout.batch_size": self.batch,
            "rollout.group_size": self.group,
            "rollout.max_in_flight": self.in_flight,
            "rollout.max_staleness": 4,
            "trainer.steps": self.steps,
            "trainer.minibatches": 1,
            "cluster.placer": '"given"',
            "cluster.listen": '"127.0.0.1:0"',
            "cluster.lease": self.lease,
            "store.sample_seconds": 0,
        }
        return load_recipe(RECIPE, [f"{key}={value}" for key, value in words.items()])


@dataclass
class _Trainer:
    """Trainer that replies at once."""

    progress: int = 0
    busy_seconds: float = 0.0

    async def train(self, batch: Batch) -> Update:
        self.progress += 1
        tokens = sum(trajectory.sampled_length for group in batch.groups for trajectory in group.trajectories)
        return Update(batch.step, batch.step, trained_tokens=tokens, masked_tokens=0, metrics={"loss": 0.5})

    async def published(self, version: int) -> None:
        """Does nothing, since its versions need not be written."""

    async def save_checkpoint(self, folder: Path, on_copied: Callable[[], None]) -> None:
        on_copied()
        (folder / "state").write_text("whole")

    async def save_policy(self, folder: Path) -> None:
        folder.mkdir()

    async def supervise(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    def drain_spans(self) -> list[Span]:
        return []


@dataclass
class _Rewards:
    """Rewards the first completion of each group."""

    busy_seconds: float = 0.0
    workers: int = 1

    async def score_group(self, prompt: str, completions: Sequence[str], answer: str) -> Sequence[Verdict]:
        return [_VERDICTS[min(number, 1)] for number, _ in enumerate(completions)]

    def drain_spans(self) -> list[Span]:
        return []


@dataclass(frozen=True)
class _Base:
    parameters: int = 1
    vocab_size: int = 1 << 20  # more than any token of a simulated machine


@dataclass(frozen=True)
class _Plan:
    """The parts of a plan that the cluster needs."""

    recipe: Recipe
    base: _Base = field(default_factory=_Base)


@dataclass
class Fleet:
    """The process of the simulated machines."""

    process: asyncio.subprocess.Process

    @classmethod
    async def started(cls, spec: FleetSpec) -> Fleet:
        """Start the process. Its engines listen; its machines have not joined yet."""
        words = ("-m", "benchmarks.fleet", msgspec.json.encode(spec).decode())
        pipe = asyncio.subprocess.PIPE
        fleet = cls(await asyncio.create_subprocess_exec(sys.executable, *words, stdin=pipe, stdout=pipe))
        assert await fleet._line() == b"ready\n"
        return fleet

    async def do(self, command: str) -> FleetReport:
        """Send a command: `go`, `report`, or `vanish N`."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())
        return msgspec.json.decode(await self._line(), type=FleetReport)

    async def _line(self) -> bytes:
        assert self.process.stdout is not None
        async with asyncio.timeout(_PATIENCE):
            return await self.process.stdout.readline()

    async def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()


@dataclass
class SimulatedRun:
    """A run as the module describes it; `conduct` may be called once."""

    setting: Setting
    folder: RunFolder
    ledger: Ledger
    pool: EnginePool
    cluster: Cluster
    roles: Roles
    fleet: Fleet
    said: list[str]

    async def all_up(self) -> None:
        """Let the machines join, and wait until every engine gets requests."""
        await self.fleet.do("go")
        up = 0
        async with asyncio.timeout(_PATIENCE):
            while up < self.setting.engines:
                await asyncio.sleep(_POLL_SECONDS)
                up = sum(engine.takes for engine in self.pool._engines.values())

    def conductor(self) -> Conductor:
        """A conductor, built as in `stretto.launch.assemble.run`."""
        recipe, trainer = self.cluster.plan.recipe, self.roles.trainer
        controller = Controller(recipe.rollout, PromptStream(_PROMPTS, recipe.seed), self.ledger, recipe.seed)
        self.ledger.watch(CONTROLLER, controller.state)
        self.ledger.watch(ENGINES, self.pool.roster.rows)
        past = Totals(max_staleness=None)
        clock = RunClock(past, time.monotonic())
        recorder = Recorder(
            self.folder, self.ledger, SilentReporter(), self.roles.work, recipe.rollout.staleness_bounds[1], past, clock
        )
        in_flight = InFlight(self.pool, self.ledger)
        self.pool.keep = in_flight.keep
        checkpoints = Checkpoints(self.folder.checkpoints, recipe.store.keep_checkpoints)
        keeping = (self.folder, checkpoints, recipe.trainer, trainer, controller, self.ledger, recipe.deadlines)
        return Conductor(
            controller=controller,
            workflow=SingleTurn(
                in_flight.generate,
                self.roles.rewards.score_group,
                lambda ids: f"{len(ids)} tokens",
                Sampling(max_tokens=self.setting.tokens),
            ),
            engines=self.pool,
            trainer=trainer,
            in_flight=in_flight,
            recorder=recorder,
            checkpointing=Checkpointing(*keeping),
            evaluation=Evaluations([]),
            poll=self.roles.poll,
            progress=self.roles.progress,
            steps=self.setting.steps,
            deadlines=recipe.deadlines,
        )

    async def conduct(self, beside: Callable[[], None] = lambda: None) -> None:
        """Do the whole training; `beside` is called once it has started."""
        conductor = self.conductor()
        conductor.recorder.rl_begins()
        beside()
        await conductor.run()
        await conductor.checkpointing.end()
        conductor.recorder.spans(await self.roles.poll())
        conductor.recorder.rl_ends()
        conductor.recorder.conclude()

    async def announce(self, version: int) -> None:
        """Publish a version, and wait until every engine has loaded it."""
        self.pool.publish(version)
        async with asyncio.timeout(_PATIENCE):
            while self.pool.live < version:
                await asyncio.sleep(_POLL_SECONDS)


@asynccontextmanager
async def simulated_run(setting: Setting, path: Path) -> AsyncIterator[SimulatedRun]:
    """A run in the folder `path`, with an open gate and machines that are about to join."""
    recipe, said = setting.recipe(), list[str]()
    with RunFolder.create(path) as folder, tempfile.TemporaryDirectory(prefix="stretto-simulated-") as scratch:
        folder.write("recipe.toml", to_toml(recipe))
        page = page_for(setting.batch * setting.group * setting.tokens)
        ledger = Ledger(folder.ledger, recipe.store, page=page)
        pool = EnginePool([], folder.logs, recipe.deadlines, lag=recipe.cluster.lag, say=said.append)
        plan, endpoints = cast(Plan, _Plan(recipe)), Endpoints("simulated", Path(scratch), Path(scratch))
        cluster = Cluster(plan, folder, endpoints, pool, said.append, FRESH, identity_of(folder), next_tenure(None))
        roles = Roles(pool, cast(TrainerLink, _Trainer()), cast(RewardPool, _Rewards()), cluster)
        await pool.start(0)
        address = await cluster.gate.open(recipe.cluster.listen)
        token = cluster.identity.token
        spec = FleetSpec(address, token, setting.engines, setting.tokens, setting.seconds, setting.core)
        fleet = await Fleet.started(spec)
        gc.collect()
        run = SimulatedRun(setting, folder, ledger, pool, cluster, roles, fleet, said)
        supervising = asyncio.ensure_future(roles.supervise())
        try:
            with collected_seldom():
                yield run
        finally:
            await cancel_and_wait([supervising])
            await pool.stop(1.0)
            await cluster.close("the run has ended", False)
            await fleet.end()
            ledger.close()
