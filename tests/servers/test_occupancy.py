"""Promises over real sockets: a server of another make says how full it is, as vLLM 0.32 and SGLang 0.5.20 document it
and in replies made after their pages; one that does not say so is told apart."""

from __future__ import annotations

import json

import pytest

from stretto.core.errors import WireError
from stretto_servers.make import Occupancy
from tests.servers.test_wires import exchange

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 6.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.75
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
"""
LOADS = {"loads": [{"num_running_reqs": 8, "num_waiting_reqs": 4, "token_usage": 0.75}]}
FULL: dict[str, tuple[str, bytes]] = {
    "vllm": ("/metrics", METRICS.encode()),
    "sglang": ("/v1/loads?include=core", json.dumps(LOADS).encode()),
}


@pytest.mark.parametrize("kind", FULL)
def test_a_server_says_how_full_it_is(kind: str) -> None:
    """Eight requests run in three quarters of the cache and four wait: all need 12 / 8 of it."""
    path, page = FULL[kind]
    found, asked = exchange(kind, {path: (200, [page])}, lambda make: make.occupancy())
    assert found == Occupancy(running=8, waiting=4, cache=0.75, preempted=3 if kind == "vllm" else 0)
    assert found.needed == pytest.approx(0.75 * 12 / 8)
    assert [(method, path) for method, path, _ in asked] == [("GET", path)]


@pytest.mark.parametrize("kind", FULL)
@pytest.mark.parametrize("page", [b"{}", b'{"loads": []}', b"# nothing of the kind"])
def test_a_server_that_does_not_say_how_full_it_is_is_told_apart(kind: str, page: bytes) -> None:
    with pytest.raises(WireError, match="does not say how full"):
        exchange(kind, {FULL[kind][0]: (200, [page])}, lambda make: make.occupancy())
