"""What an engine has open is given up: all of it at once, and again until the engine has let go of it."""

import asyncio
import random

import pytest

from stretto.core.errors import EngineLost
from stretto.core.records import GenerateRequest, Sampling
from stretto.loop.engines.state import EngineState
from tests.loop.simulated_guests import Machine, SimulatedClient, handle_of


def request(name: str) -> GenerateRequest:
    return GenerateRequest(id=name, prompt_token_ids=(1,), seeds=tuple(range(50)), sampling=Sampling(max_tokens=4))


async def test_a_request_that_its_abort_has_overtaken_is_aborted() -> None:
    handle = handle_of(SimulatedClient("engine-0", Machine(random.Random(1)), lambda *_: None, version=0))
    handle.open.add("0")
    giving_up = asyncio.ensure_future(handle.give_up())
    await asyncio.sleep(0.05)
    with pytest.raises(EngineLost, match="broke off"):
        [_ async for _ in handle.client.generate(request("0"))]
    handle.open.clear()
    await giving_up


async def test_all_requests_of_an_engine_that_replies_slowly_are_given_up_within_a_second() -> None:
    class Slow(SimulatedClient):
        async def abort(self, request_id: str | list[str]) -> None:
            await asyncio.sleep(0.1)  # its step
            await super().abort(request_id)

    handle = handle_of(Slow("engine-0", Machine(random.Random(1)), lambda *_: None, version=0))

    async def sampled(id: str) -> None:
        try:
            async for _ in handle.client.generate(request(id)):
                pass
        finally:
            handle.open.discard(id)

    handle.open |= {str(number) for number in range(20)}
    asked = [asyncio.ensure_future(sampled(id)) for id in handle.open]
    await handle.give_up()
    assert not handle.open
    assert all("broke off" in str(error) for error in await asyncio.gather(*asked, return_exceptions=True))


async def test_what_breaks_off_behind_the_end_of_an_engine_goes_on_undisturbed_at_the_next() -> None:
    client = SimulatedClient("engine-0", Machine(random.Random(1)), lambda *_: None, version=0)
    handle = handle_of(client)
    handle._mark_dead("was killed by SIGKILL")
    handle.suspect({"0"})  # a connection to another machine ends when it is closed here
    client.begins(0)
    handle._becomes(EngineState.UP, 0)
    answering = asyncio.ensure_future(anext(aiter(client.generate(request("0")))))
    await asyncio.sleep(0)
    handle.suspect({"1"})
    await handle._until_it_replies()
    assert (await answering).segment.length
