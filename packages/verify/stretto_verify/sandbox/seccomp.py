"""System call filter (seccomp) for programs in a sandbox.

The filter is a classic BPF program: instructions of eight bytes, only forward jumps. Refused calls fail with EPERM.
Calls newer than the table fail with ENOSYS, as on an older kernel, so that no unknown call gets through.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass

INSTRUCTION = struct.Struct("<HBBI")
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24  # offsets in a filter's data; low 32 bits

_NEWEST_KNOWN = 462  # mseal, Linux 6.10; the same on every architecture from 424 on
_CLONE_NAMESPACES = 0x7E020080  # CLONE_NEW*
_CLONE_THREAD = 0x00010000
#: Refused commands of fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX, by which a file signals another process; locks, leases
#: and notifications.
_REFUSED_COMMANDS = (8, 10, 15, 6, 7, 37, 38, 1024, 1026)
_CHANGE_FLAGS = (0x40086602, 0x401C5820)  # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG: the program ends with its guest
_UNIX, _STREAM, _SOCKET_KIND = 1, 1, 0xF

#: Refused calls, for: sockets (a program has only connected pairs, for asyncio); another process's memory, files or
#: scheduling; namespaces and mounts; large, young or privileged interfaces of the kernel; keys and memory that no limit
#: counts; locks and watches on files that others use; a larger share of the CPU.
_REFUSED = """
socket connect bind listen accept accept4 sendmsg sendmmsg recvmmsg
ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp move_pages migrate_pages
unshare setns mount umount2 pivot_root chroot open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr
open_by_handle_at name_to_handle_at swapon swapoff quotactl quotactl_fd acct reboot sethostname setdomainname
io_uring_setup io_uring_enter io_uring_register userfaultfd bpf perf_event_open fanotify_init fanotify_mark
keyctl add_key request_key init_module finit_module delete_module kexec_load kexec_file_load
settimeofday clock_settime clock_adjtime adjtimex syslog lookup_dcookie iopl ioperm
shmget msgget semget mq_open memfd_secret memfd_create
flock inotify_init inotify_init1 inotify_add_watch
setpriority ioprio_set sched_setaffinity sched_setscheduler sched_setparam sched_setattr
"""
#: Also refused where no namespace separates the program from its user's other processes and files.
_REFUSED_AMONG_OTHERS = """
kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_send_signal fork vfork
chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat
setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr
"""


@dataclass(frozen=True)
class _Architecture:
    """A machine architecture: its number in the kernel's audit interface, and its numbers of system calls, by name."""

    audit: int
    numbers: Mapping[str, int]


def _numbered(text: str) -> dict[str, int]:
    pairs = text.split()
    return {name: int(number) for name, number in zip(pairs[::2], pairs[1::2], strict=True)}


_EVERYWHERE = """
pidfd_send_signal 424 io_uring_setup 425 io_uring_enter 426 io_uring_register 427 open_tree 428 move_mount 429
fsopen 430 fsconfig 431 fsmount 432 fspick 433 pidfd_open 434 clone3 435 pidfd_getfd 438 process_madvise 440
mount_setattr 442 quotactl_fd 443 memfd_secret 447 fchmodat2 452
"""
_X86_64 = """
ioctl 16 flock 73 chmod 90 fchmod 91 chown 92 fchown 93 lchown 94 utime 132 prctl 157 setxattr 188 lsetxattr 189
fsetxattr 190 removexattr 197 lremovexattr 198 fremovexattr 199 utimes 235 inotify_init 253 inotify_add_watch 254
fchownat 260 futimesat 261 fchmodat 268 utimensat 280 inotify_init1 294
socket 41 connect 42 accept 43 sendto 44 sendmsg 46 bind 49 listen 50 socketpair 53 clone 56
fork 57 vfork 58 kill 62 fcntl 72
semget 64 shmget 29 msgget 68 ptrace 101 syslog 103 rt_sigqueueinfo 129 setpriority 141 sched_setparam 142
sched_setscheduler 144 pivot_root 155 adjtimex 159 chroot 161 acct 163 settimeofday 164 mount 165 umount2 166 swapon 167
swapoff 168 reboot 169 sethostname 170 setdomainname 171 iopl 172 ioperm 173 init_module 175 delete_module 176
quotactl 179 tkill 200 sched_setaffinity 203 lookup_dcookie 212 clock_settime 227 tgkill 234 mq_open 240 kexec_load 246
add_key 248 request_key 249 keyctl 250 ioprio_set 251 migrate_pages 256 unshare 272 move_pages 279 accept4 288
rt_tgsigqueueinfo 297 perf_event_open 298 recvmmsg 299 fanotify_init 300 fanotify_mark 301 prlimit64 302
name_to_handle_at 303 open_by_handle_at 304 clock_adjtime 305 sendmmsg 307 setns 308 process_vm_readv 310
process_vm_writev 311 kcmp 312 finit_module 313 sched_setattr 314 memfd_create 319
kexec_file_load 320 bpf 321 userfaultfd 323
"""
_AARCH64 = """
setxattr 5 lsetxattr 6 fsetxattr 7 removexattr 14 lremovexattr 15 fremovexattr 16 inotify_init1 26 inotify_add_watch 27
ioctl 29 flock 32 fchmod 52 fchmodat 53 fchownat 54 fchown 55 utimensat 88 prctl 167
lookup_dcookie 18 fcntl 25 ioprio_set 30 umount2 39 mount 40 pivot_root 41 chroot 51 quotactl 60 acct 89 unshare 97
kexec_load 104 init_module 105 delete_module 106 clock_settime 112 syslog 116 ptrace 117 sched_setparam 118
sched_setscheduler 119 sched_setaffinity 122 kill 129 tkill 130 tgkill 131 rt_sigqueueinfo 138 setpriority 140
reboot 142 sethostname 161 setdomainname 162 settimeofday 170 adjtimex 171 mq_open 180 msgget 186 semget 190 shmget 194
socket 198 socketpair 199 bind 200 listen 201 accept 202 connect 203 sendto 206 sendmsg 211 add_key 217 request_key 218
keyctl 219 clone 220 swapon 224 swapoff 225 migrate_pages 238 move_pages 239 rt_tgsigqueueinfo 240 perf_event_open 241
accept4 242 recvmmsg 243 prlimit64 261 fanotify_init 262 fanotify_mark 263 name_to_handle_at 264 open_by_handle_at 265
clock_adjtime 266 setns 268 sendmmsg 269 process_vm_readv 270 process_vm_writev 271 kcmp 272 finit_module 273
sched_setattr 274 memfd_create 279 bpf 280 userfaultfd 282 kexec_file_load 294
"""

