"""A run that is killed at any of its records, and resumed, comes to what it would have come to.

- At every write of the ledger, of a line of metrics and of ``best.json``, before it and after it: the evaluations on
  record, the initial accuracy, the best policy and the reason of an early end are those of the run that was not killed.
- Every step has one line of metrics, and an update on record.

The kill is one: a forked process ends with ``os._exit`` in the midst of a run whose ledger is flushed as often as it
can be.
"""

import asyncio
import json
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stretto.core.records import Update
from stretto.launch.assemble.run import StartState, _conduct, _drop_what_came_later, _record_again
from stretto.loop.conductor import Conductor
from stretto.loop.evaluation import BestPolicy, Evaluations, PeriodicEvaluation
from stretto.loop.records.evaluation import Evaluation
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import last_step
from stretto.store.run_folder import RunFolder
from stretto.store.series.lines import LineWriter
from stretto.store.series.metrics import read_metrics
from stretto.store.totals import TOTALS, Totals
from tests.loop.conducting import Stage, ToyTrainer
from tests.store.make import ledger_at

KILLED, STEPS, EVERY = 9, 6, 2
RISING = {0: 0.1, 2: 0.9, 4: 0.5, 6: 0.4}
FALLING = {0: 0.9, 2: 0.5, 4: 0.4, 6: 0.3}
HELD = {0: 0.9, 2: 0.2, 4: 0.9, 6: 0.9}


