"""Promises of what proves a server's weights: each worker tells what it holds, and a version of the same number that
another run has loaded into the server is not taken for ours. And of what proves that its log-probabilities are of the
distribution that it samples from: it is asked before the first request with a temperature or filters."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stretto.core.errors import DeadlineExceeded, EngineLost, RefusedRequest, WireError
from stretto.core.records import Sampling
from stretto_servers.make import new_mark
from tests.servers.test_wires import DONE, GENERATE, all_of, exchange, vllm_event
from tests.servers.toy import Shaping, at, request

SHAPES = {"model.norm.weight": (8,)}
TOLD = {"model.norm.weight": "F32 4 8 1 2"}
HELD = {
    "vllm": ("/collective_rpc", {"method": "stretto_held", "args": ["/folder", '{"model.norm.weight":[8]}']}),
    "sglang": (
        "/weights_checker",
        {"action": "stretto_held", "skip_tensor_list": ["/folder", '{"model.norm.weight":[8]}'], "selector": "target"},
    ),
}
ANSWERS = {"vllm": {"results": [TOLD, TOLD]}, "sglang": {"success": True, "ranks": [{"checksums": TOLD}] * 2}}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_what_each_worker_holds_is_asked_for_and_told(kind: str) -> None:
    path, order = HELD[kind]
    replies = {path: (200, [json.dumps(ANSWERS[kind]).encode()])}
    found, asked = exchange(kind, replies, lambda make: make.held(Path("/folder"), SHAPES))
    assert (list(found), asked) == ([TOLD, TOLD], [("POST", path, order)])


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("told", [b"{}", b'{"results": 3, "ranks": 3}', b'{"results": [{"a": 1}], "ranks": [{}]}'])
def test_what_no_worker_holds_is_an_error(kind: str, told: bytes) -> None:
    with pytest.raises(WireError, match="does not say what its workers hold"):
        exchange(kind, {HELD[kind][0]: (200, [told])}, lambda make: make.held(Path("/folder"), SHAPES))


@pytest.mark.parametrize("status", [400, 404])
def test_a_server_of_sglang_without_the_plugin_tells_nothing(status: int) -> None:
    told = {400: b'{"success": false, "message": "Unsupported action=\'stretto_held\'"}', 404: b"Not Found"}[status]
    found, _ = exchange(
        "sglang", {HELD["sglang"][0]: (status, [told])}, lambda make: make.held(Path("/folder"), SHAPES)
    )
    assert list(found) == []


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_worker_that_cannot_read_its_memory_is_an_error(kind: str, status: int) -> None:
    replies = {HELD[kind][0]: (status, [b'{"success": false, "message": "CUDA error: an illegal memory access"}'])}
    with pytest.raises(WireError, match="illegal memory access"):
        exchange(kind, replies, lambda make: make.held(Path("/folder"), SHAPES))


@pytest.mark.parametrize(("name", "told"), [("7-theirs", "7-theirs"), ("7", "7 of others"), ("default", "default")])
def test_a_version_that_another_run_has_loaded_is_not_taken_for_ours(name: str, told: str) -> None:
    """Two runs with one address in `engine.addresses`: both may load a version 7."""
    [delta], _ = exchange("vllm", {GENERATE["vllm"]: (200, [vllm_event(range(4), "length", name), DONE])}, all_of)
    assert delta.spans == ((told, 0, 4),)


def test_each_adapter_has_a_mark_of_its_own() -> None:
    assert len({new_mark() for _ in range(100)}) == 100


@pytest.mark.parametrize("sampling", [{"temperature": 0.8}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
async def test_a_server_is_asked_once_whether_its_logprobs_are_of_the_distribution_that_it_samples(
    sampling: dict[str, Any],
) -> None:
    plain = request("ab")
    shaped = msgspec.structs.replace(plain, sampling=msgspec.structs.replace(plain.sampling, **sampling))
    for raw in (False, True):
        server, engine = await at(1, server=Shaping(raw))
        await engine.prepare([plain, msgspec.structs.replace(shaped, id="evaluation..3")])
        assert server.asked == []
        with pytest.raises(RefusedRequest, match="--logprobs-mode processed_logprobs") if raw else nullcontext():
            await engine.prepare([plain, shaped])
        await engine.prepare([plain])
        await asyncio.gather(*(engine.prepare([shaped]) for _ in range(3)), return_exceptions=raw)
        assert len(server.asked) == 1


async def test_a_server_that_does_not_answer_whether_its_logprobs_follow_is_asked_again() -> None:
    class Late(Shaping):
        async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
            if len(self.asked) == 1:
                raise DeadlineExceeded("the adapter", "a score", 0.1)
            return await super().score(token_ids)

    _, engine = await at(1, server=Late(raw=False))
    shaped = msgspec.structs.replace(request("ab"), sampling=Sampling(max_tokens=4, temperature=0.8))
    with pytest.raises(EngineLost, match="a score"):
        await engine.prepare([shaped])
    await engine.prepare([shaped])
