"""A machine beside this one, as far as the kernel lets us make it: a network of its own that a wire joins to ours, and
folders of ours that it does not see. Where that is not allowed it is another address of the loopback interface.
"""

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stretto.processes.spawn import Spawner
from stretto_app.forking.server import ForkServer

_NEW_MOUNTS, _NEW_NETWORK = 0x00020000, 0x40000000  # CLONE_NEWNS, CLONE_NEWNET
_PRIVATE, _RECURSIVE = 1 << 18, 1 << 14  # MS_PRIVATE, MS_REC


@dataclass(frozen=True)
class OtherMachine:
    """`spawner` starts processes there; `address` is ours, by which they reach us; `cable` our end of the wire, None if
    there is no other machine."""

    spawner: Spawner
    address: str
    cable: str | None

    def cut(self) -> None:
        """Cut the wire: no connection is closed, and nothing arrives any more."""
        _ip("link", "set", str(self.cable), "down")

    def mend(self) -> None:
        _ip("link", "set", str(self.cable), "up")


@contextmanager
def other_machine(modules: Sequence[str], hidden: Path) -> Iterator[OtherMachine]:
    """One whose processes have imported `modules`; it does not see what is in the folder `hidden`."""
    allowed = os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("nsenter") is not None
    server = _elsewhere(modules, hidden) if allowed else None
    try:
        if server is None:
            server = ForkServer(modules)
            yield OtherMachine(server, "127.0.0.2", None)
        else:
            cable = f"st-{os.getpid()}"
            network = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
            ours, theirs, there = f"{network}.1", f"{network}.2", ("nsenter", "-t", str(server.pid), "-n")
            _ip("link", "add", cable, "type", "veth", "peer", "name", "wire", "netns", str(server.pid))
            _ip("addr", "add", f"{ours}/30", "dev", cable)
            _ip("link", "set", cable, "up")
            _ip("addr", "add", f"{theirs}/30", "dev", "wire", there=there)
            for interface in ("lo", "wire"):
                _ip("link", "set", interface, "up", there=there)
            yield OtherMachine(server, ours, cable)
    finally:
        if server is not None:
            server.close()  # the network ends with its last process, and the wire with it


def _ip(*words: str, there: Sequence[str] = ()) -> None:
    subprocess.run([*there, "ip", *words], check=True, timeout=20)


def _elsewhere(modules: Sequence[str], hidden: Path) -> ForkServer | None:
    """A fork server in namespaces of its own, those of the thread that starts it; None where the kernel refuses."""
    made: list[ForkServer] = []

    def start() -> None:
        system = ctypes.CDLL(None, use_errno=True)
        if (
            system.unshare(_NEW_MOUNTS | _NEW_NETWORK) == 0
            and system.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None) == 0
            and system.mount(b"tmpfs", str(hidden).encode(), b"tmpfs", 0, None) == 0
        ):
            made.append(ForkServer(modules))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    return made[0] if made else None
