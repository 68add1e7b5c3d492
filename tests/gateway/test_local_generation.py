"""The engine of a gateway's own process: a turn that nobody waits for any more frees its row."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stretto.core.errors import EngineLost
from stretto.core.records import Completion, GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.generation import SharedGeneration
from stretto.launch.commands.gateway import LocalGeneration
from tests.gateway.serving import build_chat_model, in_a_loop


def request(name: str, tokens: int) -> GenerateRequest:
    return GenerateRequest(name, (1, 2, 3), (7,), Sampling(max_tokens=tokens))


async def whole(generate: LocalGeneration, asked: GenerateRequest) -> Completion:
    [completion] = [completion async for completion in generate(asked)]
    return completion


@in_a_loop
async def test_a_turn_that_is_given_up_frees_its_row(tmp_path: Path) -> None:
    engine = NativeEngine.load(build_chat_model(tmp_path / "model"), EngineConfig(slots=2))
    generation = SharedGeneration(engine)
    generate, steps = LocalGeneration(generation), asyncio.create_task(generation.run())
    try:
        abandoned = asyncio.create_task(whole(generate, request("abandoned", 500)))
        while not engine.health().generated:
            await asyncio.sleep(0)
        abandoned.cancel()
        with pytest.raises(asyncio.CancelledError):
            await abandoned
        assert generation.open_requests == 0
        assert engine.idle
        again = await whole(generate, request("abandoned", 5))
        assert len(again.token_ids) == 5
        lost = asyncio.create_task(whole(generate, request("lost", 500)))
        while engine.idle:
            await asyncio.sleep(0)
        generation.break_off()
        with pytest.raises(EngineLost):
            await lost
    finally:
        steps.cancel()
        await asyncio.wait([steps])