ARCHITECTURES = {
    "x86_64": _Architecture(0xC000003E, _numbered(_X86_64 + _EVERYWHERE)),
    "aarch64": _Architecture(0xC00000B7, _numbered(_AARCH64 + _EVERYWHERE)),
}


def call_filter(machine: str | None = None, *, among_others: bool = False) -> bytes:
    """Compile the filter for a machine (default: this one) to BPF instructions. It refuses the calls of `_REFUSED`,
    new namespaces and some arguments of other calls with EPERM, newer calls than it knows with ENOSYS, and kills for
    those of another architecture.

    `among_others`: the program shares its PID namespace and files with other processes, so it may neither signal nor
    start processes (it may start threads), nor change a file's mode, owner, times or attributes.

    Raises:
        KeyError: there is no table for this machine.
    """
    architecture = ARCHITECTURES[machine or platform.machine()]
    numbers = architecture.numbers
    names = [*_REFUSED.split(), *(_REFUSED_AMONG_OTHERS.split() if among_others else ())]
    refused = sorted({numbers[name] for name in names if name in numbers})  # aarch64 lacks the oldest ones
    clone = [(JUMP_ANY_BIT, 0, 1, _CLONE_NAMESPACES), _refuse(errno.EPERM)]
    if among_others:
        clone += [(JUMP_ANY_BIT, 1, 0, _CLONE_THREAD), _refuse(errno.EPERM)]
    lines = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, architecture.audit),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (JUMP_AT_LEAST, 0, 1, _NEWEST_KNOWN + 1),  # calls of the x32 ABI too
        _refuse(errno.ENOSYS),
        (JUMP_EQUAL, 0, 1, numbers["clone3"]),  # its flags are out of reach; the C library falls back to clone
        _refuse(errno.ENOSYS),
    ]
    for number in refused:
        lines += [(JUMP_EQUAL, 0, 1, number), _refuse(errno.EPERM)]
    itself = [(JUMP_EQUAL, 1, 0, 0), _refuse(errno.EPERM)]
    pair = [(JUMP_EQUAL, 1, 0, _UNIX), _refuse(errno.EPERM)]
    pair += [(LOAD, 0, 0, SECOND_ARGUMENT), (AND, 0, 0, _SOCKET_KIND)]
    pair += [(JUMP_EQUAL, 1, 0, _STREAM), _refuse(errno.EPERM)]
    lines += _on_argument(FIRST_ARGUMENT, numbers["prlimit64"], itself)
    lines += _on_argument(SECOND_ARGUMENT, numbers["fcntl"], _unless(*_REFUSED_COMMANDS))
    lines += _on_argument(SECOND_ARGUMENT, numbers["ioctl"], _unless(*_CHANGE_FLAGS))
    lines += _on_argument(FIRST_ARGUMENT, numbers["prctl"], _unless(_PARENT_DEATH_SIGNAL))
    lines += _on_argument(FIRST_ARGUMENT, numbers["socketpair"], pair)
    lines += _on_argument(FIRST_ARGUMENT, numbers["clone"], clone)
    return b"".join(INSTRUCTION.pack(*line) for line in [*lines, (RETURN, 0, 0, ALLOW)])


_Line = tuple[int, int, int, int]


def _refuse(number: int) -> _Line:
    return RETURN, 0, 0, ERRNO | number


def _unless(*values: int) -> list[_Line]:
    """Instructions that refuse (EPERM) a loaded argument with one of these `values`, and pass on with any other."""
    return [line for value in values for line in ((JUMP_EQUAL, 0, 1, value), _refuse(errno.EPERM))]


def _on_argument(place: int, number: int, checks: list[_Line]) -> list[_Line]:
    """Instructions that apply `checks` to the argument at offset `place` of the system call `number`, and allow the
    call unless one refuses it. Other calls pass on to the next instruction."""
    body = [(LOAD, 0, 0, place), *checks, (RETURN, 0, 0, ALLOW)]
    return [(JUMP_EQUAL, 0, len(body), number), *body]
