"""Promises of an engine over another server: every token has the stamp of the version that sampled it, through updates
of both kinds; none is lost or comes twice; another engine goes on behind what is told; what is not certain, or not
proven, is not told.

The server is a small real one, whose tokens say of themselves which version sampled them (`toy.assert_law`)."""

import asyncio
import resource
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from stretto.core.canary import FARTHEST, Canary, Challenge, Loaded, Scores, TensorDigest
from stretto.core.errors import EngineLost, RefusedRequest, RoleFailed, TornPublication
from stretto.core.records import Segment, StopReason
from stretto.engine.text import StopTexts
from stretto.weights.shared_memory import digest_of_tensor
from stretto_servers.engine import ExternalEngine
from stretto_servers.make import Continuation, Delta, Limits, Occupancy
from stretto_servers.role import most_connections
from stretto_servers.staging import FolderAsItIs
from stretto_servers.worker.readback import sums_of
from tests.servers.toy import (
    CONTEXT,
    VOCABULARY,
    Letters,
    OnUpdate,
    Publications,
    ToyServer,
    assert_law,
    at,
    completions_of,
    engine_over,
    in_steps,
    logprob_of,
    play,
    request,
    settle,
    token_after,
)


async def at_version(engine: ExternalEngine, version: int) -> None:
    assert (await engine.update(version)).version == version


def prompt_of(name: str) -> tuple[int, ...]:
    return request(name).prompt_token_ids


async def test_completions_are_the_servers_tokens_with_the_loaded_version() -> None:
    server, engine = await at(3)
    found = await completions_of(server, engine.submit_all([request("ab", completions=3)]))
    assert [completion.member for completion in found] == [0, 1, 2]
    for completion in found:
        assert_law(prompt_of("ab"), completion)
        assert set(completion.versions) == {3}
    assert [asked.seed for asked in server.asked] == [100, 101, 102]


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_each_token_has_the_version_that_sampled_it_through_several_updates(on_update: OnUpdate) -> None:
    server, engine = await at(0, on_update)
    stream = engine.submit_all([request("kl", max_tokens=9)])
    for version in (1, 2, 5):
        await play(server, rounds=2)
        await at_version(engine, version)
    (found,) = await completions_of(server, stream)
    assert (found.versions, found.interrupted) == ((0, 0, 1, 1, 2, 2, 5, 5, 5), 3)
    assert_law(prompt_of("kl"), found)


async def test_a_recompute_asks_again_behind_the_tokens_with_another_seed() -> None:
    server, engine = await at(0)
    engine.submit_all([request("cd", max_tokens=9)])
    await play(server, count=4)
    await at_version(engine, 1)
    await settle()
    first, second = server.asked
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    assert len(second.token_ids) == len(first.token_ids) + 4
    assert (first.max_tokens, second.max_tokens) == (9, 5)
    assert first.seed != second.seed
    assert (await engine.health()).recomputed == 4


async def test_tokens_whose_first_ones_arrive_after_an_update_began_are_asked_for_again() -> None:
    server, engine = in_steps()
    stream = engine.submit_all([request("ab", max_tokens=5)])
    await settle()
    server.sample(2)  # by version 0, and on their way
    await let_on(server, asyncio.create_task(engine.update(1)), deliver=False)
    server.deliver()  # when version 1 is loaded
    (found,) = await completions_of(server, stream)
    assert (found.versions, found.interrupted) == ((1, 1, 1, 1, 1), 0)
    assert_law(prompt_of("ab"), found)
    assert len(server.asked) == 2


async def let_on(server: ToyServer, update: asyncio.Task[Loaded], *, deliver: bool = True) -> None:
    """Let an update go through all of its steps."""
    while not update.done():
        await asyncio.sleep(0.0005)
        if deliver:
            server.deliver()
        while server.waiting:
            server.waiting.pop(0).set()
    await settle()


