"""Promise: a load of vLLM or SGLang that takes ten times its deadline and goes on is waited for, and ordered once; one
that stands still is named after its deadline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from stretto.core.errors import DeadlineExceeded
from stretto.engine.external.make import Make
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
        with server.loads_spoilt("still"), pytest.raises(DeadlineExceeded, match=rf"waited {DEADLINE:g} s for /.* of"):
            await wire.load(server.policy, 4, keep=False)
    finally:
        await wire.close()
    healthy = server.wire()
    try:
        assert await _loaded(healthy, server.policy, 5) == 1
    finally:
        await healthy.close()


def test_a_load_that_goes_on_is_waited_for_and_one_that_stands_still_is_named(server: RealServer) -> None:
    try:
        server.run(_slow(server))
    finally:
        for file in server.policy.glob("*.advance"):
            file.unlink()
