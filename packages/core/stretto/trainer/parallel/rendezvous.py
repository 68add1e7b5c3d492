"""Rendezvous of ranks: connect to rank 0's TCPStore, then form torch's process group."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from stretto.core.errors import Problem, RecipeError
from stretto.core.machine import use_interface_of
from stretto.trainer.config import TrainerConfig
from stretto.trainer.parallel.ranks import ShardedRanks

LOOPBACK = "127.0.0.1"

#: Timeout of a collective, in seconds. Rank 0 notices a dead or hanging rank much earlier, by its exit or heartbeat.
PATIENCE = 1800.0


def open_store(count: int) -> TCPStore:
    """Open rank 0's TCPStore for `count` ranks on a free loopback port. Any process that can connect may use it."""
    server = socket.create_server((LOOPBACK, 0))
    port = server.getsockname()[1]
    return TCPStore(LOOPBACK, port, count, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


def reach_store(port: int, count: int) -> TCPStore:
    """Connect another rank to rank 0's store, through `port` of the rank's own loopback interface."""
    return TCPStore(LOOPBACK, port, count, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE))


def join(
    store: TCPStore,
    rank: int,
    count: int,
    device: str,
    here: str = LOOPBACK,
    gpu: int = 0,
    seconds: float = PATIENCE,
    config: TrainerConfig | None = None,
) -> ShardedRanks:
    """Join torch's process group as `rank` of `count`; waits for the other ranks. Sets the process's GPU and network
    interface.

    Args:
        device: "cpu", "cuda" or "auto".
        here: address of this machine that other ranks can reach.
        gpu: index of the rank's GPU on its machine.
        seconds: timeout of a collective.
        config: as for `ShardedRanks`.

    Raises:
        RecipeError: gloo or NCCL finds no network interface to the other ranks.
    """
    kind = "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(gpu)
    use_interface_of(here)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    try:
        distributed.init_process_group(
            backend, store=store, rank=rank, world_size=count, timeout=timedelta(seconds=seconds)
        )
        ranks = ShardedRanks(kind, config)
        if kind == "cuda":  # NCCL looks for its way at the first collective
            ranks.all_reduce(torch.zeros(1, device=kind))
    except RuntimeError as error:
        if problem := _no_way(str(error), rank):
            raise RecipeError([problem]) from error
        raise
    return ranks


def _no_way(told: str, rank: int) -> Problem | None:
    """The user's mistake behind the error text `told` of gloo or NCCL, if it is about network interfaces; else None."""
    if "interface" not in told and "Unable to find address" not in told:
        return None
    key = "NCCL_SOCKET_IFNAME" if "NCCL" in told else "GLOO_SOCKET_IFNAME"
    there = ", ".join(name for _, name in socket.if_nameindex())
    found = f"{os.environ.get(key, '')!r} of rank {rank} on {socket.gethostname()} leads to no other rank"
    return Problem(key, found, f"one of {there}, or unset it: the interface is found then")
