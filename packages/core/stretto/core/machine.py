"""Processor, memory, GPUs, network, disk and cache folder of this machine, and the placement of roles on its GPUs, a
pure function of the GPUs and of the memory that each role needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import ipaddress
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stretto.core.errors import Problem, UserError
from stretto.core.records import Record

_LO = "lo"
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the first IPv4 address of an interface
_IFREQ = "16s2xH4s232x"  # as much of struct ifreq as is used: name, then a sockaddr_in
_HERE, _EXCHANGE = -100, 2  # of renameat2, in linux/fcntl.h and linux/fs.h
_GPU_QUERY = "index,uuid,name,memory.total,memory.free,compute_cap,driver_version"
_GPU_SECONDS = 20.0
#: Errors of a file system that lacks an operation: a mounted object bucket cannot rename.
_LACKING = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV, errno.EPERM, errno.EMFILE})
VISIBLE = "CUDA_VISIBLE_DEVICES"
_NONE = ("", "-1")
#: Oldest driver for each CUDA that a build of torch may have (NVIDIA: minor version compatibility).
_OLDEST_DRIVER = {"11": (450, 80), "12": (525, 60), "13": (580, 65)}


class Gpu(Record, frozen=True):
    """A GPU of this machine. `id`: its number in `nvidia-smi`; for a part of a GPU (MIG), its UUID. `memory` and `free`
    are in bytes, 0 if unknown. `capability`: CUDA compute capability, (0, 0) if unknown. `driver`: its release, as
    "550.54".

    Example: ``Gpu(id="0", name="NVIDIA H100 80GB HBM3", memory=80 << 30, free=79 << 30, capability=(9, 0))``
    """

    id: str
    name: str = "GPU"
    memory: int = 0
    free: int = 0
    capability: tuple[int, int] = (0, 0)
    driver: str = ""
    uuid: str = ""


def processor() -> str:
    """Model name of the processor, such as ``AMD EPYC 9B14``; with its family where a virtual machine hides the model,
    such as ``AMD EPYC (family 25, model 17)``. Where the system does not tell it, the architecture (``x86_64``)."""
    with contextlib.suppress(OSError):
        return processor_of(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    return platform.machine()


def processor_of(cpuinfo: str) -> str:
    r"""Model name in the text of ``/proc/cpuinfo``. Family and model are added to a name without a number, which stands
    for processors that do not compute alike.

    >>> processor_of("cpu family : 25\nmodel : 17\nmodel name : AMD EPYC")
    'AMD EPYC (family 25, model 17)'
    """
    parts = (line.partition(":") for line in cpuinfo.splitlines())
    told = {key.strip(): value.strip() for key, _, value in parts}
    name = told.get("model name") or platform.machine()
    if any(letter.isdecimal() for letter in name) or not told.keys() >= {"cpu family", "model"}:
        return name
    return f"{name} (family {told['cpu family']}, model {told['model']})"


def cores() -> int:
    """Number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def allowed_cores() -> float:
    """Number of cores that this process may use at a time: `cores`, or what the quota of its control groups (cgroup v2)
    allows, if that is less."""
    found = float(cores())
    with contextlib.suppress(OSError):
        group = Path("/proc/self/cgroup").read_text(encoding="utf-8").rpartition("0::")[2].strip()
        folder = Path(f"/sys/fs/cgroup{group}")
        for one in (folder, *folder.parents[:-3]):
            with contextlib.suppress(OSError, ValueError):  # no quota: "max 100000", or no such file
                quota, period = map(int, (one / "cpu.max").read_text(encoding="utf-8").split())
                found = min(found, quota / period)
    return found


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine, and others on its host, have taken of the cores that this process
    may use, since the machine started; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0.0
    own, found = {f"cpu{number}" for number in os.sched_getaffinity(0)}, 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines():
            name, *ticks = line.split()
            if name in own:
                user, nice, system, _idle, _awaited, *others = map(int, ticks[:8])
                found += user + nice + system + sum(others)
    return found / os.sysconf("SC_CLK_TCK")


