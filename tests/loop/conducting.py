"""A whole run: the real conductor, controller, completions in flight, ledger, recorder and checkpointing; engines and
trainer are toys.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

from stretto.core.events import Span
from stretto.core.records import Batch, Completion, GenerateRequest, Partials, Sampling, Update, Verdict
from stretto.loop.checkpointing import Checkpointing
from stretto.loop.conductor import Conductor
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.in_flight import InFlight, restore
from stretto.loop.engines.pool import EnginePool
from stretto.loop.evaluation import Evaluations, PeriodicEvaluation
from stretto.loop.records.evaluation import Evaluation
from stretto.loop.records.recorder import Recorder
from stretto.loop.records.reporter import SilentReporter
from stretto.loop.records.totals import RunClock, Work
from stretto.loop.trainer_link import TrainerLink
from stretto.rollout.adaptive import Pressure
from stretto.rollout.config import RolloutConfig
from stretto.rollout.controller import Controller, ControllerState
from stretto.rollout.prompts import PromptStream
from stretto.rollout.single_turn import SingleTurn
from stretto.store.checkpoints import Checkpoints
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import read_unfinished
from stretto.store.run_folder import RunFolder
from stretto.store.totals import Totals
from stretto.trainer.config import TrainerConfig
from tests.store.make import RIGHT, WRONG, completion, prompts, sampled, spelled

PROMPTS = prompts(20)
OUTCOMES = (RIGHT, WRONG)


@dataclass
class ToyFleet:
    """One engine that answers after `seconds` with the version it has loaded; `ills` go wrong first."""

    seconds: float = 0.001
    ills: list[Exception] = field(default_factory=list)
    version: int = 0
    on_load: Callable[[int], None] = print
    published: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[str] = field(default_factory=list)
    cut_off: int = 0
    on_pressure: Callable[[], None] = print
    written_for: list[int] = field(default_factory=list)  # how many answers, each time that it was asked

    def listen(self, on_load: Callable[[int], None]) -> None:
        self.on_load = on_load

    async def generate(self, request: GenerateRequest, *, least: int = 0) -> AsyncIterator[Completion]:
        self.asked.append(request.id)
        version = self.version
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cut_off += 1
            raise
        if self.ills:
            raise self.ills.pop()
        for member, _ in enumerate(request.seeds):
            yield completion(request.id, member, (version, version))

    open = frozenset[str]()
    absence = ""
    gave_up = frozenset[str]()

    async def give_up(self, spared: Callable[[str], bool]) -> None:
        self.gave_up = frozenset(id for id in self.open if not spared(id))

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials:
        """One token of the first completion of each group, once."""
        self.written_for.append(len(known))
        piece = sampled((self.version,), stop=None)
        return {id: {0: piece} for id, counts in known.items() if counts and not counts[0]}

    def publish(self, version: int) -> None:
        self.version = version
        self.published.set()

    async def keep_loaded(self) -> NoReturn:
        while True:
            await self.published.wait()
            self.published.clear()
            self.on_load(self.version)

    def pressure(self) -> Pressure:
        """It is asked once a second; a run whose number has grown is to end then."""
        self.on_pressure()
        return Pressure(needed=0.1)

    async def poll(self, patience: float | None) -> list[Span]:
        return [Span(role="engine-0", name="generate", start=0.0, end=1.0)]


@dataclass
class ToyTrainer:
    """Trains after `seconds`, and writes the version for `writing` more; `ill` is raised at the step `ill_at`."""

    seconds: float = 0.002
    writing: float = 0.0
    ill: Exception | None = None
    ill_at: int = 3
    measured: Mapping[str, float] = field(default_factory=lambda: {"loss": 0.5})
    batches: list[Batch] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)

    async def train(self, batch: Batch) -> Update:
        await asyncio.sleep(self.seconds)
        if self.ill is not None and batch.step == self.ill_at:
            raise self.ill
        self.batches.append(batch)
        return Update(step=batch.step, version=batch.step, trained_tokens=8, masked_tokens=0, metrics={**self.measured})

    async def published(self, version: int) -> None:
        await asyncio.sleep(self.writing)

    async def save_checkpoint(self, folder: Path, on_copied: Callable[[], None]) -> None:
        on_copied()
        (folder / "state").write_text("whole")

    async def save_policy(self, folder: Path) -> None:
        self.saved.append(folder.name)
        folder.mkdir()

    def drain_spans(self) -> list[Span]:
        return []


async def score(prompt: str, completions: Sequence[str], answer: str) -> Sequence[Verdict]:
    """The first is right, the others are wrong."""
    return [OUTCOMES[min(number, 1)] for number, _ in enumerate(completions)]


@dataclass
class Stage(SilentReporter):
    """A whole run with toys; `conductor` is made within the event loop, by `play`."""

    folder: RunFolder
    ledger: Ledger
    fleet: ToyFleet = field(default_factory=ToyFleet)
    trainer: ToyTrainer = field(default_factory=ToyTrainer)
    evaluations: int = 0
    said: list[str] = field(default_factory=list)
    progress: Callable[[], object] = lambda: None

    def say(self, text: str) -> None:
        self.said.append(text)

    async def evaluate(self) -> Evaluation:
        self.evaluations += 1
        await asyncio.sleep(0)
        return Evaluation(version=self.fleet.version, prompts=4, right=2, undecided=0, tokens=8)

    def play(self, stop_after: float | None = None, steps: int = 6, **settings: Any) -> Controller:
        """Conduct to the end; a stop is requested after `stop_after` seconds."""
        return asyncio.run(asyncio.wait_for(self._play(stop_after, steps, settings), 30))

    def conductor(self, steps: int, settings: dict[str, Any]) -> Conductor:
        """The whole run from where its ledger stands, within the event loop."""
        patience = settings.pop("deadlines", {})
        every, best = settings.pop("evaluate_every", 0), settings.pop("best", None)
        defaults = {"batch_size": 2, "group_size": 2, "max_in_flight": 6, "max_staleness": 1}
        config = RolloutConfig.model_validate(defaults | settings)
        state = self.ledger.get("standing", ControllerState) or ControllerState()
        stream = PromptStream(PROMPTS, seed=1, position=state.position)
        begins = self.ledger.last_step() or 0
        controller = Controller(config, stream, self.ledger, seed=1, version=begins, state=state)
        past = Totals(max_staleness=None)
        recorder = Recorder(
            self.folder, self.ledger, self, Work, config.staleness_bounds[1], past, RunClock(past, time.monotonic())
        )
        link = cast(TrainerLink, self.trainer)
        checkpoints = Checkpoints(self.folder.checkpoints)
        training = TrainerConfig(checkpoint_every=3, keep_versions=1)
        deadlines = DeadlinesConfig.model_validate(patience)
        checkpointing = Checkpointing(self.folder, checkpoints, training, link, controller, self.ledger, deadlines)
        in_flight = InFlight(self.fleet, self.ledger, restore(controller, state, read_unfinished(self.folder.ledger)))
        self.ledger.watch("standing", controller.state)
        conductor = Conductor(
            controller=controller,
            workflow=SingleTurn(in_flight.generate, score, spelled, Sampling(max_tokens=4)),
            engines=cast(EnginePool, self.fleet),
            trainer=link,
            in_flight=in_flight,
            recorder=recorder,
            checkpointing=checkpointing,
            evaluation=Evaluations([PeriodicEvaluation(self.evaluate, recorder, every, best=best)], best),
            poll=self.fleet.poll,
            progress=self.progress,
            steps=steps,
            deadlines=deadlines,
        )
        least, _ = config.in_flight_bounds
        self.fleet.on_pressure = lambda: conductor.request_stop() if controller.max_in_flight > least else None
        return conductor

    async def _play(self, stop_after: float | None, steps: int, settings: dict[str, Any]) -> Controller:
        conductor = self.conductor(steps, settings)
        controller, checkpointing = conductor.controller, conductor.checkpointing
        if stop_after is not None:
            asyncio.get_running_loop().call_later(stop_after, conductor.request_stop)
        conductor.recorder.rl_begins()
        await conductor.run()
        await checkpointing.end()
        left = {task.get_name() for task in asyncio.all_tasks()} & set(self.fleet.asked)
        assert not left, "every request has ended"
        return controller
