"""What users suffered: a model is larger than whoever wrote a constant had in mind: its weights take 72 minutes to load
where the constant is 12, the order is given again to an engine that is still busy with the first, and the run dies
(prime-rl#3599, verl#2445, rllm#677).

Promises: a load that takes ten times its deadline and goes on is waited for, and ordered once; one that has come to a
standstill is named. The same holds for the load of the model, before an engine or the trainer can be asked. No wait of
minutes is a constant: each has its key in `[deadlines]`, and comes to where it is kept.
"""

import ast
import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from stretto.core.errors import DeadlineExceeded
from stretto.engine.config import EngineConfig
from stretto.engine.http.client import HttpEngine
from stretto.engine.http.server import run_server
from stretto.engine.native.engine import NativeEngine
from stretto.launch.assemble.specs import Endpoints, engine_specs, trainer_spec
from stretto.launch.preflight.plan import make_plan
from stretto.launch.recipe.recipe import load_recipe
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.pool import EnginePool
from stretto.loop.trainer_link import TrainerLink
from stretto.model.hf.folder import load_policy
from tests.engine.serving import Mailbox, until_up
from tests.launch.running import TINY
from tests.loop.test_pool import played as engines_played
from tests.loop.test_trainer_link import played as trainer_played

DEADLINE = 0.3
#: Seconds and more that stand in the code, and why no key is needed for them.
CONSTANTS = {
    ("address.py", "PATIENCE_SECONDS"): "--patience, if that is not given",
    ("succession.py", "_SEARCH_SECONDS"): "the search for an earlier conductor, beside the run",
    ("engine/http/lifecycle.py", "_CLIENT_IDLE_SECONDS"): "an idle connection; its client closes it",
    ("engine/http/lifecycle.py", "_IDLE_SECONDS"): "an idle connection of an arbitrary client",
    ("app.py", "_IDLE_SECONDS"): "an idle connection",
    ("sessions/sessions.py", "_IDLE_SECONDS"): "a session that gives way to a new one, where no room is left",
    ("extensions/commands/calibrate.py", "_PATIENCE"): "a measurement of a small model, which is no run",
    ("outlets/supervision.py", "HUNG_SECONDS"): "a tool that runs are shown in; the run does not wait for it",
    ("loop/engines/proving.py", "_CANARY_SECONDS"): "the canary of a version that is published: it comes with it",
    ("ranks/collectives.py", "PATIENCE"): "of a trainer without a run; a run gives its own",
    (
        "choices.py",
        "RUN_SECONDS",
    ): "other processes of the run; `deadlines.start` ends it earlier",
    ("http/archive.py", "_URL_SECONDS"): "how long an address of a download is good",
    ("http/service.py", "_KEPT_SECONDS"): "results of a session that has ended, which nobody waits for",
    ("http/service.py", "_SILENT_SECONDS"): "a client that says nothing gives its memory to others",
}


class SlowMailbox(Mailbox):
    """Versions whose load takes `seconds`; in each twentieth of them a part is read, unless it stands still."""

    def __init__(self, publications: Mapping[int, Mapping[str, Tensor]], seconds: float, still: bool = False) -> None:
        super().__init__(publications)
        self.seconds, self.still, self.ended, self.loads = seconds, still, threading.Event(), 0

    def load(self, version: int) -> Mapping[str, Tensor]:
        self.loads += 1
        for _ in range(20 * round(self.seconds)):
            if self.ended.wait(0.05):
                break
            self.checked += not self.still
        return super().load(version)


