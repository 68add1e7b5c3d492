"""Promise: a load of vLLM or SGLang that takes ten times its deadline and goes on is waited for, and ordered once; one
that stands still is named after its deadline."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from stretto.core.deadlines import standstill
from stretto.core.errors import DeadlineExceeded
from stretto_servers.make import Make
from tests.real_engines.serving import RealServer

DEADLINE = 1.0
TIMES = 10
READS = {"vllm": 2, "sglang": 1}  # of each tensor: vLLM's are read once before its layers are emptied


async def _loaded(wire: Make, folder: Path, version: int) -> int:
    """How often something was ordered that takes long."""
    http: Any = wire._http  # type: ignore[attr-defined]  # of both makes
    exchange, orders = http.exchange, 0

    async def counted(*words: Any, **settings: Any) -> Any:
        nonlocal orders
        orders += words[1] in ("/collective_rpc", "/update_weights_from_disk")
        return await exchange(*words, **settings)

    http.exchange = counted
    await wire.pause(keep=False)
    try:
        await wire.load(folder, version, keep=False)
    finally:
        http.exchange = exchange
        await wire.resume()
    return orders


async def _slow(server: RealServer) -> None:
    wire = server.wire(DEADLINE)
    with safe_open(server.policy / "model.safetensors", "pt") as file:
        tensors = len(file.keys())
    try:
        with server.loads_spoilt("slow", str(TIMES * DEADLINE / tensors / READS[server.kind])):
            before = wire.read
            assert await _loaded(wire, server.policy, 3) == 1
            assert wire.read > before
    finally:
        await wire.close()
    patient = server.wire()
    await patient.pause(keep=False)
    try:
        # A server of SGLang whose load is given up ends, and this one serves other tests too: so the load is watched as
        # the adapter watches it, and not cut off.
        loading = asyncio.create_task(patient.load(server.policy, 4, keep=False))
        moved = partial(asyncio.to_thread, lambda: patient.read)
        with server.loads_spoilt("still"), pytest.raises(DeadlineExceeded, match="waited 1 s for the load and gave up"):
            async with standstill("the test", "the load", DEADLINE, moved):
                await asyncio.shield(loading)
        await loading
    finally:
        await patient.resume()
        await patient.close()


async def test_a_load_that_goes_on_is_waited_for_and_one_that_stands_still_is_named(server: RealServer) -> None:
    try:
        await _slow(server)
    finally:
        for file in server.policy.glob("*.advance"):
            file.unlink()
