"""Programs that try to break out of a sandbox. They are run before any model's program is, to learn what holds.

An attack prints THROUGH when it got what it wanted, or leaves its mark on the host. `$PORT`, `$ABSTRACT`, `$SECRET`,
`$MARK`, `$GRADER` and `$NEIGHBOUR` stand for the baits that `sandbox_probe.Baits` lays out. The list follows the attacks
that are known to get through plain subprocesses, containers or bubblewrap alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.rewards.sandbox_walls import Level

THROUGH = b"THROUGH"


@dataclass(frozen=True)
class Attack:
    """`stopped_by` is the weakest level that must stop it."""

    name: str
    program: str
    stopped_by: Level = Level.D
    seconds: float = 2.0


_CALLS = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
intel = platform.machine() == 'x86_64'
def call(intel_number, arm_number, *arguments):
    return libc.syscall(intel_number if intel else arm_number, *arguments)
"""

ATTACKS = (
    Attack("loopback", "import socket\nsocket.create_connection(('127.0.0.1', $PORT), 1)\nprint('THROUGH')"),
    Attack(
        "abstract socket",
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0$ABSTRACT')\nprint('THROUGH')",
    ),
    Attack("read /etc/passwd", "print(open('/etc/passwd').read() and 'THROUGH')"),
    Attack("read a secret file", "print(open('$SECRET').read() and 'THROUGH')"),
    Attack(
        "list folders of the host",
        "import os\nfor place in ('/proc', '/sys', '/home', '/var', '/boot', '/etc/ssl'):\n"
        "    try: found = os.listdir(place)\n    except OSError: continue\n    print('THROUGH', place, found[:3])",
    ),
    Attack(
        "read the grader's memory",
        "line = open('/proc/$GRADER/maps').readline()\n"
        "memory = open('/proc/$GRADER/mem', 'rb')\nmemory.seek(int(line.split('-')[0], 16))\n"
        "print(memory.read(16) and 'THROUGH')",
    ),
    Attack(
        "read the grader's memory by call",
        _CALLS
        + "buffer = ctypes.create_string_buffer(16)\n"
        + "class Part(ctypes.Structure): _fields_ = [('at', ctypes.c_void_p), ('size', ctypes.c_size_t)]\n"
        + "here = Part(ctypes.addressof(buffer), 16)\n"
        + "for pid in ($GRADER, $NEIGHBOUR, os.getppid(), 1):\n"
        + "    if pid != os.getpid() and ctypes.get_errno() != 3 and "
        + "call(310, 270, pid, ctypes.byref(here), 1, ctypes.byref(here), 1, 0) != -1: print('THROUGH')\n"
        + "    ctypes.set_errno(0)\n"
        + "    call(310, 270, pid, ctypes.byref(here), 1, ctypes.byref(here), 1, 0)\n"
        + "    if ctypes.get_errno() == 14: print('THROUGH')",  # a bad address: it was allowed to look
    ),
    Attack(
        "ptrace",
        _CALLS + "for pid in ($GRADER, $NEIGHBOUR, os.getppid(), 1):\n"
        "    if pid > 0 and pid != os.getpid() and call(101, 117, 0x4206, pid, 0, 0) == 0: print('THROUGH')",
    ),
    Attack(
        "read the caller's environment",
        "for pid in ('$GRADER', '1', 'self'):\n"
        "    try:\n        if b'STRETTO_BAIT' in open(f'/proc/{pid}/environ', 'rb').read(): print('THROUGH')\n"
        "    except OSError: pass\n"
        "import os\nif 'STRETTO_BAIT' in os.environ: print('THROUGH')",
    ),
    Attack(
        "open descriptors",
        "import os\nfor number in range(3, 256):\n"
        "    try: os.fstat(number)\n    except OSError: continue\n    print('THROUGH', number)",
    ),
    Attack("write to the host's /tmp", "open('$MARK', 'w').write('x')"),
    Attack(
        "write anywhere else",
        "import os\nfor place in ('/', '/var/tmp', '/dev/shm', '/etc', '/root', '/usr/lib', '/run', '/home', '/mnt'):\n"
        "    try: open(f'{place}/stretto-attack', 'w').close()\n    except OSError: continue\n"
        "    os.unlink(f'{place}/stretto-attack')\n    print('THROUGH', place)",
    ),
    Attack(
        "500 processes",
        "import os, signal, time\nstarted = 0\nfor _ in range(500):\n"
        "    try: pid = os.fork()\n    except OSError: break\n"
        "    if not pid:\n        time.sleep(1.5)\n        os._exit(0)\n    started += 1\n"
        "print(started)\nif started >= 100: print('THROUGH')",
    ),
    Attack(
        "many processes' memory",
        "import os, time\nchildren = []\nfor _ in range(7):\n"
        "    children.append(os.fork())\n"
        "    if not children[-1]:\n        block = bytearray(200 << 20)\n        time.sleep(0.5)\n        os._exit(0)\n"
        "held = sum(os.waitpid(child, 0)[1] == 0 for child in children)\n"
        "print(held)\nif held > 4: print('THROUGH')",
        Level.A,
        seconds=4.0,
    ),
    Attack("1 GiB of memory", "block = bytearray(1 << 30)\nprint('THROUGH')"),
    Attack(
        "256 MiB of shared memory",
        "import mmap, os\nwith open('/dev/shm/stretto-attack', 'wb') as file:\n"
        "    os.unlink('/dev/shm/stretto-attack')\n    for _ in range(256): file.write(bytes(1 << 20))\nprint('THROUGH')",
    ),
    Attack(
        "fill /tmp",
        "import os\nwritten = 0\ntry:\n    for number in range(64):\n"
        "        with open(f'/tmp/stretto-fill-{number}', 'wb') as file:\n"
        "            os.unlink(f'/tmp/stretto-fill-{number}')\n"
        "            keep = os.dup(file.fileno())\n"
        "            for _ in range(16):\n                written += os.write(keep, bytes(1 << 20))\n"
        "finally:\n    if written > 128 << 20: print('THROUGH')",
    ),
    Attack(
        "memory without a file system",
        "import os\nheld = 0\nfor _ in range(40):\n    number = os.memfd_create('x')\n"
        "    for _ in range(15): held += os.write(number, bytes(1 << 20))\nprint('THROUGH')",
        Level.A,
    ),
    Attack(
        "new user namespace",
        _CALLS + "if call(272, 97, 0x10000000) == 0: print('THROUGH')\n"
        "if call(272, 97, 0x00020000) == 0: print('THROUGH')\n"
        "child = call(56, 220, 0x10000000 | 17, None, None, None, None)\n"
        "if child == 0: os._exit(0)\nif child > 0: print('THROUGH')",
    ),
    Attack(
        "mount",
        _CALLS + "if libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0: print('THROUGH')\n"
        "if libc.umount2(b'/tmp', 2) == 0: print('THROUGH')\n"
        "if call(428, 428, -100, b'/', 1) >= 0: print('THROUGH')\nif call(161, 51, b'/') == 0: print('THROUGH')",
    ),
    Attack("io_uring", _CALLS + "if call(425, 425, 4, ctypes.create_string_buffer(256)) >= 0: print('THROUGH')"),
    Attack("userfaultfd", _CALLS + "if call(323, 282, 1) >= 0: print('THROUGH')"),
    Attack("bpf", _CALLS + "if call(321, 280, 0, ctypes.create_string_buffer(72), 72) >= 0: print('THROUGH')"),
    Attack(
        "perf events, keys, queues",
        _CALLS + "attributes = ctypes.create_string_buffer(128)\nattributes[4] = 112\n"
        "if call(298, 241, attributes, 0, -1, -1, 0) >= 0: print('THROUGH')\n"
        "if call(250, 219, 0, -3, 1) >= 0: print('THROUGH')\n"
        "if call(68, 186, 4711, 0o1666) >= 0: print('THROUGH')\nif call(29, 194, 4711, 4096, 0o1666) >= 0: print('THROUGH')",
    ),
    Attack(
        "32-bit and unknown calls",
        _CALLS + "for number in (463, 470, 0x40000000 | 41, 0x40000000 | 101):\n"
        "    ctypes.set_errno(0)\n    if libc.syscall(number, 0, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() != 38: "
        "print('THROUGH', number, ctypes.get_errno())",
    ),
    Attack(
        "kill others",
        "import os\nfor pid in ($GRADER, $NEIGHBOUR, os.getppid()):\n"
        "    if pid > 1:\n        try: os.kill(pid, 0)\n        except OSError: continue\n        print('THROUGH', pid)",
    ),
    Attack(
        "limits of others",
        "import os, resource\nfor pid in ($GRADER, $NEIGHBOUR, os.getppid()):\n"
        "    try: resource.prlimit(pid or -1, resource.RLIMIT_NOFILE)\n    except (OSError, ValueError): continue\n"
        "    print('THROUGH', pid)",
    ),
    Attack(
        "raise its own limits",
        "import resource\nfor kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):\n"
        "    try: resource.setrlimit(kind, (1 << 40, 1 << 40))\n    except (OSError, ValueError): continue\n"
        "    print('THROUGH', kind)",
    ),
    Attack(
        "a daemon that outlives the run",
        "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n        for number in range(3): os.close(number)\n"
        "        time.sleep(0.3)\n        open('$MARK', 'w').close()\n    os._exit(0)\n",
    ),
    Attack(
        "become root again",
        "import os\nfor change in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), "
        "lambda: os.chown('/tmp', 0, 0)):\n    try: change()\n    except OSError: continue\n    print('THROUGH')",
    ),
    Attack(
        "ignore every signal and spin",
        "import signal\nfor number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        seconds=0.2,
    ),
    Attack("flood the output", "while True: print('x' * 65536)"),
    Attack("flood the errors", "import sys\nwhile True: sys.stderr.write('x' * 65536)"),
)

#: Must work wherever attacks are stopped.
HONEST = """
import math, re, threading, collections, heapq, functools, itertools
worker = threading.Thread(target=lambda: print(sum(map(int, input().split())) + math.comb(4, 2)))
worker.start()
worker.join()
"""