async def test_a_request_that_an_update_finds_blocked_is_served_by_the_new_version() -> None:
    server, engine = in_steps()
    update = asyncio.create_task(engine.update(1))
    while not server.waiting:
        await asyncio.sleep(0.0005)
    stream = engine.submit_all([request("ab", max_tokens=5)])
    await play(server)
    assert not server.asked  # weights are being loaded
    await let_on(server, update)
    (found,) = await completions_of(server, stream)
    assert set(found.versions) == {1}
    assert found.interrupted == 0


async def test_with_keep_tokens_after_an_update_are_withheld_until_the_server_has_told_their_versions() -> None:
    server, engine = in_steps("keep")
    stream = engine.submit_all([request("ab", max_tokens=8)])
    await play(server, count=2)
    server.sample(1)  # the third token is sampled by version 0 and arrives after the update
    await let_on(server, asyncio.create_task(engine.update(4)), deliver=False)
    await play(server, count=3)
    assert engine.partials({"ab": [1]})["ab"][0].versions == (0,)
    assert engine.partials({"ab": [2]}) == {}
    (found,) = await completions_of(server, stream)
    assert (found.versions, found.interrupted) == ((0, 0, 0, 4, 4, 4, 4, 4), 1)
    assert_law(prompt_of("ab"), found)
    assert len(server.asked) == 1


async def test_another_engine_goes_on_behind_what_is_told() -> None:
    (server, engine), (other, next_engine) = await at(0), await at(2)
    engine.submit_all([request("ab", completions=2, max_tokens=9)])
    await play(server, count=4)
    known = engine.partials({"ab": [0, 0]})["ab"]
    assert [len(known[member].token_ids) for member in (0, 1)] == [4, 4]
    assert engine.partials({"ab": [3, 4]})["ab"].keys() == {0}
    engine.close("ab")
    prefixes = (known[0], Segment())
    stream = next_engine.submit_all([request("ab", completions=2, max_tokens=9, prefixes=prefixes)])
    found = await completions_of(other, stream)
    assert (found[0].versions, found[1].versions) == ((0,) * 4 + (2,) * 5, (2,) * 9)
    for completion in found:
        assert_law(prompt_of("ab"), completion)
    assert len({asked.seed for asked in (*server.asked, *other.asked)}) == 3  # 100 and 101; one behind four


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("count", [1, 3, 8])
async def test_a_stop_text_ends_a_completion_with_the_token_that_completes_it(
    on_update: OnUpdate, updated: bool, count: int
) -> None:
    tokens, version = list(prompt_of("ab")), 0
    for place in range(6):
        version = 1 if updated and place >= 2 else 0
        tokens.append(token_after(tokens, version))
    text = "".join(chr(ord("A") + token) for token in tokens[-2:])
    server, engine = await at(0, on_update)
    stream = engine.submit_all([request("ab", stop=(text,))])
    if updated:
        await play(server, count=2)
        await at_version(engine, 1)
    await play(server, count=count)
    (found,) = await completions_of(server, stream)
    assert found.token_ids == tuple(tokens[2:])
    assert found.stop_reason is StopReason.STOP
    assert_law(prompt_of("ab"), found)
    await settle()
    assert not server.running  # nothing is generated for nobody


async def test_nothing_is_sampled_behind_a_beginning_that_has_ended() -> None:
    """The engine before was lost between the last token and its end: a stop token, a stop text, the limit."""
    server, engine = await at(0)
    begun = [Segment.of(tokens, (-1.0,) * len(tokens), (0,) * len(tokens)) for tokens in ((7, 1), (5, 7, 8), (5,) * 12)]
    stream = engine.submit_all([request("ab", completions=3, stop=("HI",), prefixes=tuple(begun))])
    found = await completions_of(server, stream)
    assert [one.token_ids for one in found] == [one.token_ids for one in begun]
    assert [one.stop_reason for one in found] == [StopReason.STOP, StopReason.STOP, StopReason.LENGTH]
    assert server.asked == []


