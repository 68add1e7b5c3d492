"""The rendezvous of ranks: a store of rank 0, then torch's process group."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from stretto.trainer.parallel.ranks import ShardedRanks

LOOPBACK = "127.0.0.1"
_LO = "lo"

#: Deadline of a collective. Rank 0 notices a dead or hanging rank much earlier, by its exit or its heartbeat.
_PATIENCE = timedelta(minutes=30)

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the first IPv4 address of an interface
_IFREQ = "16s2xH4s232x"  # as much of struct ifreq as is used: name, then a sockaddr_in


def open_store(count: int) -> TCPStore:
    """The store of rank 0, on a free port of the loopback interface: it obeys every process that reaches it."""
    server = socket.create_server((LOOPBACK, 0))
    port = server.getsockname()[1]
    return TCPStore(LOOPBACK, port, count, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


def reach_store(port: int, count: int) -> TCPStore:
    """The same store, from another rank, at a port of its loopback interface."""
    return TCPStore(LOOPBACK, port, count, is_master=False, wait_for_workers=False, timeout=_PATIENCE)


def join(store: TCPStore, rank: int, count: int, device: str, here: str = LOOPBACK, gpu: int = 0) -> ShardedRanks:
    """Join the process group as `rank`.

    Args:
        device: "cpu", "cuda" or "auto".
        here: the address of this machine by which other ranks reach it.
        gpu: the rank's own, of those of its machine.
    """
    kind = "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(gpu)
    if (interface := interface_of(here)) is not None:
        # Else gloo takes the address that the host's name has, which may be the loopback's.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if interface != _LO:  # NCCL on one machine needs no socket but for its start, and finds its way
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_PATIENCE)
    return ShardedRanks(kind)


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has the address; None if it is not known, as for a second address.

    Example: ``interface_of("127.0.0.2")  # "lo"``
    """
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.is_loopback:
        return _LO
    names = [name for _, name in socket.if_nameindex()]
    if wanted.version == 6:
        lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return next((name for number, *_, name in lines if int(number, 16) == int(wanted)), None)
    return next((name for name in names if _first_address(name) == wanted), None)


def _first_address(interface: str) -> ipaddress.IPv4Address | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack(_IFREQ, interface.encode(), 0, bytes(4)))
        except OSError:  # it has none
            return None
    return ipaddress.IPv4Address(struct.unpack(_IFREQ, found)[2])
