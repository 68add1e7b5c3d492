"""What a command has to do without, a disk or honest engines; each is done in its process, before it begins."""

import ctypes
import importlib
import json
import os
import resource
import signal
import time
from pathlib import Path

_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000  # linux/sched.h
_PRIVATE = 0x4000 | 1 << 18  # linux/mount.h: MS_REC | MS_PRIVATE
_DUMPABLE, _TRACER = 4, 0x59616D61  # linux/prctl.h
_ATTACH_SECONDS = 30.0


def descriptors(most: str) -> None:
    """``prlimit --nofile=MOST``."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(most), int(most)))


def small_disk(folder: str) -> None:
    """A disk of 8 MiB at `folder`, which is gone when the process is, as ``unshare -Urm`` and ``mount -t tmpfs``."""
    users = {"uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    system = ctypes.CDLL(None, use_errno=True)
    _done(system.unshare(_NEW_MOUNTS | _NEW_USERS))
    system.prctl(_DUMPABLE, 1)  # it is to be looked at in /proc
    for name, text in {"setgroups": "deny", **users}.items():
        Path(f"/proc/self/{name}").write_text(text)
    _done(system.mount(b"none", b"/", None, _PRIVATE, None))
    _done(system.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=8m"))


def sabotaged(how: str) -> None:
    """Engines do something wrong and report success: `tests.canary.sabotage`."""
    importlib.import_module("tests.canary.sabotage").Sabotage(*json.loads(how)).begin()


def slow_disk(calls: str) -> None:
    """Every fsync of this process, and of those that it forks, takes a third of a second; strace notes it in a file."""
    ctypes.CDLL(None).prctl(_TRACER, ctypes.c_ulong(-1))
    command = ["strace", "-f", "-qq", "-p", str(os.getpid()), "-o", calls, "-e", "trace=fsync,fdatasync"]
    os.posix_spawnp("strace", [*command, "-e", "inject=fsync,fdatasync:delay_exit=300000"], os.environ)
    until = time.monotonic() + _ATTACH_SECONDS
    while "TracerPid:\t0\n" in Path("/proc/self/status").read_text():
        assert time.monotonic() < until, "strace does not attach"
        time.sleep(0.01)


def asleep(seconds: str) -> None:
    """At SIGUSR1 the event loop of this process hangs, or of one that it forks; its heartbeats, of a thread, go on."""
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(float(seconds)))


def _done(code: int) -> None:
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
