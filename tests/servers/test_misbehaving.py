"""Promises: what a server must not send ends the engine with an error that says it, breaks off the completions that are
open, and nothing of it reaches a stream or a journal."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace

from stretto.core.errors import DeadlineExceeded, EngineLied, EngineLost, StrettoError, WireError
from stretto.core.frames import LARGEST_FRAME, Unframer
from stretto.engine.http.client import HttpEngine, decoded
from stretto.engine.http.server import EngineApp, serve_app
from stretto.engine.wire import Refusal
from stretto_servers import engine as external
from stretto_servers.engine import ExternalEngine
from stretto_servers.make import Continuation, Delta
from tests.servers.toy import (
    STOP,
    VOCABULARY,
    ToyServer,
    completions_of,
    engine_over,
    play,
    request,
    settle,
)


class Scripted(ToyServer):
    """A server that sends what it was given, to every request."""

    def __init__(self, deltas: Sequence[Delta]) -> None:
        super().__init__()
        self._deltas = deltas

    async def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
        for delta in self._deltas:
            await asyncio.sleep(0)
            yield delta


def good(count: int = 2, ended: str = "", version: int = 3) -> Delta:
    spans = ((str(version), 0, count),) if ended else ()
    return Delta((7,) * count, (-1.0,) * count, ended=ended, spans=spans)


WRONG = {
    "NaN": ([good(), Delta((7,), (math.nan,))], "log-probability of nan"),
    "more than certain": ([good(), Delta((7,), (0.5,))], "log-probability of 0.5"),
    "infinite": ([Delta((7,), (-math.inf,))], "log-probability of -inf"),
    "an id beyond the vocabulary": ([good(), Delta((VOCABULARY,), (-1.0,))], f"token {VOCABULARY}; the vocabulary"),
    "a negative id": ([Delta((-1,), (-1.0,))], "token -1; the vocabulary has 0 to 49"),
    "too few log-probabilities": ([good(), Delta((7, 8), (-1.0,))], "2 tokens, 1 log-probabilities"),
    "too many log-probabilities": ([Delta((), (-1.0,))], "0 tokens, 1 log-probabilities"),
    "top lists that nobody wants": ([Delta((7,), (-1.0,), (((7, -1.0),),))], "1 top lists"),
    "more tokens than asked for": ([good(4), good(3)], "more than the 6 tokens"),
    "tokens behind a stop token": ([Delta((STOP,), (-1.0,)), good()], f"after the stop token {STOP}"),
    "a stop without a stop token": ([good(2, "stop")], "stopped after 2 tokens, the last no stop token"),
    "a stop without a token": ([Delta(ended="stop")], "stopped after 0 tokens"),
    "an end before the limit": ([good(2, "length")], "ended after 2 of 6 tokens"),
    "an older version": ([good(6, "length", version=2)], r"versions \['2'\] sampled it; it had \[3\]"),
    "a version that is none": ([Delta((7,) * 6, (-1.0,) * 6, ended="length", spans=(("default", 0, 6),))], "default"),
    "versions of half the tokens": ([Delta((7,) * 6, (-1.0,) * 6, ended="length", spans=(("3", 0, 3),))], "'3'"),
    "versions with a gap": ([Delta((7,) * 6, (-1.0,) * 6, ended="length", spans=(("3", 0, 3), ("3", 4, 7)))], "'3'"),
    "versions without an end": ([Delta((7,) * 6, (-1.0,) * 6, ended="length", spans=(("3", 1, 10**12),))], "'3'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_token_of_this_model_and_version_ends_the_engine(wrong: str) -> None:
    deltas, message = WRONG[wrong]

    async def scenario() -> None:
        server = Scripted(deltas)
        engine = engine_over(server)
        await engine.update(3)
        stream = engine.submit_all([request("ab", max_tokens=6)])
        with pytest.raises(WireError, match=message):
            await asyncio.wait_for(engine.run(), 5)
        (told,) = Unframer().feed(await stream.next())
        assert decoded(told, list[Refusal])[0].error == "EngineLied"
        assert engine.partials({"ab": [0]}) == {}  # not the tokens before it either, by the same server

    asyncio.run(scenario())


def test_a_client_hears_that_the_server_has_lied_though_the_engine_ends_at_once(tmp_path: Path) -> None:
    """It is the last word over the connection: a client that saw a mere end would keep the tokens that came before."""

    async def scenario() -> None:
        engine = engine_over(Scripted([good(4), Delta((7,), (math.nan,))]))
        await engine.update(3)
        address = f"unix:{tmp_path}/engine.sock"
        serving = asyncio.create_task(serve_app(EngineApp(engine, LARGEST_FRAME, ""), address, engine.run))
        while not (tmp_path / "engine.sock").exists():
            await asyncio.sleep(0.01)
        client = HttpEngine("engine-0", address)
        with pytest.raises(EngineLied, match="engine-0 is not trusted: ab: the server sent a log-probability of nan"):
            await anext(client.generate(request("ab", max_tokens=6)))
        with pytest.raises(WireError, match="log-probability of nan"):
            await asyncio.wait_for(serving, 10)
        await client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("ended", ["", "abort", "error"])  # a closed connection; an abort that nobody has asked for
def test_half_a_completion_goes_to_another_engine_with_the_tokens_that_came(ended: str) -> None:
    async def scenario() -> None:
        engine = engine_over(Scripted([good(2, ended)]))
        await engine.update(3)
        life = asyncio.create_task(engine.run())
        stream = engine.submit_all([request("ab", max_tokens=6)])
        await settle()
        assert (stream.broken, stream.ready) == (True, False)
        assert engine.partials({"ab": [0]})["ab"][0].versions == (3, 3)
        assert not life.done()  # the server may be there all the same: health decides
        life.cancel()

    asyncio.run(scenario())


def test_tokens_that_are_late_cost_the_completion_its_engine_and_the_engine_nothing() -> None:
    class Late(ToyServer):
        async def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
            yield good(2)
            raise DeadlineExceeded("the adapter", "the next tokens", 0.1)

    async def scenario() -> None:
        engine = engine_over(Late())
        await engine.update(3)
        life = asyncio.create_task(engine.run())
        stream = engine.submit_all([request("ab", max_tokens=6)])
        await settle()
        assert (stream.broken, stream.ready) == (True, False)
        assert engine.partials({"ab": [0]})["ab"][0].versions == (3, 3)
        assert not life.done()
        assert (await engine.health()).version == 3
        life.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("spans", [(("9", 0, 6),), (("3", 0, 1), ("4", 1, 6)), (("4", 0, 3), ("3", 3, 6)), ()])
def test_with_keep_versions_that_contradict_what_was_loaded_end_the_engine(spans: tuple[tuple[str, int, int]]) -> None:
    """Two tokens came before version 4 was loaded, so they are of version 3."""

    class Lying(ToyServer):
        async def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
            yield good(2)
            while self.version < 4 or self.paused:
                await asyncio.sleep(0)
            yield Delta((7,) * 4, (-1.0,) * 4, ended="length", spans=spans)

    async def scenario() -> None:
        engine = engine_over(Lying(), "keep")
        await engine.update(3)
        stream = engine.submit_all([request("ab", max_tokens=6)])
        await settle()
        await engine.update(4)
        with pytest.raises(WireError, match="the server says that versions"):
            await asyncio.wait_for(engine.run(), 5)
        assert b"EngineLied" in await stream.next()

    asyncio.run(scenario())


def test_the_weights_that_a_server_was_started_with_are_version_0() -> None:
    async def scenario() -> None:
        server = Scripted([Delta((7,) * 6, (-1.0,) * 6, ended="length", spans=(("default", 0, 6),))])
        (found,) = await completions_of(server, engine_over(server).submit_all([request("ab", max_tokens=6)]))
        assert found.versions == (0,) * 6

    asyncio.run(scenario())


async def ends_with(engine: ExternalEngine, error: type[StrettoError], message: str) -> None:
    with pytest.raises(EngineLost, match=message):  # the run goes on with another engine
        await engine.update(2)
    with pytest.raises(error, match=message):
        await asyncio.wait_for(engine.run(), 5)
    with pytest.raises(EngineLost, match="is stopping"):
        await engine.update(3)


def test_a_pause_that_ends_no_request_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "_DRAIN_SECONDS", 0.02)

    async def scenario() -> None:
        server = ToyServer()
        server.ignores_pause = True
        engine = engine_over(server)
        await engine.update(1)
        stream = engine.submit_all([request("ab")])
        await play(server, count=2)
        await ends_with(engine, EngineLost, "is paused and does not end its requests")
        assert (server.version, stream.broken) == (1, True)
        assert engine.partials({"ab": [0]})["ab"][0].versions == (1, 1)  # what version 1 sampled is not lost

    asyncio.run(scenario())


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_a_load_that_fails_ends_the_engine_and_nothing_is_sampled_any_more(
    on_update: Literal["recompute", "keep"],
) -> None:
    async def scenario() -> None:
        server = ToyServer()
        engine = engine_over(server, on_update)
        await engine.update(1)
        stream = engine.submit_all([request("ab", max_tokens=8)])
        await play(server, count=2)
        server.refuses_load = True
        await ends_with(engine, WireError, "no weights in /toy/2")
        await play(server, count=2)
        assert (stream.broken, stream.ready, server.paused, len(server.asked)) == (True, False, True, 1)

    asyncio.run(scenario())


def test_an_update_that_is_cut_off_ends_the_engine() -> None:
    async def scenario() -> None:
        server = ToyServer(steps=True)
        engine = engine_over(server)
        update = asyncio.create_task(engine.update(1))
        while not server.waiting:
            await asyncio.sleep(0.0005)
        update.cancel()
        with pytest.raises(EngineLost, match="was stopped while loading"):
            await asyncio.wait_for(engine.run(), 5)

    asyncio.run(scenario())


def test_an_error_of_our_own_ends_the_engine_too() -> None:
    class Broken(ToyServer):
        async def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
            raise ZeroDivisionError
            yield Delta()

    async def scenario() -> None:
        engine = engine_over(Broken())
        await engine.update(1)
        stream = engine.submit_all([request("ab")])
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(engine.run(), 5)
        assert stream.broken

    asyncio.run(scenario())


def test_top_log_probabilities_are_held_against_the_vocabulary_too() -> None:
    async def scenario() -> None:
        for likeliest, message in [
            ((((VOCABULARY, -1.0),),), "token 50"),
            ((((7, math.nan),),), "log-probability of nan"),
            ((), "0 top lists"),
        ]:
            engine = engine_over(Scripted([Delta((7,), (-1.0,), likeliest)]))
            await engine.update(1)
            engine.submit_all([replace(request("ab"), top_logprobs=1)])
            with pytest.raises(WireError, match=message):
                await asyncio.wait_for(engine.run(), 5)

    asyncio.run(scenario())


def test_the_toy_itself_does_nothing_of_this() -> None:
    async def scenario() -> None:
        server = ToyServer()
        engine = engine_over(server)
        await engine.update(3)
        (found,) = await completions_of(server, engine.submit_all([request("ab", max_tokens=6)]))
        assert set(found.versions) == {3}

    asyncio.run(scenario())
