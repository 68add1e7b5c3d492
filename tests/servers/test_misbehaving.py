"""Promises: what a server must not send ends the engine with an error that says it, breaks off the completions that are
open, and nothing of it reaches a stream or a journal. Where the request is at fault and not the server, its sender gets
the server's words, whatever of the request was sampled before; the engine goes on with all other requests. A load that
the server refuses is ordered again, and then named; nothing is sampled before one succeeds."""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from stretto.core.canary import FARTHEST, Canary, Challenge
from stretto.core.errors import (
    DeadlineExceeded,
    EngineLied,
    EngineLost,
    RefusedRequest,
    RoleFailed,
    StrettoError,
    WireError,
)
from stretto.core.frames import LARGEST_FRAME, Unframer
from stretto.core.records import Segment, StopReason
from stretto.core.tasks import cancel_and_wait
from stretto.engine.http.client import HttpEngine, decoded
from stretto.engine.http.server import EngineApp, serve_app
from stretto.engine.wire import EngineSpec, Refusal
from stretto.loop.engines.proving import Proving
from stretto_servers import engine as external
from stretto_servers.engine import ExternalEngine
from stretto_servers.http import refused
from stretto_servers.make import Continuation, Delta
from tests.asynchronous import until
from tests.engine.serving import until_up
from tests.servers.toy import (
    STOP,
    VOCABULARY,
    OnUpdate,
    Shaping,
    ToyServer,
    assert_law,
    at,
    completions_of,
    engine_over,
    in_steps,
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
    "a mark for a missing number": ([Delta((7,), (-9999.0,))], "-9999.0 in place of a log-probability"),
    "infinite": ([Delta((7,), (-math.inf,))], "log-probability of -inf"),
    "an id beyond the vocabulary": ([good(), Delta((VOCABULARY,), (-1.0,))], f"token {VOCABULARY}; the vocabulary"),
    "a negative id": ([Delta((-1,), (-1.0,))], "token -1; the vocabulary has 0 to 49"),
    "too few log-probabilities": ([good(), Delta((7, 8), (-1.0,))], "2 tokens, 1 log-probabilities"),
    "too many log-probabilities": ([Delta((), (-1.0,))], "0 tokens, 1 log-probabilities"),
    "top lists that nobody wants": ([Delta((7,), (-1.0,), (((7, -1.0),),))], "1 top lists"),
    "more tokens than asked for": ([good(4), good(3)], "more than the 6 tokens"),
    "tokens behind a stop token": ([Delta((STOP,), (-1.0,)), good()], f"after the stop token {STOP}"),
    "tokens behind a stop token in one event": ([Delta((7, STOP, 7), (-1.0,) * 3)], f"after the stop token {STOP}"),
    "a stop token amid the last ones": (
        [Delta((STOP, *(7,) * 5), (-1.0,) * 6, ended="length")],
        "after the stop token",
    ),
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
async def test_what_is_no_token_of_this_model_and_version_ends_the_engine(wrong: str) -> None:
    deltas, message = WRONG[wrong]
    _, engine = await at(3, server=Scripted(deltas))
    stream = engine.submit_all([request("ab", max_tokens=6)])
    with pytest.raises(WireError, match=message):
        await asyncio.wait_for(engine.run(), 5)
    (told,) = Unframer().feed(await stream.next())
    assert decoded(told, list[Refusal])[0].error == "EngineLied"
    assert engine.partials({"ab": [0]}) == {}  # not the tokens before it either, by the same server


async def test_a_client_hears_that_the_server_has_lied_though_the_engine_ends_at_once(tmp_path: Path) -> None:
    """It is the last word over the connection: a client that saw a mere end would keep the tokens that came before."""
    _, engine = await at(3, server=Scripted([good(4), Delta((7,), (math.nan,))]))
    address = f"unix:{tmp_path}/engine.sock"
    serving = asyncio.create_task(serve_app(EngineApp(engine, LARGEST_FRAME, ""), address, engine.run))
    await until(lambda: (tmp_path / "engine.sock").exists())
    client = HttpEngine("engine-0", address)
    with pytest.raises(EngineLied, match="engine-0 is not trusted: ab: the server sent a log-probability of nan"):
        await anext(client.generate(request("ab", max_tokens=6)))
    with pytest.raises(WireError, match="log-probability of nan"):
        await asyncio.wait_for(serving, 10)
    await client.close()


class Late(ToyServer):
    async def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
        yield good(2)
        raise DeadlineExceeded("the adapter", "the next tokens", 0.1)


@pytest.mark.parametrize(
    "server",
    [*(Scripted([good(2, ended)]) for ended in ("", "abort", "error")), Late()],
    ids=["a closed connection", "an abort that nobody has asked for", "an error", "tokens that are late"],
)
async def test_half_a_completion_goes_to_another_engine_with_the_tokens_that_came(server: ToyServer) -> None:
    _, engine = await at(3, server=server)
    life = asyncio.create_task(engine.run())
    stream = engine.submit_all([request("ab", max_tokens=6)])
    await settle()
    assert (stream.broken, stream.ready) == (True, False)
    assert engine.partials({"ab": [0]})["ab"][0].versions == (3, 3)
    assert not life.done()  # the server may be there all the same: health decides
    assert (await engine.health()).version == 3
    life.cancel()


@pytest.mark.parametrize("spans", [(("9", 0, 6),), (("3", 0, 1), ("4", 1, 6)), (("4", 0, 3), ("3", 3, 6)), ()])
async def test_with_keep_versions_that_contradict_the_loads_end_the_engine(spans: tuple[tuple[str, int, int]]) -> None:
    """Two tokens came before version 4 was loaded, so they are of version 3."""

    class Lying(ToyServer):
        async def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
            yield good(2)
            await until(lambda: self.version >= 4 and not self.paused, 0)
            yield Delta((7,) * 4, (-1.0,) * 4, ended="length", spans=spans)

    _, engine = await at(3, "keep", Lying())
    stream = engine.submit_all([request("ab", max_tokens=6)])
    await settle()
    await engine.update(4)
    with pytest.raises(WireError, match="the server says that versions"):
        await asyncio.wait_for(engine.run(), 5)
    assert b"EngineLied" in await stream.next()


async def test_the_weights_that_a_server_was_started_with_are_version_0() -> None:
    server = Scripted([Delta((7,) * 6, (-1.0,) * 6, ended="length", spans=(("default", 0, 6),))])
    (found,) = await completions_of(server, engine_over(server).submit_all([request("ab", max_tokens=6)]))
    assert found.versions == (0,) * 6


async def test_a_server_that_was_started_again_behind_the_adapter_is_found_out_at_version_0_too() -> None:
    """Its supervisor has started it with the weights on its command line, which are not the version that was loaded."""
    deltas = [Delta((7,) * 6, (-1.0,) * 6, ended="length", spans=(("default", 0, 6),))]
    _, engine = await at(0, server=Scripted(deltas))
    engine.submit_all([request("ab", max_tokens=6)])
    with pytest.raises(WireError, match=r"versions \['default'\] sampled it; it had \[0\]"):
        await asyncio.wait_for(engine.run(), 5)


class Overtaken(ToyServer):
    """A server whose pause is faster than the news that a completion has ended with its last token."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        super().__init__()
        self._tokens = tokens

    async def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
        self.asked.append(continuation)
        yield Delta(self._tokens, (-1.0,) * len(self._tokens))
        await until(lambda: self.paused, 0)
        yield Delta(ended="abort")


ENDS = [((7, 8, STOP), StopReason.STOP), ((7,) * 6, StopReason.LENGTH), ((7,) * 5 + (STOP,), StopReason.STOP)]


@pytest.mark.parametrize(("tokens", "reason"), ENDS)
async def test_a_completion_that_has_ended_by_its_tokens_is_not_asked_for_again(
    tokens: tuple[int, ...], reason: StopReason
) -> None:
    server, engine = await at(3, server=Overtaken(tokens))
    stream = engine.submit_all([request("ab", max_tokens=6)])
    await settle()
    assert (await engine.update(4)).version == 4
    await settle()
    (found,) = await asyncio.wait_for(completions_of(server, stream), 5)
    assert (found.token_ids, found.versions, found.stop_reason) == (tokens, (3,) * len(tokens), reason)
    assert len(server.asked) == 1


@pytest.mark.parametrize(("tokens", "reason"), ENDS)
async def test_a_completion_that_the_server_gives_up_behind_its_last_token_has_ended(
    tokens: tuple[int, ...], reason: StopReason
) -> None:
    server = Scripted([Delta(tokens, (-1.0,) * len(tokens)), Delta(ended="abort")])
    _, engine = await at(3, server=server)
    stream = engine.submit_all([request("ab", max_tokens=6)])
    (found,) = await asyncio.wait_for(completions_of(server, stream), 5)
    assert (found.token_ids, found.stop_reason) == (tokens, reason)


async def test_nothing_is_sampled_behind_the_stop_token_of_a_lost_engine() -> None:
    """It was lost between its last token and its end."""
    server, engine = await at(3)
    prefix = Segment.of((7, STOP), (-1.0, -2.0), (2, 3))
    stream = engine.submit_all([request("ab", max_tokens=6, prefixes=(prefix,))])
    (found,) = await asyncio.wait_for(completions_of(server, stream), 5)
    assert (found.token_ids, found.versions, found.stop_reason) == ((7, STOP), (2, 3), StopReason.STOP)
    assert server.asked == []


async def test_top_log_probabilities_keep_to_their_tokens_behind_those_of_a_lost_engine() -> None:
    prefix = Segment.of((7, 8), (-1.0, -2.0), (2, 3))
    server, engine = await at(3, server=Scripted([Delta((STOP,), (-1.0,), (((STOP, -1.0),),), ended="stop")]))
    wanted = replace(request("ab", max_tokens=6, prefixes=(prefix,)), top_logprobs=1)
    (found,) = await asyncio.wait_for(completions_of(server, engine.submit_all([wanted])), 5)
    assert found.top_logprobs == ((), (), ((STOP, -1.0),))


@pytest.mark.parametrize(
    "fault", [WireError("status 500"), EngineLost("engine-0", "is busy"), DeadlineExceeded("a", "b", 1.0)]
)
async def test_a_server_that_cannot_score_its_tokens_again_loads_all_the_same(fault: StrettoError) -> None:
    """An error of this measurement would be taken for one of the publication, which ends the run."""

    class Busy(ToyServer):
        async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
            if self.version == 1:
                raise fault
            return await super().score(token_ids)

    server, engine = await at(1, server=Busy())
    stream = engine.submit_all([request("ab", max_tokens=8)])
    await play(server, count=2)
    asked = asyncio.create_task(engine.update(2, Challenge(Canary(2, (2, 3, 4), (), 1), FARTHEST, sampled=2)))
    while not asked.done():
        await play(server)
    scores = (await asked).scores
    assert ((await asked).version, scores is not None and scores.sampled) == (2, ())
    (found,) = await asyncio.wait_for(completions_of(server, stream), 5)
    assert_law(request("ab").prompt_token_ids, found)


async def ends_with(engine: ExternalEngine, error: type[StrettoError], message: str) -> None:
    with pytest.raises(EngineLost, match=message):  # the run goes on with another engine
        await engine.update(2)
    with pytest.raises(error, match=message):
        await asyncio.wait_for(engine.run(), 5)
    with pytest.raises(EngineLost, match="is stopping"):
        await engine.update(3)


async def test_a_pause_that_ends_no_request_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "_DRAIN_SECONDS", 0.02)
    server, engine = await at(1)
    server.ignores_pause = True
    stream = engine.submit_all([request("ab")])
    await play(server, count=2)
    await ends_with(engine, EngineLost, "is paused and does not end its requests")
    assert (server.version, stream.broken) == (1, True)
    assert engine.partials({"ab": [0]})["ab"][0].versions == (1, 1)  # what version 1 sampled is not lost


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_after_a_load_that_the_server_refuses_nothing_is_sampled_until_one_succeeds(on_update: OnUpdate) -> None:
    server, engine = await at(1, on_update)
    stream = engine.submit_all([request("ab", max_tokens=8)])
    await play(server, count=2)
    server.refuses_load = True
    for _ in range(2):
        with pytest.raises(RoleFailed, match="no weights in /toy/2"):
            await engine.update(2)
        await play(server, count=2, rounds=3)
        assert (stream.broken, stream.ready, server.paused, len(server.asked)) == (False, False, True, 1)
    server.refuses_load = False
    assert (await engine.update(2)).version == 2
    (found,) = await asyncio.wait_for(completions_of(server, stream), 5)
    assert found.versions == (1, 1, *(2,) * 6)
    assert_law(request("ab").prompt_token_ids, found)


async def test_a_load_that_a_server_answers_with_status_500_is_ordered_again_and_then_named(tmp_path: Path) -> None:
    class Full(ToyServer):
        loads = 0

        async def load(self, folder: Path, version: int, *, keep: bool) -> None:
            self.loads += 1
            raise refused("engine-0", "/load", 500, b"no room\nfor it")

    engine, address = engine_over(server := Full()), f"unix:{tmp_path}/engine.sock"
    serving = asyncio.create_task(serve_app(EngineApp(engine, LARGEST_FRAME, ""), address, engine.run))
    await until(lambda: (tmp_path / "engine.sock").exists())
    client, spec = HttpEngine("engine-0", address), EngineSpec("engine-0", address, "", "", "", "{}", 1, 0.0)
    with pytest.raises(
        RoleFailed, match="not loaded version 2: engine-0 answers /load with status 500: no room for it"
    ):
        await Proving().load(spec, client, 2)
    assert (server.loads, serving.done()) == (2, False)
    await client.close()
    await cancel_and_wait([serving])


async def test_an_update_that_is_cut_off_ends_the_engine() -> None:
    server, engine = in_steps()
    update = asyncio.create_task(engine.update(1))
    await until(lambda: server.waiting, 0.0005)
    update.cancel()
    with pytest.raises(EngineLost, match="was stopped while loading"):
        await asyncio.wait_for(engine.run(), 5)


async def test_a_load_that_fails_on_our_side_ends_the_engine_with_the_fault_and_not_as_a_stop() -> None:
    class Full(ToyServer):
        async def load(self, folder: Path, version: int, *, keep: bool) -> None:
            raise OSError("no space left")

    engine = engine_over(Full())
    with pytest.raises(OSError, match="no space left"):
        await engine.update(1)
    with pytest.raises(OSError, match="no space left"):
        await asyncio.wait_for(engine.run(), 5)


async def test_after_a_challenge_without_an_answer_the_next_update_loads_again_and_sampling_goes_on() -> None:
    class Late(ToyServer):
        late = True

        async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
            if self.late:
                raise DeadlineExceeded("the adapter", "a score", 0.1)
            return await super().score(token_ids)

    server = Late()
    _, engine = await at(1, server=server)
    asked = asyncio.create_task(engine.update(1, Challenge(Canary(1, (2, 3, 4), (), 1), FARTHEST)))
    while not asked.done():
        await play(server)
    with pytest.raises(DeadlineExceeded):
        await asked
    stream = engine.submit_all([request("ab", max_tokens=6)])
    server.late = False
    assert (await engine.update(1)).version == 1
    (found,) = await asyncio.wait_for(completions_of(server, stream), 5)
    assert (found.versions, (await engine.health()).updates) == ((1,) * 6, 2)


async def test_an_error_of_our_own_ends_the_engine_too() -> None:
    class Broken(ToyServer):
        async def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
            raise ZeroDivisionError
            yield Delta()

    _, engine = await at(1, server=Broken())
    stream = engine.submit_all([request("ab")])
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(engine.run(), 5)
    assert stream.broken


async def test_top_log_probabilities_are_held_against_the_vocabulary_too() -> None:
    for likeliest, message in [
        ((((VOCABULARY, -1.0),),), "token 50"),
        ((((7, math.nan),),), "log-probability of nan"),
        ((), "0 top lists"),
    ]:
        _, engine = await at(1, server=Scripted([Delta((7,), (-1.0,), likeliest)]))
        engine.submit_all([replace(request("ab"), top_logprobs=1)])
        with pytest.raises(WireError, match=message):
            await asyncio.wait_for(engine.run(), 5)


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
async def test_what_a_server_refuses_is_refused_in_its_words_an_engine_goes_on(tmp_path: Path, the_rest: bool) -> None:
    async def generated(client: HttpEngine, name: str) -> list[int]:
        found = []
        async for completion in client.generate(request(name, 3)):
            assert_law(request(name).prompt_token_ids, completion)
            found.append(completion.member)
        return sorted(found)

    server, address = Refusing(the_rest=the_rest), f"unix:{tmp_path}/engine.sock"
    engine = engine_over(server)
    await engine.update(1)
    serving = asyncio.create_task(serve_app(EngineApp(engine), address, engine.run))
    client = HttpEngine("engine-0", address)
    await until_up(client)
    wanted = [asyncio.create_task(generated(client, name)) for name in ("good", AT_FAULT)]
    await until(lambda: len(server.asked) >= (6 if the_rest else 5), 0.001)
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


class Unhurried(Shaping):
    """Answers in its own time, or with an error."""

    def __init__(self) -> None:
        super().__init__(raw=False)
        self.answers = asyncio.Queue[Exception | None]()

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        if (error := await self.answers.get()) is not None:
            raise error
        return await super().score(token_ids)


@pytest.mark.parametrize(
    "error", [DeadlineExceeded("engine-0", "it", 3), WireError("status 500"), RefusedRequest("top_k", "1", "none")]
)
async def test_requests_go_elsewhere_together_if_the_server_does_not_say_what_its_logprobs_follow(
    error: Exception,
) -> None:
    """And an update does not wait for it: the server is asked again with the new weights."""
    _, engine = await at(1, server=(server := Unhurried()))
    shaped = replace(plain := request("ab"), sampling=replace(plain.sampling, top_k=3))
    asking = [asyncio.create_task(engine.prepare([shaped])) for _ in range(3)]
    await settle()
    assert (await engine.update(2)).version == 2
    for answer in (None, error):
        server.answers.put_nowait(answer)
    lost = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(one) for one in lost] == [EngineLost] * 3
    assert str(error) in str(lost[0])
    assert len(server.asked) == 2
    server.answers.put_nowait(None)
    await engine.prepare([shaped])
