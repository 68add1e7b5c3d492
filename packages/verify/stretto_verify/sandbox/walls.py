"""Walls of a sandbox, and the ladder of levels from the strongest to none.

| level | walls | what is missing |
|---|---|---|
| A | bubblewrap, namespaces, seccomp, control group | nothing |
| B | the same without a control group | memory is bounded per process only |
| C | namespaces, landlock, seccomp | the names of files are visible, their contents are not |
| D | landlock, seccomp; no process may be started | other processes are visible, nothing can be written |
| E | limits of resources | nothing stops a hostile program |
"""

from __future__ import annotations

import ctypes
import marshal
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from stretto_verify.sandbox import guest, script, values
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.seccomp import ARCHITECTURES, call_filter

_MIB = 1 << 20
_STACK_BYTES = 64 * _MIB
_TMP_FILES = 1024
_SPARE_THREADS = 128  # threads by which the user's other processes may grow meanwhile

_NEW_USER, _NEW_PROCESSES, _NEW_MOUNTS = 0x10000000, 0x20000000, 0x00020000
_NEW_IPC, _NEW_NET, _NEW_UTS = 0x08000000, 0x40000000, 0x04000000
_INSIDE_BWRAP = _NEW_USER | _NEW_PROCESSES | _NEW_MOUNTS  # queues and shared memory are refused as calls
_ON_THE_HOST = _INSIDE_BWRAP | _NEW_IPC | _NEW_NET | _NEW_UTS

_LANDLOCK_FILES = ((1 << 13) - 1, (1 << 14) - 1, (1 << 15) - 1)  # access rights known to ABI 1, 2 and 3
_LANDLOCK_SCOPES_FROM, _LANDLOCK_SCOPES = 6, 3  # abstract sockets, signals
_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
_BEGINNING = """import _socket, marshal, sys
control = _socket.socket(fileno=int(sys.argv[1]))
*modules, guest = marshal.loads(control.recv(1 << 20))
for name, source in zip(('stretto_verify.sandbox.values', 'stretto_verify.sandbox.script'), modules):
    sys.modules[name] = module = type(sys)(name)
    exec(source, module.__dict__)
exec(guest)
Guest(control).serve()
"""
_SOURCES = tuple(Path(str(module.__file__)).read_text(encoding="utf-8") for module in (values, script, guest))
_COMPILED = tuple(compile(source, "guest.py", "exec", dont_inherit=True, optimize=2) for source in _SOURCES)
_OFTEN_IMPORTED = ("collections", "copy", "functools", "heapq", "itertools", "math", "operator", "re", "string")
_OTHER_INTERPRETERS = ("/usr/bin/python3", "/usr/local/bin/python3")
_BWRAP_PLACES = "/usr/bin:/usr/local/bin:/bin"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class Level(StrEnum):
    """Strength of a sandbox's walls (what confines its programs). A later letter is weaker."""

    A = "A"
    B = "B"
    C = "C"
    D = "D"
    E = "E"


@dataclass(frozen=True)
class Walls:
    """The walls of a sandbox (what confines its programs), of this `level`: one rung of `ladder`. `bwrap`: the guest
    runs in bubblewrap. `group`: in a control group. `namespaces`: clone flags of the namespaces that each program gets;
    0: none. `landlock`, `seccomp`: the kernel limits its files, and its system calls."""

    level: Level
    bwrap: bool = False
    group: bool = False
    namespaces: int = 0
    landlock: bool = False
    seccomp: bool = True

    @property
    def warm(self) -> bool:
        """Whether one guest may run several programs, because none leaves a trace for the next."""
        return bool(self.namespaces) or not self.bwrap


def ladder(warm: bool) -> Iterator[Walls]:
    """Yield the walls that a sandbox may have, one rung each, strongest first. `warm`: include rungs with one
    bubblewrap for all programs, which need nested namespaces. The other rungs with bubblewrap start a new one for each
    program."""
    for level, group in ((Level.A, True), (Level.B, False)):
        if warm:
            yield Walls(level, bwrap=True, group=group, namespaces=_INSIDE_BWRAP)
        yield Walls(level, bwrap=True, group=group)
    yield Walls(Level.C, namespaces=_ON_THE_HOST, landlock=True)
    yield Walls(Level.D, landlock=True)
    yield Walls(Level.E, seccomp=False)


@dataclass(frozen=True)
class _Interpreter:
    """A Python interpreter, and the folders of libraries that it needs."""

    executable: Path
    libraries: tuple[Path, ...]

    @classmethod
    def of(cls, executable: Path, prefix: Path) -> _Interpreter:
        """The interpreter that is installed under `prefix`, with its libraries there and the system's that exist."""
        places = [prefix / "lib", prefix / "lib64", *map(Path, _SYSTEM_LIBRARIES)]
        return cls(executable, tuple(dict.fromkeys(place for place in places if os.path.exists(place))))

    @property
    def packages(self) -> list[Path]:
        """Folders of installed packages, which are hidden: they might contain solutions of a benchmark."""
        found = [path for place in self.libraries for path in place.glob("python*/*-packages")]
        return [path for path in found if path.is_dir() and not path.is_symlink()]

    def usable_by(self, uid: int | None) -> bool:
        """Whether this interpreter can be used by the user `uid`: everybody must be able to read it. None: by the user
        of this process."""
        try:
            if uid is None:
                return all(os.access(path, os.R_OK | os.X_OK) for path in (self.executable, self.libraries[0]))
            return all(path.stat().st_mode & 0o005 == 0o005 for path in (self.executable, *self.executable.parents))
        except OSError:  # a folder of the path is not accessible
            return False