async def test_a_closed_request_ends_on_the_server_and_its_tokens_count_as_wasted() -> None:
    server, engine = await at(0)
    engine.submit_all([request("ab", completions=2), request("cd", max_tokens=1)])
    await play(server, count=3)
    health = await engine.health()
    assert (health.running, health.generated, health.unfinished, health.wasted) == (2, 7, 6, 0)
    engine.close("ab")
    engine.close("cd")  # it has ended: its token is no waste
    engine.close("never opened")
    await settle()
    assert not server.running
    health = await engine.health()
    assert (health.running, health.generated, health.unfinished, health.wasted) == (0, 7, 0, 6)


async def test_how_full_the_server_is_counts_and_else_the_slots_of_the_recipe() -> None:
    server = ToyServer()
    engine = engine_over(server, slots=4)
    await at_version(engine, 0)
    engine.submit_all([request("ab", completions=2)])
    await settle()
    health = await engine.health()  # the server does not say
    assert (health.needed, health.preempted) == (2 / 4, 0)
    server.full = Occupancy(running=1, waiting=1, cache=0.6, preempted=3)
    health = await engine.health()
    assert (health.needed, health.preempted) == (1.2, 3)
    engine.close("ab")
    await settle()


async def test_the_context_and_max_tokens_bound_what_is_asked_for() -> None:
    server, engine = await at(0)
    engine.submit_all([request("ab", max_tokens=500), request("cd", max_tokens=7)])
    await settle()
    assert [asked.max_tokens for asked in server.asked] == [CONTEXT - 2, 7]
    with pytest.raises(RefusedRequest, match="prompt_token_ids"):
        engine.submit_all([request("x" * CONTEXT)])
    for twice in (["ef", "ef"], ["ab"]):
        with pytest.raises(RefusedRequest, match="an id that no open request uses"):
            engine.submit_all(list(map(request, twice)))


async def test_two_updates_at_once_are_loaded_one_after_the_other() -> None:
    server = ToyServer()
    engine = engine_over(server)
    loaded = await asyncio.gather(engine.update(3), engine.update(4), engine.update(4))
    assert [one.version for one in loaded] == [3, 4, 4]
    assert (server.version, server.paused, (await engine.health()).updates) == (4, False, 2)


async def test_an_older_version_and_a_torn_one_leave_the_engine_as_it_was() -> None:
    server, weights = ToyServer(), Publications()
    weights.torn.add(6)
    engine = engine_over(server, weights=weights)
    await at_version(engine, 5)
    stream = engine.submit_all([request("ab", max_tokens=6)])
    await play(server, count=2)
    for version, error in ((4, RefusedRequest), (6, TornPublication)):
        with pytest.raises(error):
            await engine.update(version)
    assert (server.version, server.paused, engine.version) == (5, False, 5)
    (found,) = await completions_of(server, stream)
    assert (found.versions, found.interrupted, len(server.asked)) == ((5,) * 6, 0, 1)


async def answered(
    server: ToyServer, engine: ExternalEngine, version: int, wanted: int = 0, **digests: TensorDigest
) -> Scores:
    """What the engine tells with the load of a version. Its text is of no account."""
    challenge = Challenge(Canary(version, (2, 3, 4), (), 1, digests=digests), FARTHEST, wanted)
    updating = asyncio.create_task(engine.update(version, challenge))
    while not updating.done():
        await asyncio.sleep(0.001)
        if any(name.startswith("canary") for name in server.running):
            await play(server)
    scores = updating.result().scores
    assert scores is not None
    return scores


