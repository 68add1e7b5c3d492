"""What is asked together is computed together, and comes out the same to the last bit.

- Whatever an engine has done before, a portion that it gets when it is idle has the numbers of a new engine.
- Requests of one message begin in the same step, or none of them does.
"""

from pathlib import Path

import pytest

from stretto.core.errors import RefusedRequest
from stretto.core.records import Completion, GenerateRequest
from tests.engine.answering import engine_of, finish, request
from tests.engine.serving import served

TOGETHER = [request(f"r{k}", prompt=5 + 7 * k, seeds=range(2 + k)) for k in range(4)]


def alone(folder: Path) -> dict[tuple[str, int], Completion]:
    return finish(engine_of(folder), *TOGETHER)


def test_what_an_engine_did_before_leaves_no_trace(folder: Path) -> None:
    """Fourteen completions in eight slots."""
    engine, expected = engine_of(folder), alone(folder)
    for before in (3, 1, 5):
        finish(engine, *(request(f"b{k}", prompt=60 + k, seeds=range(before)) for k in range(before)))
        assert finish(engine, *TOGETHER) == expected
    engine.add(request("stopped", seeds=range(7)))
    engine.step()
    engine.abort("stopped")
    assert finish(engine, *TOGETHER) == expected


async def test_requests_of_one_message_begin_in_the_same_step(folder: Path, tmp_path: Path) -> None:
    async with served(engine_of(folder), tmp_path / "e.sock") as client:
        assert {(c.request, c.member): c async for c in client.generate(*TOGETHER)} == alone(folder)


async def test_of_requests_one_of_which_is_refused_none_begins(folder: Path, tmp_path: Path) -> None:
    wrong = GenerateRequest(id="w", prompt_token_ids=(), seeds=(1,), sampling=TOGETHER[0].sampling)

    async with served(engine_of(folder), tmp_path / "e.sock") as client:
        for asked in ([*TOGETHER, wrong], []):
            with pytest.raises(RefusedRequest):
                await anext(client.generate(*asked))
        health = await client.health()
        assert (health.running, health.waiting) == (0, 0)
        assert {(c.request, c.member): c async for c in client.generate(*TOGETHER)} == alone(folder)
