"""The rendezvous of ranks on one machine: a store on the loopback interface, then torch's process group."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from stretto.trainer.parallel.ranks import ShardedRanks

_LOOPBACK = "127.0.0.1"

#: Deadline of a collective. Rank 0 notices a dead or hanging rank much earlier, by its exit or its heartbeat.
_PATIENCE = timedelta(minutes=30)


def open_store(count: int) -> TCPStore:
    """The store of rank 0, on a free port of the loopback interface."""
    server = socket.create_server((_LOOPBACK, 0))
    port = server.getsockname()[1]
    return TCPStore(_LOOPBACK, port, count, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


def reach_store(port: int, count: int) -> TCPStore:
    """The same store, from another rank."""
    return TCPStore(_LOOPBACK, port, count, is_master=False, wait_for_workers=False, timeout=_PATIENCE)


def join(store: TCPStore, rank: int, count: int, device: str) -> ShardedRanks:
    """Join the process group as `rank`. `device` is "cpu", "cuda" or "auto"; each rank has a GPU of its own."""
    kind = "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_PATIENCE)
    return ShardedRanks(kind)