async def test_what_has_changed_in_a_servers_memory_since_its_proof_is_told_with_the_next_load(tmp_path: Path) -> None:
    memory = torch.arange(4.0)
    save_file({"a": memory.clone()}, tmp_path / "model.safetensors")

    class Held(ToyServer):
        async def held(self, folder: Path, shapes: Mapping[str, Sequence[int]]) -> Sequence[Mapping[str, str]]:
            return [{name: str(sums_of(memory)) for name in shapes}]

    engine, a = engine_over(server := Held(), weights=FolderAsItIs(tmp_path)), digest_of_tensor(memory)
    told = list[tuple[int, tuple[str, ...]]]()
    for version in range(1, 6):
        memory += float(version == 3)
        found = await answered(server, engine, version, a=a)
        memory -= float(version == 3)
        told.append((found.left, found.changed))
        assert found.differing == (("a",) if version == 3 else ())
    assert told == [(-1, ()), (1, ()), (2, ("a",)), (-1, ()), (4, ())], "of a version in doubt nothing is told"
    memory, server.refuses_load = memory + 1.0, True
    with pytest.raises(RoleFailed):
        await answered(server, engine, 6, a=a)
    memory, server.refuses_load = memory - 1.0, False
    found = await answered(server, engine, 6, a=a)
    assert (found.left, found.changed) == (5, ("a",)), "what was found before a load that failed is told with the next"


async def test_tokens_of_the_version_before_are_computed_again_before_the_next_one_is_loaded() -> None:
    class Twisted(ToyServer):
        async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
            return tuple(logprob_of(token, self.version) - 0.5 for token in token_ids[1:])

    server, engine = await at(1, server=Twisted())
    engine.submit_all([request("ab", completions=2, max_tokens=40)])
    await play(server, rounds=3)
    await at_version(engine, 2)
    await play(server, rounds=2)
    found = (await answered(server, engine, 3, 64)).sampled
    assert len(found) == 4, "two tokens of each completion are of version 2"
    assert all(told <= -3 and told - again == pytest.approx(0.5) for told, again in found)
    await play(server, rounds=2)
    assert len((await answered(server, engine, 4, 1)).sampled) == 2, "one completion is enough"


@pytest.mark.parametrize(
    ("on_update", "sampling"),
    [("keep", {}), ("recompute", {"temperature": 0.7}), ("recompute", {"top_k": 3})],
    ids=["an older cache", "a temperature", "a filter"],
)
async def test_tokens_that_a_server_cannot_compute_as_they_were_sampled_are_left_out(
    on_update: OnUpdate, sampling: dict[str, Any]
) -> None:
    server, engine = await at(1, on_update)
    wanted = request("ab", max_tokens=40)
    other = msgspec.structs.replace(wanted.sampling, **sampling)
    engine.submit_all([msgspec.structs.replace(wanted, sampling=other)])
    await play(server, rounds=3)
    assert (await answered(server, engine, 2, 64)).sampled == ()


async def test_the_end_of_the_engine_breaks_off_what_is_open_and_keeps_what_is_ended() -> None:
    server, engine = await at(0)
    life = asyncio.create_task(engine.run())
    await settle()
    short, long = engine.submit_all([request("ab", max_tokens=1)]), engine.submit_all([request("cd")])
    await play(server)
    engine._fail(EngineLost("engine-0", "was told to end"))
    await settle()
    assert (short.ready, short.broken, long.broken) == (True, False, True)
    assert not server.running
    with pytest.raises(EngineLost, match="is stopping"):
        engine.submit_all([request("ef")])
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)


async def test_no_more_requests_are_open_than_this_process_has_descriptors_for() -> None:
    """The others wait, through an update too, and none is taken for a fault of the server."""

    class Counting(ToyServer):
        most = 0

        async def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
            async for delta in super().stream(continuation):
                self.most = max(self.most, len(self.running))
                yield delta

    server = Counting()
    limits = Limits(VOCABULARY, CONTEXT, connections=2)
    engine = ExternalEngine("engine-0", server, limits, Publications(), StopTexts(Letters), "recompute")
    await at_version(engine, 1)
    stream = engine.submit_all([request("ab", completions=7)])
    await play(server, count=2)
    await at_version(engine, 2)
    found = await completions_of(server, stream)
    assert [completion.member for completion in found] == [*range(7)]
    for completion in found:
        assert_law(prompt_of("ab"), completion)
    assert server.most == 2


