"""Promise: where the request is at fault and not the server, its sender gets the server's words, whatever of the
request was sampled before; the engine goes on with all other requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from stretto.core.errors import RefusedRequest
from stretto.engine.http.client import HttpEngine
from stretto.engine.http.server import EngineApp, serve_app
from stretto_servers.make import Continuation, Delta
from tests.engine.serving import until_up
from tests.servers.toy import ToyServer, assert_law, engine_over, play, request

WORDS = RefusedRequest("engine-0/generate", "token id 7 is banned", "what the server allows (status 400)")
AT_FAULT = "bad"  # the name of the request that is


class Refusing(ToyServer):
    """A server that refuses one completion of a request: at once, or when it is asked for the rest of it."""

    def __init__(self, *, the_rest: bool) -> None:
        super().__init__()
        self._the_rest = the_rest

    async def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
        name, member, _ = continuation.id.split("-")
        asked_before = any(asked.id.startswith(f"{name}-{member}-") for asked in self.asked)
        if (name, member, asked_before) == (AT_FAULT, "1", self._the_rest):
            raise WORDS
        async for delta in super().stream(continuation):
            yield delta


@pytest.mark.parametrize("the_rest", [False, True])
def test_what_the_server_refuses_is_refused_with_its_words_and_the_engine_goes_on(
    tmp_path: Path, the_rest: bool
) -> None:
    async def generated(client: HttpEngine, name: str) -> list[int]:
        found = []
        async for completion in client.generate(request(name, 3)):
            assert_law(request(name).prompt_token_ids, completion)
            found.append(completion.member)
        return sorted(found)

    async def scenario() -> None:
        server, address = Refusing(the_rest=the_rest), f"unix:{tmp_path}/engine.sock"
        engine = engine_over(server)
        await engine.update(1)
        serving = asyncio.create_task(serve_app(EngineApp(engine), address, engine.run))
        client = HttpEngine("engine-0", address)
        await until_up(client)
        wanted = [asyncio.create_task(generated(client, name)) for name in ("good", AT_FAULT)]
        while len(server.asked) < (6 if the_rest else 5):
            await asyncio.sleep(0.001)
        await play(server, count=2)
        await engine.update(2)
        while not all(task.done() for task in wanted):
            await play(server)
            await asyncio.sleep(0.001)
        assert await wanted[0] == [0, 1, 2]
        with pytest.raises(RefusedRequest) as caught:
            await wanted[1]
        assert caught.value.args == WORDS.args
        assert not serving.done()
        assert (await client.health()).running == 0
        await client.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), 30))