def find_interpreter(walls: Walls, uid: int | None) -> _Interpreter:
    """The interpreter of this process without its virtual environment, or the system's if the guest's user `uid` (None:
    this one) cannot read that. Bubblewrap that root starts can show any interpreter to the user.

    Raises:
        OSError: the user cannot read the first, and the system has none.
    """
    own = _Interpreter.of(_own_executable(), Path(sys.base_prefix))
    shown_by_root = walls.bwrap and os.getuid() == 0
    if shown_by_root or own.usable_by(uid):
        return own
    for place in _OTHER_INTERPRETERS:
        if (path := Path(place).resolve()).exists():
            return _Interpreter.of(path, path.parent.parent)
    raise OSError(f"{own.executable} is not readable for the user of the sandbox, and there is no /usr/bin/python3")


def command(walls: Walls, interpreter: _Interpreter, config: SandboxConfig, control: int, told: int) -> list[str]:
    """Command that starts a guest with the socket `control` (a descriptor). Bubblewrap writes the guest's pid to the
    descriptor `told` before the guest is ready, so that it can be put into its group.

    Raises:
        OSError: bubblewrap is not installed.
    """
    python = [str(interpreter.executable), "-I", "-S", "-B", "-c", _BEGINNING, str(control)]
    return [*_bwrap(walls, interpreter, config, told), *python] if walls.bwrap else python


def guest_program(interpreter: _Interpreter) -> bytes:
    """The modules `values`, `script` and `guest`, marshalled: compiled if `interpreter` is that of this process, else
    as source."""
    return marshal.dumps(_COMPILED if interpreter.executable == _own_executable() else _SOURCES)


def _own_executable() -> Path:
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def _bwrap(walls: Walls, interpreter: _Interpreter, config: SandboxConfig, told: int) -> list[str]:
    """Command of bubblewrap, up to the command that it runs; OSError if it is not installed. Root starts it as root, so
    that it can bind any interpreter; the guest then changes its user."""
    program = shutil.which("bwrap", path=_BWRAP_PLACES)
    if program is None:
        raise OSError("bubblewrap is not installed (Debian: apt-get install bubblewrap)")
    words = [program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--new-session", "--die-with-parent", "--as-pid-1"]
    words += ["--info-fd", str(told)] if walls.group else []
    words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if os.getuid() == 0 else ["--unshare-user"]
    shown = [*interpreter.libraries, interpreter.executable]
    for folder in sorted({folder for path in shown for folder in path.parents if len(folder.parts) > 1}):
        words += ["--perms", "0755", "--dir", str(folder)]
    for path in shown:
        words += ["--ro-bind", str(path), str(path)]
    for folder in interpreter.packages:
        words += ["--tmpfs", str(folder), "--remount-ro", str(folder)]
    words += ["--dir", "/dev"]
    for device in _DEVICES:
        words += ["--dev-bind", device, device]
    words += ["--perms", "1777"]
    words += ["--dir", "/tmp"] if walls.namespaces else ["--size", str(config.files_mib * _MIB), "--tmpfs", "/tmp"]
    return [*words, "--remount-ro", "/", "--chdir", "/tmp", "--"]


def guest_settings(walls: Walls, interpreter: _Interpreter, config: SandboxConfig, uid: int | None) -> dict[str, Any]:
    """Settings of a guest. `uid`: the user to which it switches (None: it does not switch).

    Raises:
        OSError: the walls need landlock or a system call table, and the machine lacks it.
    """
    private = bool(walls.namespaces)
    alone = private or walls.bwrap or uid is not None
    if walls.seccomp and platform.machine() not in ARCHITECTURES:
        raise OSError(f"no table of system calls for {platform.machine()}")
    return {
        "uid": uid,
        "loaded": _OFTEN_IMPORTED if walls.warm and config.warm else (),
        "namespaces": walls.namespaces,
        "tmp": f"size={config.files_mib * _MIB},nr_inodes={_TMP_FILES},mode=1777" if private else "",
        "folder": "/tmp" if private or walls.bwrap else "/",
        "landlock": _landlock(interpreter, private) if walls.landlock else None,
        "seccomp": call_filter(among_others=walls.level is Level.D).hex() if walls.seccomp else "",
        "hidden": [*map(str, interpreter.packages)] if private and not walls.bwrap else [],
        "limits": _limits(config, counted=alone),
        "threads": 0 if alone else config.processes + _SPARE_THREADS,
    }


def _limits(config: SandboxConfig, *, counted: bool) -> dict[str, int]:
    """Resource limits of a program. `counted`: the guest's user has no other processes, so that limits per user apply
    to the program alone."""
    limits = {
        "RLIMIT_CPU": int(config.completion_seconds) + 1,
        "RLIMIT_AS": config.memory_mib * _MIB,
        "RLIMIT_FSIZE": config.files_mib * _MIB,
        "RLIMIT_NOFILE": config.open_files,
        "RLIMIT_STACK": _STACK_BYTES,
        "RLIMIT_CORE": 0,
    }
    return limits | {"RLIMIT_NPROC": config.processes} if counted else limits


def _landlock(interpreter: _Interpreter, private: bool) -> dict[str, Any]:
    abi = int(ctypes.CDLL(None, use_errno=True).syscall(444, None, 0, 1))
    if abi < 1:
        raise OSError("the kernel has no landlock")
    return {
        "files": _LANDLOCK_FILES[min(abi, len(_LANDLOCK_FILES)) - 1],
        "scopes": _LANDLOCK_SCOPES if abi >= _LANDLOCK_SCOPES_FROM else 0,
        "read": [str(path) for path in (*interpreter.libraries, *map(Path, _DEVICES))],
        "write": ["/tmp", "/dev/null"] if private else ["/dev/null"],
    }
