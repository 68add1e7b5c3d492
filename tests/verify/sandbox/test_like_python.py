"""The sandbox beside plain Python, over the ways in which programs read, write and end.

Promises: at levels A, C and D, where they can be stood on, a program writes the same and ends with the same status as a
script that the interpreter runs without a sandbox: all programs at the strongest level, and each at one of the others,
in turn, since what reads, writes and ends is the same guest at all of them.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.sandbox import Sandbox, SandboxFailed
from stretto_verify.sandbox.walls import Level, ladder

GIVEN = b"3\n1 2 3\nlast line\n"
READING = {
    "input": "n = int(input())\nprint(n, *map(int, input().split()))\nprint(input())",
    "input with a prompt": "print(input('n? '))",
    "input at the end": "try:\n    while True: input()\nexcept EOFError: print('end')",
    "for line in sys.stdin": "import sys\nfor line in sys.stdin: print(line.strip()[::-1])",
    "sys.stdin.read": "import sys; print(sys.stdin.read().split())",
    "sys.stdin.readlines": "import sys; print(sys.stdin.readlines())",
    "input = sys.stdin.readline": "import sys\ninput = sys.stdin.readline\nprint(int(input()), input(), end='')",
    "sys.stdin.buffer": "import sys; print(sys.stdin.buffer.read())",
    "input, then the buffer": "import sys\nprint(input())\nprint(sys.stdin.buffer.readline())",
    "open(0)": "print(open(0).read())",
    "open(0, 'rb')": "print([*open(0, 'rb')])",
    "os.read": "import os; print(os.read(0, 100))",
    "os.fstat": "import os; print(os.read(0, os.fstat(0).st_size or 100))",
    "open('/dev/stdin')": "print(open('/dev/stdin').read())",
    "open('/dev/stdin'), lines": "with open('/dev/stdin') as given:\n    n, *rest = given\nprint(n, rest)",
    "Path('/dev/stdin')": "from pathlib import Path; print(Path('/dev/stdin').read_text())",
    "io.open('/dev/stdin')": "import io; print(io.open('/dev/stdin', 'rb').read())",
    "fileinput": "import fileinput\nfor line in fileinput.input(): print(line, end='')",
    "sys.__stdin__": "import sys; print(sys.__stdin__.readline())",
    "io.StringIO as stdin": (
        "import io, sys\nsys.stdin = io.StringIO(sys.stdin.read() + 'more')\nprint(sys.stdin.read())"
    ),
    "io.BytesIO of os.read": (
        "import io, os, sys\nsys.stdin = io.TextIOWrapper(io.BytesIO(os.read(0, 1000)))\nprint(input(), input())"
    ),
    "stdin as an iterator": "import sys\nit = iter(sys.stdin.read().split())\nprint(int(next(it)), next(it))",
    "a csv": "import csv, sys; print([*csv.reader(sys.stdin, delimiter=' ')])",
}
WRITING = {
    "print": "print('a', 1, sep='-', end='!\\n')",
    "sys.stdout.write": "import sys; sys.stdout.write('a\\nb')",
    "sys.stdout.writelines": "import sys; sys.stdout.writelines(['a', 'b'])",
    "sys.stdout.buffer.write": "import sys; sys.stdout.buffer.write(b'a\\xff')",
    "buffer before text": "import sys\nprint('a')\nsys.stdout.flush()\nsys.stdout.buffer.write(b'b\\n')",
    "text before buffer, not flushed": "import sys\nprint('a')\nsys.stdout.buffer.write(b'b\\n')",
    "os.write": "import os\nprint('a')\nos.write(1, b'b\\n')",
    "os.write after a flush": "import os\nprint('a', flush=True)\nos.write(1, b'b\\n')",
    "sys.__stdout__": "import sys; sys.__stdout__.write('a')",
    "sys.__stdout__ beside sys.stdout": "import sys\nprint('a')\nsys.__stdout__.write('b')\nprint('c')",
    "atexit": "import atexit; atexit.register(print, 'last'); print('first')",
    "atexit with sys.__stdout__": "import atexit, sys; atexit.register(sys.__stdout__.write, 'last')",
    "atexit that joins": (
        "import atexit, io, sys\nsys.stdout = io.StringIO()\n"
        "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\nprint('a')"
    ),
    "a new wrapper": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint('a')",
    "a new wrapper, line by line": (
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, line_buffering=True)\nprint('a')"
    ),
    "a new wrapper with another name": "import io, sys\nout = io.TextIOWrapper(sys.stdout.buffer)\nout.write('a')",
    "a wrapper of open(1)": "import sys\nsys.stdout = open(1, 'w', buffering=1 << 20, closefd=False)\nprint('a')",
    "open(1, 'w') left open": "out = open(1, 'w')\nout.write('a')",
    "open(1, 'w') left open in a function": "def main():\n    out = open(1, 'w')\n    out.write('a')\nmain()",
    "open(1, 'w') left open in an object": (
        "class Fast:\n    def __init__(self): self.out = open(1, 'w')\nfast = Fast()\nfast.out.write('a')"
    ),
    "open(1, 'w') left open in a cycle": (
        "class Fast:\n    def __init__(self): self.out, self.me = open(1, 'w'), self\nFast().out.write('a')"
    ),
    "open(1, 'wb', 0)": "open(1, 'wb', 0).write(b'a')",
    "with open(1, 'w')": "print('first')\nwith open(1, 'w', closefd=False) as out: out.write('a')\nprint('b')",
    "open('/dev/stdout', 'w')": "with open('/dev/stdout', 'w') as out: out.write('a')",
    "print(file=open(1, 'w'))": "print('a', file=open(1, 'w'))",
    "io.StringIO as stdout": (
        "import io, sys\nout, sys.stdout = sys.stdout, io.StringIO()\nprint('a')\nout.write(sys.stdout.getvalue())"
    ),
    "redirect_stdout": (
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as held: print('a')\n"
        "print(held.getvalue())"
    ),
    "print is sys.stdout.write": (
        "import sys\nprint = lambda *words: sys.stdout.write(' '.join(map(str, words)) + '\\n')\nprint(1, 2)"
    ),
    "to the errors": "import sys; print('a', file=sys.stderr); print('b')",
    "reconfigure": "import sys; sys.stdout.reconfigure(line_buffering=True); print('é')",
    "a surrogate": "print('\\udcff')",
    "a byte that is no text": "import sys; print(input()); sys.stdout.write('\\udc80')",
    "__del__": "class Last:\n    def __del__(self): print('last')\nlast = Last()\nprint('first')",
    "__del__ of a cycle": (
        "class Last:\n    def __init__(self): self.me = self\n    def __del__(self): print('last')\nLast()"
    ),
    "pprint and logging": (
        "import logging, pprint, sys\nlogging.basicConfig(stream=sys.stdout)\nlogging.warning('w')\n"
        "pprint.pprint({1: 2})"
    ),
}
ENDING = {
    "sys.stdout.close()": "import sys; print('a'); sys.stdout.close()",
    "sys.stdout = None": "import sys; print('a'); sys.stdout = None; print('b')",
    "os.close(1)": "import os; print('a', flush=True); os.close(1)",
    "os.close(1), not flushed": "import os; print('a'); os.close(1)",
    "os._exit": "import os; print('a', flush=True); print('b'); os._exit(0)",
    "exit()": "print('a'); exit()",
    "quit(2)": "print('a'); quit(2)",
    "sys.exit('no')": "import sys; print('a'); sys.exit('no')",
    "sys.exit(256)": "import sys; sys.exit(256)",
    "sys.exit(True)": "import sys; sys.exit(True)",
    "raise SystemExit": "print('a'); raise SystemExit",
    "an exception": "print('a'); 1 / 0",
    "an exception with a thread": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), print('t'))).start()\n1 / 0"
    ),
    "exit with a thread": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), print('t'))).start()\nexit()"
    ),
    "an exception in a thread": "import threading\nthreading.Thread(target=lambda: 1 / 0).start()",
    "an exception at the exit": "import atexit; atexit.register(lambda: 1 / 0); print('a')",
    "a daemon thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\nprint('a')"
    ),
    "a thread with a large stack": (
        "import sys, threading\nthreading.stack_size(2**29)\nsys.setrecursionlimit(10**6)\n"
        "def f(n): return n and 1 + f(n - 1)\nt = threading.Thread(target=lambda: print(f(20000)))\n"
        "t.start(); t.join()"
    ),
    "a large stack": (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_STACK, (2**29, -1))\n"
        "sys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(20000))"
    ),
    "asyncio": (
        "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    return input()\nprint(asyncio.run(main()))"
    ),
    "asyncio, several": (
        "import asyncio\nasync def f(n):\n    await asyncio.sleep(0.01)\n    return n\n"
        "async def main(): print(await asyncio.gather(*map(f, range(3))))\nasyncio.run(main())"
    ),
    "an executor": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(2) as pool: print([*pool.map(abs, [-1, 2])])"
    ),
    "a queue": (
        "import queue, threading\nq = queue.Queue()\nthreading.Thread(target=q.put, args=(1,)).start()\nprint(q.get())"
    ),
    "sqlite": "import sqlite3; print(sqlite3.connect(':memory:').execute('select 1 + 1').fetchall())",
    "a signal": (
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: print('alarm'))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01)\nsignal.pause()"
    ),
    "main guard": "def main(): print('a')\nif __name__ == '__main__': main()",
    "__main__ is itself": "import __main__, sys\nx = 5\nprint(__main__.x, sys.modules[__name__].x)",
    "dataclasses and pickle": (
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n    x: int\n"
        "print(pickle.loads(pickle.dumps(P(1))))"
    ),
}
IDIOMS = READING | WRITING | ENDING
CONFIG = SandboxConfig()
# Levels A and B differ by a control group, level E has no walls, and a cold guest is a warm one that has run nothing.
LADDER = [walls for walls in ladder(True) if walls.warm and walls.level not in (Level.B, Level.E)]


#: Forks a process for each program, which it runs and ends as the interpreter itself would: to start one for each takes
#: as long as all else here.
PLAIN = """
import json, os, sys
for source, name in json.loads(sys.argv[1]):
    if not os.fork():
        os.dup2(os.open("given", os.O_RDONLY), 0)
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), 1)
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
sys.argv = ["program.py"]
exec(compile(source, "program.py", "exec"))
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, int]]:
    """What the interpreter makes of each, as a script in a file."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "given").write_bytes(GIVEN)
    told = json.dumps([(source, str(place)) for place, source in enumerate(IDIOMS.values())])
    python = [str(Path(getattr(sys, "_base_executable", sys.executable))), "-I", "-B", "-c", PLAIN, told]
    ended = subprocess.run(python, stdin=subprocess.DEVNULL, capture_output=True, env={}, cwd=folder, check=False)
    statuses = map(int, ended.stdout.split())
    wrote = ((folder / str(place)).read_bytes() for place in range(len(IDIOMS)))
    return dict(zip(IDIOMS, zip(wrote, statuses, strict=True), strict=True))


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[list[Sandbox]]:
    """Those that can be stood on here, the strongest first."""
    standing = list[Sandbox]()
    with ExitStack() as stack:
        for walls in LADDER:
            sandbox = stack.enter_context(Sandbox(walls, CONFIG))
            with suppress(SandboxFailed):  # this level is not offered here
                sandbox.run({"source": ""}, b"", 5.0)
                standing.append(sandbox)
        assert standing, "the lowest level asks for nothing"
        yield standing


@pytest.mark.parametrize("name", IDIOMS)
def test_a_program_writes_and_ends_as_a_script_does(
    sandboxes: list[Sandbox], plain: dict[str, tuple[bytes, int]], name: str
) -> None:
    strongest, *weaker = sandboxes
    other = weaker[[*IDIOMS].index(name) % len(weaker)] if weaker else strongest
    for sandbox in (strongest, other):
        ended = sandbox.run({"source": IDIOMS[name]}, GIVEN, 10.0)
        assert (ended.output, ended.status) == plain[name], ended