class OneTrainer(ToyTrainer):
    """Its policies say which version they are."""

    version = 0
    ready = True

    async def train(self, batch: Any) -> Update:
        update = await super().train(batch)
        self.version = update.version
        return update

    async def save_policy(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(f"version {self.version}")


class Told(PeriodicEvaluation):
    """Its accuracy is that of the table."""

    step = 0

    async def evaluate(self, step: int) -> None:
        self.step = step
        await super().evaluate(step)


class Roles:
    """What a run asks of its roles, beside the toys."""

    def __init__(self, trainer: OneTrainer) -> None:
        self.trainer, self.engines = trainer, self

    async def reach(self, version: int) -> None: ...

    async def poll_unless(self, stop: object) -> list[Any]:
        return []


class Unstopped:
    """Stop signals of a run: none ever comes."""

    requested = False

    def call(self, action: Callable[[], None]) -> None: ...

    async def unless(self, work: Any) -> Any:
        return await work


@dataclass
class Life:
    """One process of the run at `path`, which is killed before its record number `killed_at`, if it comes to that."""

    path: Path
    accuracy: dict[int, float]
    settings: dict[str, Any]
    killed_at: int | None = None
    records: int = 0

    def run(self) -> int:
        """Fork; the exit status of the child."""
        if child := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        try:
            self._count_records()
            self.live()
            (self.path / "records").write_text(str(self.records))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _count_records(self) -> None:
        for owner, name in ((Ledger, "_execute"), (LineWriter, "_write"), (RunFolder, "write")):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def counted(owner: object, *args: Any) -> Any:
            if not isinstance(owner, Ledger) or args[0] == "COMMIT":
                if self.records == self.killed_at:
                    os._exit(KILLED)
                self.records += 1
            return write(owner, *args)

        return counted

    def live(self) -> None:
        """In this process, to the end."""
        with RunFolder.resume(self.path) as folder, ledger_at(folder.ledger, flush_seconds=0) as ledger:
            asyncio.run(asyncio.wait_for(self._conduct(folder, ledger), 30))

    async def _conduct(self, folder: RunFolder, ledger: Ledger) -> None:
        version = last_step(folder.ledger)
        trainer = OneTrainer()
        trainer.version = version
        stage = Stage(folder, ledger, trainer=trainer)
        stage.fleet.version = version
        recipe = SimpleNamespace(
            store=SimpleNamespace(keep_checkpoints=2), trainer=SimpleNamespace(steps=STEPS), warm_start=None
        )
        context = SimpleNamespace(
            plan=SimpleNamespace(recipe=recipe),
            folder=folder,
            start=StartState(version),
            ledger=ledger,
            reporter=stage,
            stop=Unstopped(),
        )
        if not folder.policy(0).exists():
            folder.policy(0).mkdir()
            (folder.policy(0) / "weights").write_text("version 0")
        _drop_what_came_later(cast(Any, context))
        conductor = stage.conductor(STEPS, {})
        conductor.evaluation = evaluations = self._evaluations(stage, conductor)
        again = [Update(step, step, 8, 0, {"loss": 0.5}) for step in range(1, version + 1)]
        _record_again(cast(Any, context), again, conductor.controller, conductor.recorder)
        await _conduct(cast(Any, context), cast(Any, Roles(trainer)), conductor)
        await conductor.checkpointing.end()
        await evaluations.close()
        conductor.recorder.conclude()
        ledger.flush()
        early = evaluations.why if conductor.controller.published < STEPS else ""
        (self.path / "why").write_text(early)

    def _evaluations(self, stage: Stage, conductor: Conductor) -> Evaluations:
        earlier = conductor.recorder.on_record.get("", ())
        best = BestPolicy(stage.folder, stage.say, earlier=earlier, **self.settings)

        async def measured() -> Evaluation:
            await asyncio.sleep(0)
            right = round(10 * self.accuracy[one.step - one.step % EVERY])
            return Evaluation(version=one.step, prompts=10, right=right, undecided=0, tokens=10)

        one = Told(measured, conductor.recorder, EVERY, best=best, earlier=earlier)
        return Evaluations([one], best)


def outcome(path: Path) -> dict[str, Any]:
    """What the run at `path` has come to, and what must be so of any run."""
    folder = RunFolder(path)
    steps, evaluations = read_metrics(folder.metrics)
    with ledger_at(folder.ledger) as ledger:
        totals = ledger.get(TOTALS, Totals)
        assert [step.step for step in steps] == list(range(1, ledger.last_update() + 1))
        assert ledger.last_update() == ledger.last_step()
    assert totals is not None
    best = folder.path / "best.json"
    kept = folder.policies / "best" / "weights"
    return {
        "evaluations": [(line.step, line.accuracy) for line in evaluations if line.step % EVERY == 0],
        "initial": totals.initial_accuracy,
        "best": json.loads(best.read_text()) if best.exists() else None,
        "policy": kept.read_text() if kept.exists() else None,
        "why": (path / "why").read_text(),
    }


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, since a disk takes milliseconds for each commit of some thousands."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("accuracy", "settings", "decided"),
    [
        (RISING, {"keeps": True}, 4),
        (FALLING, {"keeps": False, "patience": 1}, 2),
        (HELD, {"keeps": True, "goal": 0.9, "goal_holds": 2}, 4),
    ],
)
def test_a_run_killed_at_any_record_comes_to_what_it_would_have_come_to(
    memory: Path, accuracy: dict[int, float], settings: dict[str, Any], decided: int
) -> None:
    """Training ends a step or more after the evaluation that decides, and the reason counts what came until then:
    `decided` evaluations come in any case."""

    def begun(name: str) -> Path:
        with RunFolder.create(memory / name) as folder:
            with ledger_at(folder.ledger) as ledger:
                ledger.put("seed", 1)
            return folder.path

    def come_to(path: Path) -> dict[str, Any]:
        found = outcome(path)
        return found | {"evaluations": found["evaluations"][:decided], "why": found["why"].partition(" better ")[2]}

    whole = begun("whole")
    assert Life(whole, accuracy, settings).run() == 0
    expected = come_to(whole)
    assert expected["evaluations"] == list(accuracy.items())[:decided]
    assert expected["initial"] == accuracy[0]
    for at in range(int((whole / "records").read_text())):
        path = begun(f"killed-{at}")
        ended = Life(path, accuracy, settings, killed_at=at).run()
        assert ended in (0, KILLED)  # the timing of tasks may save a flush
        if ended == KILLED:
            Life(path, accuracy, settings).live()
        assert come_to(path) == expected, f"killed before record {at}"
