"""The engine of another machine, as the run sees it, over real sockets.

- One that cannot be reached, or never answers, is lost to the run and does not end it.
- When its machine is what is lost, or has fallen silent, its requests are not the cause.
- It answers to the run's key alone; with TLS, to certificates of the run's authority alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stretto.core.errors import EngineLeft, EngineLost, RefusedRequest
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.http.client import HttpEngine
from stretto.engine.http.server import run_server
from stretto.engine.spec import EngineSpec
from stretto.loop.config import DeadlinesConfig
from stretto.model.hf.build import build_policy
from stretto.processes.tls import client_context
from stretto.processes.wire import Wire
from stretto_cluster.guest import GuestEngine
from stretto_cluster.messages import Beat, MachineReady, Mirrored, RolePlace, RunTerms, ToAgent
from tests.certificates import authority
from tests.cluster.hosting import hosted, introduction, joined_by_hand
from tests.cluster.test_gate import now
from tests.engine.answering import engine_of
from tests.engine.serving import Mailbox, until_up
from tests.tiny_policy import TINY

REQUEST = GenerateRequest(id="0.0.0", prompt_token_ids=(3, 4), seeds=(1,), sampling=Sampling(max_tokens=4))


@asynccontextmanager
async def guest_at(address: str, folder: Path, answer: float = 0.3) -> AsyncIterator[tuple[GuestEngine, Wire[ToAgent]]]:
    """The client of an engine at an address, and the agent of its machine."""
    async with hosted(folder) as host:
        wire = await joined_by_hand(host.address, introduction())
        wire.send(MachineReady((RolePlace(address, "/tmp"),), "/m", "/w"))
        machine = await host.machine()
        spec = EngineSpec("engine-3", address, "", "", "", "{}", 1, 0.0)
        guest = GuestEngine(spec, machine, DeadlinesConfig(answer=answer, load=0.3), "key", None, lambda: 7)
        try:
            yield guest, wire
        finally:
            await guest.close()
            wire.cut()


async def one(guest: HttpEngine) -> None:
    async for _ in guest.generate(REQUEST):
        pass


@contextlib.contextmanager
def listening_only() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_an_engine_that_never_answers_is_lost_and_does_not_end_the_run(tmp_path: Path) -> None:
    async def work() -> None:
        with listening_only() as address:
            async with guest_at(address, tmp_path) as (guest, wire):
                with pytest.raises(EngineLost, match=r"waited 0\.3 s for the next completion") as lost:
                    await one(guest)
                assert not isinstance(lost.value, EngineLeft)  # its machine is there: the requests may be the cause
                wire.send(Mirrored(version=4, size=1, seconds=0.1))
                with pytest.raises(EngineLost, match="to load version 4"):
                    await guest.update(4)

    now(work())


def test_an_engine_to_which_no_packet_comes_through_is_lost_when_its_deadline_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a full backlog the kernel drops the first packet of a connection, as a partition does."""
    monkeypatch.setattr("stretto.engine.http.connections._CONNECT_SECONDS", 0.3)

    async def work() -> None:
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            crowd = [socket.socket() for _ in range(4)]
            for caller in crowd:
                caller.setblocking(False)
                caller.connect_ex(full.getsockname())
            async with guest_at(f"127.0.0.1:{full.getsockname()[1]}", tmp_path) as (guest, _):
                with pytest.raises(EngineLost, match=r"waited 0\.3 s for a connection"):
                    await one(guest)
            for caller in crowd:
                caller.close()

    now(work())


def test_an_engine_at_a_name_that_nobody_has_is_lost(tmp_path: Path) -> None:
    async def work() -> None:
        async with guest_at("nobody.invalid:80", tmp_path) as (guest, _):
            with pytest.raises(EngineLost, match="engine-3 cannot be reached"):
                await one(guest)

    now(work())


def test_a_machine_that_goes_a_moment_after_its_engine_is_what_was_lost(tmp_path: Path) -> None:
    async def work() -> None:
        with listening_only() as address:
            async with guest_at(address, tmp_path, answer=30.0) as (guest, wire):
                asking = asyncio.create_task(one(guest))
                await asyncio.sleep(0.1)
                guest.break_off()
                await asyncio.sleep(0.1)
                wire.cut()
                with pytest.raises(EngineLeft):
                    await asking
                with pytest.raises(EngineLost, match="node-7-1 closed its connection"):
                    await guest.update(4)

    now(work())


def test_a_machine_that_has_fallen_silent_is_what_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto_cluster.guest.SILENT_SECONDS", 0.6)

    async def work() -> None:
        with listening_only() as address:
            async with guest_at(address, tmp_path) as (guest, wire):
                wire.send(Beat(sent=0.0, clock_offset=0.0))
                await asyncio.sleep(0.7)
                with pytest.raises(EngineLeft):
                    await one(guest)
                assert isinstance(await wire.receive(), RunTerms)

    now(work())


@asynccontextmanager
async def engine_at(folder: Path, tls: str = "") -> AsyncIterator[str]:
    """A real engine that wants a key; its address."""
    build_policy(TINY, folder / "policy", seed=1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    server = asyncio.create_task(run_server(engine_of(folder / "policy"), Mailbox(), address, "the key", tls))
    try:
        yield address
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


def test_an_engine_answers_to_the_runs_key_alone_and_over_tls_to_its_certificates_alone(tmp_path: Path) -> None:
    ours, theirs = str(authority(tmp_path / "ours")), str(authority(tmp_path / "theirs"))

    async def work() -> None:
        async with engine_at(tmp_path, ours) as address:

            def client(key: str, tls: str) -> HttpEngine:
                return HttpEngine("engine-3", address, health_seconds=5, key=key, context=client_context(tls))

            right = client("the key", ours)
            await until_up(right)
            await one(right)
            for key in ("", "another", "the ke"):
                wrong = client(key, ours)
                with pytest.raises(RefusedRequest, match="key: is wrong"):
                    await one(wrong)
                with pytest.raises(RefusedRequest, match="key: is wrong"):
                    await wrong.health()
                await wrong.close()
            for tls in (theirs, ""):
                stranger = client("the key", tls)
                with pytest.raises(EngineLost):
                    await stranger.health()
                await stranger.close()
            await right.close()

    now(work())