def available_memory() -> int:
    """Bytes that can be allocated without swapping (the kernel's MemAvailable; without it, free pages)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs listed in `CUDA_VISIBLE_DEVICES`, in its order; all GPUs if it is not set. Calls `nvidia-smi`, so
    this process creates no CUDA context. Empty if `nvidia-smi` is missing, fails or takes more than 20 seconds, or all
    are hidden."""
    tool = shutil.which("nvidia-smi")
    if tool is None or gpus_hidden():
        return ()
    try:
        command = [tool, f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"]
        answer = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_GPU_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return visible(parse_gpus(answer.stdout), os.environ.get(VISIBLE))


def gpus_hidden() -> bool:
    """Whether `CUDA_VISIBLE_DEVICES` hides every GPU of this machine."""
    return os.environ.get(VISIBLE) in _NONE


def parse_gpus(answer: str) -> tuple[Gpu, ...]:
    """Parse the output of `nvidia-smi`: one GPU per line, fields in the order of `_GPU_QUERY`, memory in MiB. Memory or
    capability that is "[N/A]" becomes 0; lines with another number of fields are skipped."""
    found = []
    for line in answer.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != len(_GPU_QUERY.split(",")):
            continue
        number, uuid, name, memory, free, capability, driver = words
        total, left = (int(size) << 20 if size.isdecimal() else 0 for size in (memory, free))
        major, _, minor = capability.partition(".")
        able = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)
        found.append(Gpu(number, name, total, left, able, driver, uuid))
    return tuple(found)


def visible(there: Sequence[Gpu], told: str | None) -> tuple[Gpu, ...]:
    """The GPUs of `there` that are visible to CUDA. `told`: value of `CUDA_VISIBLE_DEVICES`, None if it is not set. Its
    entries are numbers or beginnings of UUIDs, and give the order of the result. As in CUDA, an entry without a GPU, or
    of one given before, hides itself and all later entries. A part of a GPU (MIG) has memory 0, unknown.

    >>> [gpu.id for gpu in visible([Gpu("0"), Gpu("1"), Gpu("2")], "2,0,7,1")]
    ['2', '0']
    """
    if told is None:
        return tuple(there)
    shown: list[Gpu] = []
    for entry in map(str.strip, told.split(",")):
        part = Gpu(entry, "part of a GPU (MIG)") if entry.startswith("MIG-") else None
        by_name = (gpu for gpu in there if gpu.id == entry or (entry.startswith("GPU-") and gpu.uuid.startswith(entry)))
        if (gpu := part or next(by_name, None)) is None or gpu in shown:
            break
        shown.append(gpu)
    return tuple(shown)


def unusable(there: Sequence[Gpu], cuda: str | None) -> str:
    """Explain to the user why torch cannot use the GPUs `there` (at least one), after it has failed to. `cuda`: CUDA
    release that torch was built for; None: it was built without CUDA."""
    one = there[0]
    if cuda is None:
        return f"this torch is built for processors alone, and the machine has {len(there)} × {one.name}"
    if told := too_old([gpu.driver for gpu in there], cuda):
        return told
    return f"torch cannot start CUDA {cuda} on {one.name} with the driver {one.driver or '(unknown)'}"


def too_old(drivers: Sequence[str], cuda: str) -> str:
    """Name the first of `drivers` (releases, as "550.54") that is too old for a torch built for the release `cuda`, in
    a sentence for the user; "" if none is known to be too old."""
    oldest = _OLDEST_DRIVER.get(cuda.partition(".")[0], (0, 0))
    for driver in drivers:
        if (number := tuple(map(int, re.findall(r"\d+", driver)[:2]))) and number < oldest:
            needed = ".".join(map(str, oldest))
            return f"the driver {driver} is too old for this torch, whose CUDA {cuda} needs {needed} or newer"
    return ""


