"""What an engine says of its health may be nonsense: text, wrong types, a body without an end. That is told once, and
the engine is replaced, since nothing else that it says is to be trusted. The run goes on."""

import asyncio
import re
from pathlib import Path

import pytest

from stretto.loop.engines.pool import EnginePool
from stretto.processes.tree import own_resident_bytes
from tests.loop.test_pool import answers, folder, played, request
from tests.loop.toy_engine import NONSENSE

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
