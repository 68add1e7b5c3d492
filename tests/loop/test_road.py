"""The road of a group from its admission to the queue of an engine is short.

Counted on the admission of a real conductor with a real engine behind a real server, all in one process: the functions
whose calls are open when the controller admits, when the request is sent, and when the engine queues it. The socket
between client and server, and what dispatches its bytes on both sides, is not counted; nor is what a function on the
road asks on the way.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import cast

import stretto.core
from stretto.engine.config import EngineConfig
from stretto.engine.http.connections import Connection
from stretto.engine.http.server import EngineApp
from stretto.engine.native.scheduler import Scheduler
from stretto.engine.wire import EngineSpec
from stretto.loop.conductor import Conductor
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.pool import EnginePool
from stretto.loop.engines.state import EngineState
from stretto.model.hf.build import build_policy
from stretto.rollout.controller import Controller
from tests.engine.answering import engine_of
from tests.engine.serving import served
from tests.loop.conducting import Stage, ToyFleet
from tests.store.make import run_at
from tests.tiny_policy import TINY

FUNCTIONS, FILES = 12, 10
PACKAGE = Path(stretto.core.__file__ or "").parent.parent


class OneEngine(EnginePool):
    """A pool whose engine runs in this process; it loads nothing, and says that it has."""

    asked: tuple[str, ...] = ()

    def publish(self, version: int) -> None:
        self.on_load(version)

    def up(self) -> None:
        (engine,) = self._engines.values()
        engine.version, engine.state = 0, EngineState.UP
        engine.changed(engine)


class Road:
    """Notes the calls that are open when one of `ends` is called for the first time, from it out to the outermost."""

    def __init__(self, ends: dict[CodeType, CodeType]) -> None:
        """`ends`: the last function of a stretch, and its first one."""
        self._ends = dict(ends)
        self.functions: list[tuple[str, str]] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or frame.f_code not in self._ends:
            return
        stretch, first, caller = [], self._ends[frame.f_code], cast("FrameType | None", frame)
        while caller is not None:
            stretch.append(caller.f_code)
            if caller.f_code is first:
                break
            caller = caller.f_back
        else:
            return  # another way to this function
        del self._ends[frame.f_code]
        for code in reversed(stretch):
            if Path(code.co_filename).is_relative_to(PACKAGE) and not code.co_name.startswith("<"):
                self.functions.append((str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname))


def code(function: Callable[..., object]) -> CodeType:
    return function.__code__


async def test_from_admission_to_an_engines_queue_there_are_few_functions_and_files(tmp_path: Path) -> None:
    road = Road(
        {
            code(Controller.admit): code(Conductor._admit),
            code(Connection.send): code(Conductor._generate),
            code(Scheduler.add): code(EngineApp.stream_completions),
        }
    )
    spec = EngineSpec(
        name="engine-0",
        address=f"unix:{tmp_path}/s",
        model="",
        mailbox="",
        mailbox_folder="",
        config=EngineConfig().model_dump_json(),
        threads=1,
        publication_seconds=0.0,
    )
    build_policy(TINY, tmp_path / "model", seed=1)
    engine = engine_of(tmp_path / "model")
    async with served(engine, tmp_path / "s"):
        pool = OneEngine([spec], tmp_path, DeadlinesConfig())
        pool.up()
        with run_at(tmp_path / "run") as (folder, ledger):
            sys.setprofile(road)
            try:
                await Stage(folder, ledger, fleet=cast(ToyFleet, pool))._play(None, 1, {})
            finally:
                sys.setprofile(None)
        await pool.stop(0.0)
    border = "engine/http/connections.py"
    functions = [step for step in dict.fromkeys(road.functions) if step[0] != border]
    files = {file for file, _ in functions}
    assert functions[0] == ("loop/conductor.py", "Conductor._admit")
    assert functions[-1] == ("engine/native/scheduler.py", "Scheduler.add")
    assert len(functions) <= FUNCTIONS, functions
    assert len(files) <= FILES, sorted(files)
