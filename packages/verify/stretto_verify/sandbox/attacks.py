"""Attacks that reach outside a sandbox: network, files, memory, other processes, powerful system calls. `ATTACKS` has
those on limits too. `HONEST` is a program that must work.

Attacks run before any model's program, to find the walls that hold. The list follows attacks known to get through plain
subprocesses, containers or bubblewrap alone.
"""

from __future__ import annotations

from stretto_verify.sandbox.attacks_on_limits import ATTACKS_ON_LIMITS, CALLS, Attack
from stretto_verify.sandbox.walls import Level

ATTACKS_ON_WALLS = (
    Attack("loopback", "import socket; socket.create_connection(('127.0.0.1', $PORT), 1); print('THROUGH')"),
    Attack(
        "abstract socket",
        r"""
import socket
s = socket.socket(socket.AF_UNIX)
s.connect('\0$ABSTRACT')
print('THROUGH')
""",
    ),
    Attack("read /etc/passwd", "print(open('/etc/passwd').read() and 'THROUGH')"),
    Attack("read a secret file", "print(open('$SECRET').read() and 'THROUGH')"),
    Attack(
        "list folders of the host",
        """
import os
for place in ('/proc', '/sys', '/home', '/var', '/boot', '/etc/ssl'):
    try:
        found = os.listdir(place)
    except OSError:
        continue
    print('THROUGH', place, found[:3])
""",
    ),
    Attack(
        "read the grader's memory",
        """
line = open('/proc/$GRADER/maps').readline()
memory = open('/proc/$GRADER/mem', 'rb')
memory.seek(int(line.split('-')[0], 16))
print(memory.read(16) and 'THROUGH')
""",
    ),
    Attack(
        "read the grader's memory by call",
        CALLS
        + """
class Part(ctypes.Structure):
    _fields_ = [('at', ctypes.c_void_p), ('size', ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(16)
here, there = Part(ctypes.addressof(buffer), 16), Part(16, 16)
for pid in ($GRADER, $NEIGHBOUR, os.getppid(), 1):
    if pid not in (0, os.getpid()):
        ctypes.set_errno(0)
        call(310, 270, pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if ctypes.get_errno() == 14:  # a bad address: it was allowed to look
            print('THROUGH', pid)
""",
    ),
    Attack(
        "ptrace",
        CALLS
        + """
for pid in ($GRADER, $NEIGHBOUR, os.getppid(), 1):
    if pid > 0 and pid != os.getpid() and call(101, 117, 0x4206, pid, 0, 0) == 0:
        print('THROUGH')
""",
    ),
    Attack(
        "read the caller's environment",
        """
for pid in ('$GRADER', '1', 'self'):
    try:
        if b'STRETTO_BAIT' in open(f'/proc/{pid}/environ', 'rb').read(): print('THROUGH')
    except OSError:
        pass
import os
if 'STRETTO_BAIT' in os.environ:
    print('THROUGH')
""",
    ),
    Attack(
        "open descriptors",
        """
import os
for number in range(3, 256):
    try:
        os.fstat(number)
    except OSError:
        continue
    print('THROUGH', number)
""",
    ),
    Attack("write to the host's /tmp", "open('$MARK', 'w').write('x')"),
    Attack(
        "write anywhere else",
        """
import os
for place in ('/', '/var/tmp', '/dev/shm', '/etc', '/root', '/usr/lib', '/run', '/home', '/mnt'):
    try:
        open(f'{place}/stretto-attack', 'w').close()
    except OSError:
        continue
    os.unlink(f'{place}/stretto-attack')
    print('THROUGH', place)
""",
    ),
    Attack(
        "new user namespace",
        CALLS
        + """
if call(272, 97, 0x10000000) == 0:
    print('THROUGH')
if call(272, 97, 0x00020000) == 0:
    print('THROUGH')
child = call(56, 220, 0x10000000 | 17, None, None, None, None)
if child == 0:
    os._exit(0)
if child > 0:
    print('THROUGH')
""",
    ),
    Attack(
        "mount",
        CALLS
        + """
if libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0:
    print('THROUGH')
if libc.umount2(b'/tmp', 2) == 0:
    print('THROUGH')
if call(428, 428, -100, b'/', 1) >= 0:
    print('THROUGH')
if call(161, 51, b'/') == 0:
    print('THROUGH')
""",
    ),
    Attack(
        "io_uring",
        CALLS
        + """
if call(425, 425, 4, ctypes.create_string_buffer(256)) >= 0:
    print('THROUGH')
""",
    ),
    Attack(
        "userfaultfd",
        CALLS
        + """
if call(323, 282, 1) >= 0:
    print('THROUGH')
""",
    ),
    Attack(
        "bpf",
        CALLS
        + """
if call(321, 280, 0, ctypes.create_string_buffer(72), 72) >= 0:
    print('THROUGH')
""",
    ),
    Attack(
        "perf events, keys, queues",
        CALLS
        + """
attributes = ctypes.create_string_buffer(128)
attributes[4] = 112
if call(298, 241, attributes, 0, -1, -1, 0) >= 0:
    print('THROUGH')
if call(250, 219, 0, -3, 1) >= 0:
    print('THROUGH')
if call(68, 186, 4711, 0o1666) >= 0:
    print('THROUGH')
if call(29, 194, 4711, 4096, 0o1666) >= 0:
    print('THROUGH')
""",
    ),
    Attack(
        "32-bit and unknown calls",
        CALLS
        + """
for number in (463, 470, 0x40000000 | 41, 0x40000000 | 101):
    ctypes.set_errno(0)
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() != 38:
        print('THROUGH', number, ctypes.get_errno())
""",
    ),
    Attack(
        "kill others",
        """
import os
for pid in ($GRADER, $NEIGHBOUR, os.getppid()):
    if pid > 1:
        try:
            os.kill(pid, 0)
        except OSError:
            continue
        print('THROUGH', pid)
""",
    ),
    Attack(
        "signal others through a file",
        """
import fcntl, os, signal, struct
ready, _ = os.pipe()
for pid in ($GRADER, $NEIGHBOUR, os.getppid()):
    for command, owner in ((fcntl.F_SETOWN, pid), (15, struct.pack('ii', 1, pid))):
        try:
            if pid > 1:
                fcntl.fcntl(ready, command, owner)
                fcntl.fcntl(ready, 10, int(signal.SIGURG))
                print('THROUGH', pid)
        except OSError:
            pass
""",
    ),
    Attack(
        "become root again",
        """
import os
for change in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.chown('/tmp', 0, 0)):
    try:
        change()
    except OSError:
        continue
    print('THROUGH')
""",
    ),
    Attack(
        "marks on files of its user",
        """
import os, sys
own = [os.__file__, sys.executable, '$SECRET', '$OWN', os.path.dirname('$OWN')]
for change in (
    lambda path: os.chmod(path, os.stat(path).st_mode & 0o777),
    lambda path: os.utime(path, (1, os.stat(path).st_mtime)),
    lambda path: os.setxattr(path, 'user.stretto', b'x'),
    lambda path: os.removexattr(path, 'user.stretto'),
    lambda path: os.chown(path, os.getuid(), -1),
    lambda path: os.link(path, '$MARK'),
):
    for path in own:
        try:
            change(path)
        except OSError:
            continue
        print('THROUGH', path)
""",
    ),
    Attack(
        "installed packages",
        """
import glob, os, sys
for prefix in (sys.base_prefix, sys.prefix, '/usr', '/usr/local'):
    if found := glob.glob(f'{prefix}/lib*/python3*/*-packages/*'):
        print('THROUGH', found[:3])
""",
        Level.C,
    ),
    Attack(
        "locks and watches on the host's files",
        CALLS
        + """
import fcntl
with open(os.__file__) as file:
    for lock in (lambda: fcntl.flock(file, fcntl.LOCK_SH), lambda: fcntl.lockf(file, fcntl.LOCK_SH)):
        try:
            lock()
        except OSError:
            continue
        print('THROUGH')
if libc.inotify_init1(0) >= 0 or call(254, 27, 0, b'/', 1) >= 0:
    print('THROUGH')
""",
    ),
    Attack(
        "sockets that reach further than their pair",
        r"""
import socket
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
    try:
        one, other = socket.socketpair(socket.AF_UNIX, kind)
        one.sendto(b'x', r'\0$ABSTRACT')
        print('THROUGH', kind)
    except OSError:
        pass
one, other = socket.socketpair()
for reach in (
    lambda: one.sendto(b'x', '\0$ABSTRACT'),
    lambda: one.connect('\0$ABSTRACT'),
    lambda: one.bind('\0stretto-attack'),
    lambda: socket.send_fds(one, [b'x'], [0]),
):
    try:
        reach()
    except OSError:
        continue
    print('THROUGH')
""",
    ),
    Attack(
        "outlive the guest",
        CALLS
        + """
if libc.prctl(1, 0, 0, 0, 0) == 0:
    print('THROUGH')
""",
    ),
    Attack(
        "end the guest",
        """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
for number in range(1, 65):
    for pid in (1, os.getppid()):
        try:
            if pid > 0 and pid != os.getpid():
                os.kill(pid, number)
        except OSError:
            pass
time.sleep(0.05)
""",
    ),
)

ATTACKS = (*ATTACKS_ON_WALLS, *ATTACKS_ON_LIMITS)

#: An honest program, which every sandbox must be able to run.
HONEST = """
import math, re, threading, collections, heapq, functools, itertools
worker = threading.Thread(target=lambda: print(sum(map(int, input().split())) + math.comb(4, 2)))
worker.start()
worker.join()
"""
