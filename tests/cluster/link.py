"""A network of its own behind a link that delays, loses, repeats and throttles packets, and resets connections.

    with link(seed=1) as ours:                           # needs root and /dev/net/tun (`available`)
        listen at `ours.address`; start others with `ours.there` before their words
        ours.become(Conditions(delay=0.05, loss=0.01))

One process has a TUN device in each of the two networks and carries every packet from one to the other. All above IP
is the kernel's own: what is lost here is sent again by its TCP, and shows to a program as a stall."""

import ctypes
import heapq
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fcntl import ioctl
from itertools import count
from pathlib import Path

import msgspec

_TUN = Path("/dev/net/tun")
_TUNSETIFF, _PLAIN_IP = 0x400454CA, 0x1001  # IFF_TUN | IFF_NO_PI
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_QUEUE_SECONDS = 0.5  # of a throttled link; what comes to a full queue is lost
_LONGEST = 1 << 16
_TCP, _RST, _ACK = 6, 4, 16


class Conditions(msgspec.Struct, frozen=True):
    """Of each way. `delay` and `jitter` are in seconds, evenly drawn, so packets overtake each other; `rate` in bits a
    second, 0 for none; `loss`, `repeats` and `resets` are shares of the packets, the last of those with data."""

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    repeats: float = 0.0
    resets: float = 0.0
    rate: float = 0.0
    cut: bool = False


@dataclass
class Counts:
    """Packets since the conditions before: that came to it, that were lost in it, that reset their connection."""

    packets: int = 0
    lost: int = 0
    resets: int = 0


@dataclass(frozen=True)
class Link:
    """`address` is ours, by which the other network reaches us; `there` comes before a command that runs there."""

    address: str
    there: tuple[str, ...]
    carrier: subprocess.Popen[bytes]

    @property
    def theirs(self) -> str:
        """The address by which we reach the other network."""
        return self.address.rpartition(".")[0] + ".2"

    def become(self, conditions: Conditions) -> Counts:
        """From now on; returns what was carried until now."""
        assert self.carrier.stdin is not None
        assert self.carrier.stdout is not None
        self.carrier.stdin.write(msgspec.json.encode(conditions) + b"\n")
        self.carrier.stdin.flush()
        return msgspec.json.decode(self.carrier.stdout.readline(), type=Counts)


def available() -> bool:
    """Whether this user may make one."""
    return os.geteuid() == 0 and os.access(_TUN, os.W_OK) and Path("/usr/bin/nsenter").exists()


@contextmanager
def link(seed: int, conditions: Conditions | None = None) -> Iterator[Link]:
    """The processes that run there are to end before the link does: it ends with its carrier."""
    words = [sys.executable, "-m", "tests.cluster.link", str(seed)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as carrier:
        try:
            assert carrier.stdout is not None
            address = carrier.stdout.readline().decode().strip()
            ours = Link(address, ("nsenter", "-t", str(carrier.pid), "-n"), carrier)
            ours.become(conditions or Conditions())
            yield ours
        finally:
            carrier.kill()


# ── the process in the middle ────────────────────────────────────────────────────────────────────────


@dataclass
class _Carrier:
    """`ends` are the two devices: what comes to one goes to the other."""

    ends: tuple[int, int]
    chance: random.Random
    conditions: Conditions
    counts: Counts = field(default_factory=Counts)
    free: dict[int, float] = field(default_factory=dict)  # when the way to an end has sent what it has
    late: list[tuple[float, int, int, bytes]] = field(default_factory=list)  # due, number, end, packet
    numbers: Iterator[int] = field(default_factory=count)

    def take(self, source: int, target: int, packet: bytes) -> None:
        if packet[0] >> 4 != 4:  # the kernel looks for routers of IPv6
            return
        self.counts.packets += 1
        now, conditions = time.monotonic(), self.conditions
        start = max(now, self.free.get(target, 0.0))
        if conditions.cut or self.chance.random() < conditions.loss or start - now > _QUEUE_SECONDS:
            self.counts.lost += 1
            return
        if (resets := _resets(packet)) and self.chance.random() < conditions.resets:
            self.counts.resets += 1
            for end, reset in zip((source, target), resets, strict=True):
                os.write(end, reset)
            return
        if conditions.rate:
            self.free[target] = start = start + 8 * len(packet) / conditions.rate
        for _ in range(1 + (self.chance.random() < conditions.repeats)):
            low, high = conditions.delay - conditions.jitter, conditions.delay + conditions.jitter
            due = start + self.chance.uniform(low, high)
            heapq.heappush(self.late, (due, next(self.numbers), target, packet))

    def deliver(self) -> float | None:
        """What is due; returns the seconds until the next packet is."""
        while self.late:
            wait = self.late[0][0] - time.monotonic()
            if wait > 0:
                return wait
            _, _, target, packet = heapq.heappop(self.late)
            os.write(target, packet)
        return None

    def carry(self) -> None:
        """Until standard input ends."""
        with selectors.DefaultSelector() as selector:
            for end in (*self.ends, 0):
                selector.register(end, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(self.deliver()):
                    source = key.fd
                    if source:
                        self.take(source, self.ends[source == self.ends[0]], os.read(source, _LONGEST))
                    elif line := sys.stdin.buffer.readline():
                        self.conditions = msgspec.json.decode(line, type=Conditions)
                        print(msgspec.json.encode(self.counts).decode(), flush=True)
                        self.counts = Counts()
                    else:
                        return


def _resets(packet: bytes) -> tuple[bytes, bytes] | None:
    """What a middlebox says to the sender and to the receiver of a packet of TCP with data; None of another packet."""
    head = 4 * (packet[0] & 15)
    if packet[9] != _TCP or len(packet) <= head + 4 * (packet[head + 12] >> 4) or not packet[head + 13] & _ACK:
        return None
    source, target = packet[12:16], packet[16:20]
    ports, (sent, received) = packet[head : head + 4], struct.unpack_from("!II", packet, head + 4)
    return _reset(target, source, ports[2:] + ports[:2], received), _reset(source, target, ports, sent)


def _reset(source: bytes, target: bytes, ports: bytes, number: int) -> bytes:
    segment = ports + struct.pack("!IIBBHHH", number, 0, 5 << 4, _RST, 0, 0, 0)
    pseudo = source + target + struct.pack("!BBH", 0, _TCP, len(segment))
    segment = segment[:16] + _checksum(pseudo + segment) + segment[18:]
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(segment), 0, 0, 64, _TCP, 0) + source + target
    return header[:10] + _checksum(header) + header[12:] + segment


def _checksum(words: bytes) -> bytes:
    """Of the Internet (RFC 1071)."""
    total = sum(struct.unpack(f"!{len(words) // 2}H", words))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", total ^ 0xFFFF)


def _device(name: str, address: str) -> int:
    """A TUN device in the network of this process, up."""
    end = os.open(_TUN, os.O_RDWR)
    ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _PLAIN_IP))
    _ip("address", "add", f"{address}/30", "dev", name)
    _ip("link", "set", name, "up")
    return end


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)


def main() -> None:
    number = os.getpid()
    network = f"10.{150 + number % 50}.{number // 50 % 250}"
    ours = _device(f"stl-{number}", f"{network}.1")
    assert ctypes.CDLL(None).unshare(_NEW_NETWORK) == 0
    _ip("link", "set", "lo", "up")
    theirs = _device("wire", f"{network}.2")
    print(f"{network}.1", flush=True)
    _Carrier((ours, theirs), random.Random(int(sys.argv[1])), Conditions()).carry()


if __name__ == "__main__":
    main()