def on_gpus(ids: Sequence[str]) -> dict[str, str]:
    """Environment variables that make only these GPUs visible to a process; empty for no ids. `ids`: numbers or
    UUIDs, as `nvidia-smi` prints them."""
    return {VISIBLE: ",".join(ids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if ids else {}


def cache_folder() -> Path:
    """Folder for built models, warm starts and measured kernels, shared by runs: ``$STRETTO_CACHE``, else ``stretto``
    in the user's cache. It may not exist yet. Raises UserError if neither is known, for a user without a home."""
    root = os.environ.get("STRETTO_CACHE")
    if root:
        return Path(root)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stretto"
    except RuntimeError as error:
        found = "has no home folder, in which stretto keeps what runs share"
        raise UserError([Problem("this user", found, "set STRETTO_CACHE to a folder of your own")]) from error


def is_lacking(error: OSError) -> bool:
    """Whether the error says that the file system lacks the operation; False for a full or failing disk."""
    return error.errno in _LACKING


def exchange(one: Path, other: Path) -> bool:
    """Let two paths exchange their names in one step; False if one is missing, or the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and not rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)


def sync(path: Path) -> None:
    """Sync a file's contents, or a folder's entries, to disk; does nothing where the file system has no sync. Raises
    OSError if the path cannot be opened, or the disk fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not is_lacking(error):
            raise
    finally:
        os.close(descriptor)


def use_interface_of(address: str) -> None:
    """Make torch collectives of this process use the interface with this IP address: set the environment variables of
    gloo and NCCL (for the loopback: of gloo alone) that are not set yet. If no interface has the address, none is set.
    gloo would otherwise use the address of the host name, which may be the loopback's. Raises ValueError if `address`
    is no IP address."""
    if (interface := interface_of(address)) is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface != _LO:  # on one machine NCCL uses sockets only to start, and finds an interface itself
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def interface_of(address: str) -> str | None:
    """Name of the network interface of this machine with this IP address; None if none has it (secondary IPv4 addresses
    are not found). Raises ValueError if `address` is no IP address.

    Example: ``interface_of("127.0.0.2")  # "lo"``
    """
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.is_loopback:
        return _LO
    names = [name for _, name in socket.if_nameindex()]
    if wanted.version == 6:
        lines = [
            line.split()
            for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8", errors="replace").splitlines()
        ]
        return next((name for number, *_, name in lines if int(number, 16) == int(wanted)), None)
    return next((name for name in names if _first_address(name) == wanted), None)


def _first_address(interface: str) -> ipaddress.IPv4Address | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack(_IFREQ, interface.encode(), 0, bytes(4)))
        except OSError:  # it has none
            return None
    return ipaddress.IPv4Address(struct.unpack(_IFREQ, found)[2])


_CONTEXT = 512 << 20  # bytes that a process takes on a GPU before its first tensor
_UNKNOWN = 0.9  # part of a GPU of unknown size for the tensors of all roles
_BUSY = 1 / 32  # part of a GPU in use up to which it counts as free: the driver takes some of an idle GPU


@dataclass(frozen=True)
class Need:
    """GPU memory that a role needs. `parts`: bytes on each of its GPUs, by purpose (weights, cache). `gpus`: number of
    GPUs. `apart`: the role shares no GPU with another role that is `apart`, since NCCL refuses two ranks on one GPU.
    `smaller`: for each purpose, the advice in messages on how to need less."""

    role: str
    parts: Mapping[str, int]
    gpus: int = 1
    apart: bool = False
    smaller: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes needed on each GPU, including the CUDA context of the process."""
        return sum(self.parts.values()) + _CONTEXT


@dataclass(frozen=True)
class Seat:
    """The GPUs assigned to a role. `share`: part of their memory that its tensors may take; 1 if no other role of the
    run shares them."""

    need: Need
    gpus: tuple[Gpu, ...]
    share: float

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(gpu.id for gpu in self.gpus)

    @property
    def room(self) -> float:
        """Part of the GPUs' memory that the role can use: `share`, but at most the part that is free now on the fullest
        of them. Less than 1/32 in use counts as nothing."""
        used = [1 - gpu.free / gpu.memory for gpu in self.gpus if gpu.memory]
        return min(self.share, 1 - max(used, default=0.0)) if max(used, default=0.0) > _BUSY else self.share

    def __str__(self) -> str:
        named, need = " + ".join(f"GPU {gpu.id}" for gpu in self.gpus), self.need
        there = f" of {gib(self.gpus[0].free)}" if self.gpus[0].free else ""
        parts = ", ".join(f"{name} {gib(size)}" for name, size in need.parts.items())
        return f"{need.role:<12}{named}: {gib(need.bytes)}{there} GiB ({parts})"


def place(there: Sequence[Gpu], needs: Sequence[Need]) -> tuple[Seat, ...]:
    """Assign each role its GPUs and its share of their memory; returns a seat for each need, in the order of `needs`.

    Needs that are `apart` come first, on GPUs of the same name and memory if there are enough. The others follow, the
    largest first. For each, GPUs with enough memory left are preferred, then GPUs with the fewest roles, then GPUs with
    the most memory left; a role that fits nowhere is seated all the same. Roles that share a GPU split its memory in
    proportion to their needs. Raises ValueError if there are fewer GPUs than one role needs, or fewer than roles that
    are `apart`.
    """
    apart = [at for at, need in enumerate(needs) if need.apart]
    if len(apart) > len(there) or any(need.gpus > len(there) for need in needs):
        raise ValueError(f"{len(apart)} roles apart, {len(needs)} in all, on {len(there)} GPUs")
    taken: dict[int, tuple[Gpu, ...]] = {at: (gpu,) for at, gpu in zip(apart, _alike(there, len(apart)), strict=True)}
    left = {gpu.id: gpu.free - sum(needs[at].bytes for at, own in taken.items() if gpu in own) for gpu in there}
    roles = {gpu.id: sum(gpu in own for own in taken.values()) for gpu in there}
    for at in sorted((at for at in range(len(needs)) if at not in taken), key=lambda at: -needs[at].bytes):
        size = needs[at].bytes
        order = sorted(there, key=lambda gpu: (left[gpu.id] < size, roles[gpu.id], -left[gpu.id]))
        taken[at] = tuple(sorted(order[: needs[at].gpus], key=there.index))
        for gpu in taken[at]:
            left[gpu.id] -= size
            roles[gpu.id] += 1
    shares = _shares(needs, taken)
    return tuple(Seat(need, taken[at], shares[at]) for at, need in enumerate(needs))


def _alike(there: Sequence[Gpu], count: int) -> list[Gpu]:
    """`count` GPUs with the same name and memory; the first `count` GPUs if there are not as many."""
    kinds = defaultdict[tuple[str, int], list[Gpu]](list)
    for gpu in there:
        kinds[gpu.name, gpu.memory].append(gpu)
    return next((own for own in kinds.values() if len(own) >= count), list(there))[:count]


def _shares(needs: Sequence[Need], taken: Mapping[int, Sequence[Gpu]]) -> list[float]:
    """For each need, the part of each of its GPUs' memory that its tensors may take (the least of them); 1 if it shares
    no GPU. Room for the CUDA contexts is set aside on GPUs that roles share. `taken`: GPUs by index of the need."""
    on = defaultdict[str, list[int]](list)
    for at, own in taken.items():
        for gpu in own:
            on[gpu.id].append(at)
    found = []
    for at, need in enumerate(needs):
        parts = [1.0]
        for gpu in taken[at]:
            if len(beside := on[gpu.id]) > 1:
                tensors = max(0, gpu.free - len(beside) * _CONTEXT) / gpu.memory if gpu.memory else _UNKNOWN
                parts.append(tensors * need.bytes / sum(needs[other].bytes for other in beside))
        found.append(min(parts))
    return found


def gib(size: int) -> str:
    """Text of a size in bytes, in GiB with one digit after the point, without the unit."""
    return f"{size / 2**30:.1f}"
