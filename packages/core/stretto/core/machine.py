"""Processor, memory, network and cache folder of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import platform
import socket
import struct
import sys
from pathlib import Path

_LO = "lo"
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the first IPv4 address of an interface
_IFREQ = "16s2xH4s232x"  # as much of struct ifreq as is used: name, then a sockaddr_in


def processor() -> str:
    """Model name of the processor, such as ``AMD EPYC 9B14``."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cores() -> int:
    """Number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int:
    """Bytes that can be allocated without swapping (the kernel's MemAvailable)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def cache_folder() -> Path:
    """Folder for built models, warm starts and measured kernels, shared by runs: ``$STRETTO_CACHE``, else the user's
    cache."""
    root = os.environ.get("STRETTO_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stretto"


def use_interface_of(address: str) -> None:
    """Make torch collectives of this process use the interface with this address, unless the environment names one.
    gloo would otherwise use the address of the host name, which may be the loopback's."""
    if (interface := interface_of(address)) is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface != _LO:  # NCCL on one machine needs no socket but for its start, and finds its way
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def interface_of(address: str) -> str | None:
    """The network interface that has this address on this machine; None if unknown (secondary addresses are not found).

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
