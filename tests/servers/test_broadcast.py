"""Promises: a server gets the tensors of a version by a group of two real processes, to the bit and in the orders that
its make documents; a server that says no, does not join or dies in the middle is an error within the bound, never a
wait without end; a server that has left can join again."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.core.errors import DeadlineExceeded, EngineLost, WireError
from stretto_servers import broadcast
from stretto_servers.broadcast import Broadcast, Orders, SglangOrders, VllmOrders
from tests.servers.conftest import Receiving

SGLANG = SglangOrders("one", "gloo")


@pytest.fixture
def server(shared: Receiving) -> Receiving:
    """Tests that break their group have one of their own name."""
    shared.orders.clear()
    shared.file.unlink(missing_ok=True)
    return shared


def to(server: Receiving, orders: Orders = SGLANG, seconds: float = 30.0) -> Broadcast:
    return Broadcast("engine-0", server.post, orders, host="127.0.0.1", ranks=1, seconds=seconds)


def tensors(value: float) -> dict[str, Tensor]:
    return {
        "embed": torch.full((50, 8), value, dtype=torch.bfloat16),
        "wide": torch.arange(12.0).view(3, 4).t() + value,  # not contiguous
        "norm": torch.full((8,), -value),
    }


@pytest.mark.parametrize("orders", [SGLANG, VllmOrders()], ids=["sglang", "vllm"])
async def test_two_versions_arrive_to_the_bit_in_buckets_and_two_more_when_the_server_has_left_and_joined_again(
    orders: Orders, server: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "_BUCKET", 850)  # the embedding has 800 bytes, the others 48 and 32
    for life in ((7, 8), (9, 10)):
        ours = to(server, orders)
        await ours.open()
        for version in life:
            await ours.send(version, tensors(version))
            told, got = server.received()
            assert (told, got.keys()) == (str(version), tensors(0).keys())
            assert all(torch.equal(got[name], tensor) for name, tensor in tensors(version).items())
        await ours.close()
    named = (orders.join("", 0, 2), orders.begin(), orders.receive([], 1), orders.end(1), orders.leave())
    join, begin, receive, end, leave = (path for path, _ in named)
    assert server.orders == [join, *[begin, receive, receive, end] * 2, leave] * 2


def test_the_orders_are_those_that_the_makes_document() -> None:
    named = [("a", torch.zeros(2, 3, dtype=torch.bfloat16))]
    assert replace(SGLANG, mark="-ours").receive(named, 7) == (
        "/update_weights_from_distributed",
        {
            "names": ["a"],
            "dtypes": ["bfloat16"],
            "shapes": [[2, 3]],
            "group_name": "one",
            "flush_cache": True,
            "weight_version": "7-ours",
        },
    )
    assert "weight_version" not in (SGLANG.receive(named, None)[1] or {})
    assert VllmOrders().receive(named, 7) == (
        "/update_weights",
        {"update_info": {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}},
    )
    assert VllmOrders().join("10.0.0.1", 5000, 3) == (
        "/init_weight_transfer_engine",
        {"init_info": {"master_address": "10.0.0.1", "master_port": 5000, "rank_offset": 1, "world_size": 3}},
    )


class Forgetful(SglangOrders):
    def begin(self) -> broadcast.Order:
        return "/nothing", {}


async def test_a_server_that_says_no_is_an_error_at_once(server: Receiving) -> None:
    """Our half of the collective would wait for it."""
    ours = to(server, Forgetful("broken", "gloo"), seconds=3.0)
    await ours.open()
    start = time.monotonic()
    with pytest.raises(WireError, match="must run between begin and end"):
        await ours.send(7, {"large": torch.zeros(4 << 20)})
    assert time.monotonic() - start < 2.0
    assert not server.file.exists()


async def test_a_server_that_dies_in_the_middle_is_lost(tmp_path: Path) -> None:
    server = Receiving(tmp_path / "received.safetensors")
    try:
        ours = to(server, SglangOrders("lost", "gloo"), seconds=10.0)
        await ours.open()
        os.kill(server.process.pid, signal.SIGSTOP)
        sending = asyncio.create_task(ours.send(7, tensors(7)))
        await asyncio.sleep(0.2)
        server.process.kill()
        with pytest.raises(EngineLost, match="engine-0"):
            await sending
    finally:
        server.end()


async def test_the_thread_of_a_wait_that_was_cut_off_ends_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    errors, go_on, ended = list[object](), threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "excepthook", errors.append)

    def work() -> None:
        go_on.wait(30)
        threading.current_thread().name = "cut off"
        ended.set()

    broadcast._in_a_thread(work).cancel()
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 30)
    for thread in [one for one in threading.enumerate() if one.name == "cut off"]:
        await asyncio.to_thread(thread.join, 30)
    assert errors == []


async def test_a_server_that_does_not_join_meets_the_bound() -> None:
    async def silent(path: str, order: Mapping[str, object] | None) -> Any:
        await asyncio.Event().wait()

    ours = Broadcast("engine-0", silent, SglangOrders("silent", "gloo"), host="127.0.0.1", ranks=1, seconds=0.5)
    with pytest.raises((EngineLost, DeadlineExceeded), match="join"):
        await ours.open()
