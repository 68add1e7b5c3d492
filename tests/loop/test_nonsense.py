"""What an engine says of its health may be nonsense: text, wrong types, a body without an end. That is told once, and
the engine is replaced, since nothing else that it says is to be trusted. The run goes on.

An engine that says nothing is suspected where another one has replied, or for the whole deadline.

An engine that is well whenever it is asked, and breaks off all work, is replaced."""

import asyncio
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from stretto.core.engine import EngineHealth
from stretto.core.errors import EngineLost
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.pool import EnginePool
from stretto.loop.engines.state import silent
from stretto.processes.tree import own_resident_bytes
from tests.asynchronous import until
from tests.loop.simulated_guests import Machine, SimulatedClient
from tests.loop.test_pool import answers, folder, played, request
from tests.loop.toy_engine import CUT, HANG_UP, NONSENSE, STAY_SILENT, UNTOLD

__all__ = ["folder"]


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_of_an_engines_health_is_told_once_and_the_engine_is_replaced(folder: Path, nonsense: int) -> None:
    said: list[str] = []

    async def work(fleet: EnginePool) -> None:
        before = own_resident_bytes()
        await answers(fleet, request("0", nonsense))
        while len(said) < 2:
            await fleet.poll(0.1)
            await asyncio.sleep(0.05)
        assert own_resident_bytes() - before < 100 << 20
        assert len(await answers(fleet, request("1"))) == 2

    played(folder, work, 1, said.append)
    assert re.fullmatch(r"engine-0 told nonsense about itself: .*: it is replaced", said[0])
    assert said[1:] == ["engine-0 was killed by SIGKILL: a new one is started"]


def test_an_engine_that_fails_to_tell_its_tokens_in_flight_costs_one_line(folder: Path) -> None:
    said: list[str] = []

    async def work(fleet: EnginePool) -> None:
        answering = asyncio.ensure_future(answers(fleet, request("0", UNTOLD)))
        await asyncio.sleep(0.3)
        assert [await fleet.partials({"0": [0, 0]}) for _ in range(3)] == [{}, {}, {}]
        answering.cancel()

    played(folder, work, 1, said.append)
    assert said == ["tokens in flight are not journaled: engine-0: MemoryError: no room"]


@dataclass
class Slow(SimulatedClient):
    """Replies after a while; of version -1, it does not listen."""

    seconds: float = 0.0

    async def health(self) -> EngineHealth:
        health = await super().health()
        await asyncio.sleep(self.seconds)
        return health


LOST, NEVER = -1.0, 60.0


@pytest.mark.parametrize(
    ("replies", "suspected"),
    [
        ((NEVER,), {"0"}),  # for the whole deadline
        ((0.0, NEVER), {"1"}),
        ((0.3, 0.4), set()),  # the machine is busy as a whole
        ((LOST, 0.3), set()),  # no reply, of which the other's time would be judged
    ],
)
async def test_engines_are_suspected_that_are_slower_than_others_or_silent_for_the_whole_deadline(
    replies: tuple[float, ...], suspected: set[str]
) -> None:
    machine, began = Machine(random.Random(1)), time.monotonic()
    engines = {
        str(at): Slow(str(at), machine, lambda *_: None, version=-1 if seconds == LOST else 0, seconds=seconds)
        for at, seconds in enumerate(replies)
    }
    assert await silent(engines, DeadlinesConfig(answer=1.0, hung=0.1)) == suspected
    assert (time.monotonic() - began > 0.9) == (replies == (NEVER,))


async def broken_off(fleet: EnginePool, times: int) -> None:
    for _ in range(times):
        with pytest.raises(EngineLost, match="broke off"):
            await answers(fleet, request("0", HANG_UP))


REPLACED = "engine-0 was killed by SIGKILL (broke off in the middle of a reply, 3 times in a row): a new one is started"


def test_an_engine_that_breaks_off_every_request_is_replaced(folder: Path) -> None:
    said: list[str] = []
    played(folder, lambda fleet: broken_off(fleet, 6), 1, said.append)
    assert said[:1] == [REPLACED]


def test_an_engine_that_breaks_off_every_load_is_replaced(folder: Path) -> None:
    said: list[str] = []

    async def work(fleet: EnginePool) -> None:
        (folder / "newest").write_text(str(CUT))
        loading = asyncio.ensure_future(fleet.keep_loaded())
        fleet.publish(CUT)
        await asyncio.wait_for(until(lambda: fleet.live == CUT), 10)
        loading.cancel()

    played(folder, work, 1, said.append)
    assert said == [REPLACED]


def test_an_engine_that_completes_requests_between_broken_ones_or_may_yet_is_not_replaced(folder: Path) -> None:
    said: list[str] = []

    async def work(fleet: EnginePool) -> None:
        for name in "abc":
            await broken_off(fleet, 2)
            await answers(fleet, request(name))
        long = asyncio.ensure_future(answers(fleet, request("long", STAY_SILENT)))
        await until(lambda: fleet.open)
        await broken_off(fleet, 6)
        long.cancel()

    played(folder, work, 1, said.append)
    assert said == []
