"""Attacks that exceed the limits of a sandbox: processes, memory, files, time, output; and `Attack`, the type of all.

An attack is a program that tries to reach something outside the sandbox. It succeeds if it prints THROUGH or leaves its
mark on the host. `$PORT`, `$ABSTRACT`, `$SECRET`, `$OWN`, `$MARK`, `$GRADER` and `$NEIGHBOUR` stand for the baits of
`probe.Baits`.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto_verify.sandbox.walls import Level

THROUGH = b"THROUGH"


@dataclass(frozen=True)
class Attack:
    """One attack. `program`: its source. `stopped_by`: the weakest level of sandbox that must stop it. `seconds`: its
    limit of CPU time."""

    name: str
    program: str
    stopped_by: Level = Level.D
    seconds: float = 2.0


#: Beginning of programs that make system calls by number, on Intel and on ARM.
CALLS = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
intel = platform.machine() == 'x86_64'
def call(intel_number, arm_number, *arguments):
    return libc.syscall(intel_number if intel else arm_number, *arguments)
"""

ATTACKS_ON_LIMITS = (
    Attack(
        "500 processes",
        """
import os, signal, time
started = 0
for _ in range(500):
    try:
        pid = os.fork()
    except OSError:
        break
    if not pid:
        time.sleep(1.5)
        os._exit(0)
    started += 1
print(started)
if started >= 100:
    print('THROUGH')
""",
    ),
    Attack(
        "500 threads",
        """
import threading, time
threading.stack_size(32768)
started = 0
for _ in range(500):
    try:
        threading.Thread(target=time.sleep, args=(1.0,), daemon=True).start()
    except RuntimeError:
        break
    started += 1
print(started)
if started >= 400:
    print('THROUGH')
""",
    ),
    Attack(
        "many processes' memory",
        """
import os, time
children = []
for _ in range(7):
    children.append(os.fork())
    if not children[-1]:
        block = bytearray(200 << 20)
        time.sleep(0.5)
        os._exit(0)
held = sum(os.waitpid(child, 0)[1] == 0 for child in children)
print(held)
if held > 4:
    print('THROUGH')
""",
        Level.A,
        seconds=4.0,
    ),
    Attack("1 GiB of memory", "block = bytearray(1 << 30); print('THROUGH')"),
    Attack(
        "256 MiB of shared memory",
        """
import mmap, os
with open('/dev/shm/stretto-attack', 'wb') as file:
    os.unlink('/dev/shm/stretto-attack')
    for _ in range(256):
        file.write(bytes(1 << 20))
print('THROUGH')
""",
    ),
    Attack(
        "fill /tmp",
        """
import os
written = 0
try:
    for number in range(64):
        with open(f'/tmp/stretto-fill-{number}', 'wb') as file:
            os.unlink(f'/tmp/stretto-fill-{number}')
            keep = os.dup(file.fileno())
            for _ in range(16):
                written += os.write(keep, bytes(1 << 20))
finally:
    if written > 128 << 20:
        print('THROUGH')
""",
    ),
    Attack(
        "memory without a file system",
        """
import os
held = 0
for _ in range(40):
    number = os.memfd_create('x')
    for _ in range(15):
        held += os.write(number, bytes(1 << 20))
print('THROUGH')
""",
        seconds=6.0,
    ),
    Attack(
        "limits of others",
        """
import os, resource
for pid in ($GRADER, $NEIGHBOUR, os.getppid()):
    try:
        resource.prlimit(pid or -1, resource.RLIMIT_NOFILE)
    except (OSError, ValueError):
        continue
    print('THROUGH', pid)
""",
    ),
    Attack(
        "raise its own limits",
        """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
    try:
        resource.setrlimit(kind, (1 << 40, 1 << 40))
    except (OSError, ValueError):
        continue
    print('THROUGH', kind)
""",
    ),
    Attack(
        "a daemon that outlives the run",
        """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        for number in range(3):
            os.close(number)
        time.sleep(0.3)
        open('$MARK', 'w').close()
    os._exit(0)
""",
    ),
    Attack(
        "ignore every signal and spin",
        """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
""",
        seconds=0.2,
    ),
    Attack(
        "flood the output",
        """
while True:
    print('x' * 65536)
""",
    ),
    Attack(
        "flood the errors",
        """
import sys
while True:
    sys.stderr.write('x' * 65536)
""",
    ),
)