def test_an_adapter_takes_the_descriptors_that_it_may_have_and_keeps_half_of_them_for_its_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limit[1]), limit[1]))
        most_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit[1], limit[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: None)
    for allowed, least, most in ((8, 1, 1), (1024, 100, 480), (resource.RLIM_INFINITY, sys.maxsize, sys.maxsize)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, allowed=allowed: (allowed, allowed))
        assert least <= most_connections() <= most


async def challenged(server: ToyServer, engine: ExternalEngine, version: int, tolerance: float) -> bool:
    """Whether the engine has proven the version, while its server goes on with what it has."""
    challenge = Challenge(Canary(version, (2, 3, 4), (-9.0, -9.0), 1), tolerance, keeps=engine._keep)
    updating = asyncio.create_task(engine.update(version, challenge))
    while not (server.paused or server.version == version or updating.done()):  # it reads the folder in a thread
        await asyncio.sleep(0.001)
    while not updating.done():
        await asyncio.sleep(0.001)
        await play(server, count=4)
    scores = updating.result().scores
    return scores is not None and challenge.is_answered(scores)


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_of_a_version_that_is_not_proven_no_token_is_told_and_none_is_asked_for(on_update: OnUpdate) -> None:
    """One completion would end by it, one goes on, and one is new."""
    server, engine = await at(1, on_update)
    stream = engine.submit_all([request("ab", max_tokens=6), request("cd", max_tokens=40)])
    await play(server, count=2)
    assert not await challenged(server, engine, 2, 0.0)
    new = engine.submit_all([request("ef")])
    await play(server, rounds=3)
    told = engine.partials({"ab": [0], "cd": [0], "ef": [0]})
    assert {name: pieces[0].versions for name, pieces in told.items()} == {"ab": (1, 1), "cd": (1, 1)}
    assert server.running == {}
    assert not any(one.ready for one in (stream, new))
    assert await challenged(server, engine, 2, FARTHEST)
    found = await completions_of(server, stream) + await completions_of(server, new)
    assert [one.versions[:3] for one in found] == [(1, 1, 2), (1, 1, 2), (2, 2, 2)]
    for name, one in zip(("ab", "cd", "ef"), sorted(found, key=lambda one: one.request), strict=True):
        assert_law(prompt_of(name), one)


async def test_what_ended_before_an_update_is_told_while_the_version_is_in_doubt() -> None:
    """Its end arrives when the server is paused already, and may have sampled with both versions."""
    server, engine = in_steps("keep")
    stream = engine.submit_all([request("ab", max_tokens=3)])
    await play(server, count=2)
    server.sample()
    updating = asyncio.create_task(challenged(server, engine, 1, 0.0))
    for _ in range(2):
        while not server.waiting:
            await asyncio.sleep(0)
        server.waiting.pop().set()
    await play(server)
    assert stream.ready
    while not updating.done():
        await asyncio.sleep(0.001)
        while server.waiting:
            server.waiting.pop().set()
    assert not updating.result()
    assert [one.versions for one in await completions_of(server, stream)] == [(0, 0, 0)]


async def test_what_a_server_gives_up_is_told_up_to_the_version_in_doubt() -> None:
    class GivesUp(ToyServer):
        async def resume(self) -> None:
            await super().resume()
            self.sample(2)
            for running in self.running.values():
                running.ended = "abort"
            self.deliver()

    server, engine = await at(1, "keep", GivesUp())
    engine.submit_all([request("ab")])
    await play(server, count=2)
    assert not await challenged(server, engine, 2, 0.0)
    assert engine.partials({"ab": [0]})["ab"][0].versions == (1, 1)
    assert await challenged(server, engine, 3, FARTHEST)
    await play(server)
    assert engine.partials({"ab": [0]})["ab"][0].versions == (1, 1, 3)
    assert server.cached == {3}, "nothing of the refused version"