def updated(folder: Path, seconds: float, still: bool) -> tuple[SlowMailbox, int]:
    """Order version 1 of an engine whose mailbox takes so long."""

    async def main() -> tuple[SlowMailbox, int]:
        engine = NativeEngine.load(folder / "policy", EngineConfig(slots=2), name="engine-0")
        mailbox, address = SlowMailbox({}, seconds, still), f"unix:{folder / 'e.sock'}"
        server = asyncio.create_task(run_server(engine, mailbox, address))
        client = HttpEngine("engine-0", address, load_seconds=DEADLINE)
        try:
            await until_up(client)
            mailbox.publications[1] = dict(load_policy(folder / "policy").named_parameters())
            return mailbox, (await client.update(1)).version
        finally:
            mailbox.ended.set()
            await client.close()
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_a_load_that_takes_ten_times_its_deadline_and_goes_on_is_ordered_once(short_folder: Path) -> None:
    mailbox, version = updated(short_folder, seconds=10 * DEADLINE, still=False)
    assert (version, mailbox.loads) == (1, 1)


def test_a_load_that_stands_still_is_named(short_folder: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=r"engine-0 waited 0\.3 s for engine-0 to load version 1"):
        updated(short_folder, seconds=30.0, still=True)


@pytest.mark.parametrize("start", ["grows 4", "hangs 4"])
def test_a_model_that_goes_on_being_loaded_is_waited_for_and_an_engine_that_hangs_meanwhile_is_replaced(
    short_folder: Path, start: str
) -> None:
    """Each start may take 0.9 s; the one that goes on takes three, and the processes' heartbeats are not missed."""
    said: list[str] = []
    (short_folder / "newest").write_text(start)

    async def work(fleet: EnginePool) -> int:
        return fleet.live

    settings = {"start": 0.6, "save": 0.3, "hung": 60.0}
    assert engines_played(short_folder, work, 1, said.append, **settings) == 4
    late = "engine-0 conductor waited 0.9 s for engine-0 to be ready and gave up: a new one is started"
    assert said == [late] * (start == "hangs 4")


def test_a_trainer_that_goes_on_loading_its_model_is_waited_for(tmp_path: Path) -> None:
    async def work(link: TrainerLink) -> bool:
        return link.ready

    assert trainer_played(tmp_path, ["grows"], work, start=0.9)


def test_every_deadline_of_a_recipe_comes_to_where_it_is_kept(
    short_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path))
    given = {name: 7000.0 + at for at, name in enumerate(("start", "answer", "load", "pull", "step", "save"))}
    plan = make_plan(load_recipe(TINY, [f"deadlines.{name}={seconds}" for name, seconds in given.items()]))
    deadlines = plan.recipe.deadlines
    assert {name: getattr(deadlines, name) for name in given} == given
    endpoints = Endpoints("mailbox", tmp_path, tmp_path)
    (engine,) = engine_specs(plan.recipe, short_folder / "policy", endpoints)
    assert engine.publication_seconds == given["start"] + given["save"]
    assert (engine.start_seconds, engine.load_seconds) == (given["start"], given["load"])
    assert deadlines.longest_pull > given["pull"]
    assert trainer_spec(plan, short_folder / "policy", endpoints, tmp_path).hung == deadlines.hung
    assert set(given) < set(DeadlinesConfig.model_fields)


def test_no_wait_of_minutes_is_a_constant() -> None:
    root = Path(__file__).parents[2]
    packages = [root / "application" / "stretto_app", *root.glob("packages/*/stretto*")]
    found = {
        (str(path.relative_to(package)), target.id)
        for package in packages
        for path in package.rglob("*.py")
        if "SECONDS" in (text := path.read_text(encoding="utf-8")) or "PATIENCE" in text
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and (seconds := _number(node.value)) is not None and seconds >= 120
        for target in node.targets
        if isinstance(target, ast.Name) and ("SECONDS" in target.id or "PATIENCE" in target.id)
    }
    assert found == set(CONSTANTS)


def _number(value: ast.expr) -> float | None:
    match value:
        case ast.Constant(value=int(number) | float(number)):
            return number
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            numbers = _number(left), _number(right)
            return None if None in numbers else (numbers[0] or 0) * (numbers[1] or 0)
    return None
