"""The sandbox as a place where honest programs run.

Promises: a program gets its input, an interpreter with its library, a private /tmp, and nothing of the run before; how
it ends is told exactly; what it does to itself is its end, what happens to the sandbox is a `SandboxFailed`; nothing is
left behind after many runs.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.sandbox import ProgramEnd, Sandbox, SandboxFailed
from stretto_verify.sandbox.walls import Level, Walls, ladder

CONFIG = SandboxConfig(memory_mib=256, output_mib=1)
RUNS = 150
LONG = pytest.mark.long
LADDER = {f"{walls.level}-{'warm' if walls.warm else 'cold'}": walls for walls in ladder(True)}
#: Daily: the strongest that can be stood on here, one that makes a new guest for each program, and one without
#: namespaces.
EACH = ["strongest", *(name if name in ("B-cold", "D-warm") else pytest.param(name, marks=LONG) for name in LADDER)]


@cache
def offered(walls: Walls) -> bool:
    """Whether this rung can be stood on here."""
    with contextlib.suppress(SandboxFailed), Sandbox(walls, CONFIG) as sandbox:
        sandbox.run({"source": ""}, b"", 5.0)
        return True
    return False


def strongest() -> Walls:
    return next(filter(offered, LADDER.values()))


@pytest.fixture(scope="module", params=EACH)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    walls = LADDER.get(request.param) or strongest()
    if not offered(walls):
        pytest.skip(f"{request.param} is not offered here")
    with Sandbox(walls, CONFIG) as sandbox:
        yield sandbox


def run(sandbox: Sandbox, source: str, given: str = "", seconds: float = 5.0) -> ProgramEnd:
    return sandbox.run({"source": source}, given.encode(), seconds)


def test_a_program_reads_its_input_and_writes_its_output(sandbox: Sandbox) -> None:
    ended = run(
        sandbox, "import sys\na = input()\nprint(int(a) + sum(map(int, sys.stdin.read().split())), 'é')", "1\n2 3\n"
    )
    assert (ended.output.decode(), ended.errors, ended.well) == ("6 é\n", b"", True)


class Interrupted(Exception):
    """Raised by a signal's handler, as KeyboardInterrupt is."""


def test_after_an_interrupted_run_the_next_has_its_own_end(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    run(sandbox, "")
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "_follow", interrupt)
        with pytest.raises(Interrupted):
            run(sandbox, "print('of the interrupted one'); exit(7)")
    ended = run(sandbox, "print('of the next one')")
    assert (ended.output, ended.status) == (b"of the next one\n", 0)


def test_a_fork_of_the_process_has_a_guest_of_its_own(sandbox: Sandbox) -> None:
    assert run(sandbox, "print(1)").output == b"1\n"
    guest = sandbox._guest
    child = os.fork()
    if child == 0:  # nothing of the test's frame may run on in it
        with contextlib.suppress(BaseException):
            mine = run(sandbox, "print(2)").output == b"2\n" and (guest is None or sandbox._guest is not guest)
            sandbox.close()
            os._exit(0 if mine else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run(sandbox, "print(3)").output == b"3\n"
    assert sandbox._guest is guest or guest is None or not sandbox._keep


@pytest.mark.parametrize(
    ("source", "status", "how"),
    [
        *[("", 0, "exit status 0"), ("import sys; sys.exit(3)", 3, "exit status 3")],
        *[("import sys; sys.exit('no')", 1, "exit status 1: no"), ("exit()", 0, "exit status 0")],
        *[("print(1)\nquit(4)", 4, "exit status 4"), ("def main(): exit('no')\nmain()", 1, "exit status 1: no")],
        ("1 / 0", 1, "exit status 1: ZeroDivisionError: division by zero"),
        ("raise KeyboardInterrupt", 1, "exit status 1: KeyboardInterrupt"),
        *[("def f(:", 1, "exit status 1: SyntaxError: invalid syntax"), ("import os; os._exit(5)", 5, "exit status 5")],
        ("import ctypes; ctypes.string_at(0)", -11, "signal 11"),
        *[("x = b'x' * (1 << 30)", 1, "exit status 1: MemoryError"), ("import sys; sys.stdout.close()", 0, None)],
    ],
)
def test_how_a_program_ends_is_told(sandbox: Sandbox, source: str, status: int, how: str | None) -> None:
    ended = run(sandbox, source)
    assert ended.status == status
    assert how is None or ended.how == how
    assert ended.well == (status == 0)


def test_a_program_is_a_script(sandbox: Sandbox) -> None:
    source = (
        "import atexit, threading, time, dataclasses, pickle, sys\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int\n"
        "if __name__ == '__main__':\n"
        "    atexit.register(print, 'last')\n"
        "    threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
        "    print(pickle.loads(pickle.dumps(Point(3))), sys.argv)\n"
    )
    assert run(sandbox, source).output == b"Point(x=3) ['program.py']\nthread\nlast\n"


def test_what_is_run_around_a_program_is_of_its_module_and_its_first_line_stays_the_first(sandbox: Sandbox) -> None:
    task = {
        "before": "import math\nx = 1",
        "source": "from __future__ import annotations\ndef f(n: Unknown): return math.sqrt(n) + x",
        "after": "print(f(9), __name__)",
    }
    assert sandbox.run(task, b"", 5.0).output == b"4.0 __main__\n"


@pytest.mark.parametrize("parts", [1, 2])
def test_a_limit_is_one_of_processor_time_and_the_clock_is_a_backstop(sandbox: Sandbox, parts: int) -> None:
    """Between two numbers the program computes for `parts` of its limit of 2, and sleeps for as long as it likes."""
    source = (
        "import time\n"
        "def spin(s):\n    s += time.process_time()\n    while time.process_time() < s: pass\n"
        f"time.sleep(0.15)\nprint(1, flush=True)\nspin({0.1 * parts})\ntime.sleep(0.15)\nprint(2)\nspin(0.02)"
    )
    ended = run(sandbox, source, seconds=0.2)
    assert (ended.how, ended.seconds > 0.25) == ("time limit" if parts == 2 else "exit status 0", True), ended
    assert ended.timed_out == (parts == 2)
    assert ended.output.startswith(b"1\n")


def test_what_a_program_starts_is_charged_to_it(sandbox: Sandbox) -> None:
    if sandbox.walls.level in (Level.D, Level.E):
        pytest.skip("level D allows no processes, level E promises nothing")
    ended = run(sandbox, "import os, time\nif not os.fork():\n    while True: pass\ntime.sleep(99)", seconds=0.2)
    assert (ended.how, ended.cpu_seconds >= 0.2) == ("time limit", True), ended


def test_a_program_may_give_itself_a_name_that_is_no_text(sandbox: Sandbox) -> None:
    named = "import ctypes\nctypes.CDLL(None).prctl(15, b'\\xff) (', 0, 0, 0)\n"
    assert run(sandbox, named + "while True: pass", seconds=0.2).how == "time limit"


def test_a_program_that_sleeps_ends_by_the_clock(sandbox: Sandbox) -> None:
    start = time.monotonic()
    ended = run(sandbox, "import time; time.sleep(99)", seconds=0.05)
    assert (ended.how, ended.cpu_seconds < 0.05) == ("time limit", True)
    assert time.monotonic() - start >= 0.5


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_is_cut_off(sandbox: Sandbox, stream: str) -> None:
    ended = run(sandbox, f"import sys\nwhile True: sys.{stream}.write('x' * 65536)", seconds=20.0)
    assert (ended.flooded, ended.how) == (True, "output limit")
    assert len(ended.output) <= 1 << 20


def test_a_megabyte_goes_in_and_out(sandbox: Sandbox) -> None:
    text = "0123456789abcde\n" * ((1 << 20) // 16)
    assert run(sandbox, "print(open(0).read(), end='')", text).output == text.encode()


def test_no_program_finds_anything_of_the_one_before(sandbox: Sandbox) -> None:
    if sandbox.walls.level is Level.E:
        pytest.skip("level E promises nothing of the kind")
    mark = "a" + "b" * 20 + "c"
    run(sandbox, f"import builtins, sys\nbuiltins.kept = sys.kept = '{mark}'\n" + _WRITE, mark)
    found = run(
        sandbox,
        "import builtins, sys, gc, os\n"
        "print(hasattr(builtins, 'kept'), hasattr(sys, 'kept'))\n"
        "print([x for x in gc.get_objects() if isinstance(x, dict) and any(\n"
        "    isinstance(v, (str, bytes)) and len(v) == 22 and v[:1] in ('a', b'a') for v in x.values())])\n"
        "print(os.path.exists('/tmp/left'))",
    )
    assert found.output == b"False False\n[]\nFalse\n", found


_WRITE = "try: open('/tmp/left', 'w').close()\nexcept OSError: pass\n"


def test_the_environment_is_empty(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_SECRET", "x")
    assert run(sandbox, "import os; print([k for k in os.environ if k not in ('PWD', 'LC_CTYPE')])").output == b"[]\n"


def test_modules_cannot_be_shadowed_by_files(sandbox: Sandbox) -> None:
    source = "import os, sys\nprint('' in sys.path, os.getcwd() in sys.path, '/tmp' in sys.path)"
    assert run(sandbox, source).output == b"False False False\n"


def test_calls_are_made_with_the_arguments_and_their_results_come_back(sandbox: Sandbox) -> None:
    source = "def f(x, y=0): print('noise'); return [x, (y,), {1: x}, {'k': {y}}]\ndef g(): return open\n"
    calls = [{"name": "f", "args": [1, 2]}, {"name": "g", "args": []}, {"name": "h", "args": []}]
    ended = sandbox.run({"source": source, "calls": calls}, b"", 5.0)
    assert ended.output.decode().splitlines() == [
        '{"value": [1, {"\\u0000tuple": [2]}, {"\\u0000dict": [[1, 1]]}, {"k": {"\\u0000set": [2]}}]}',
        '{"error": "TypeError: a builtin_function_or_method is no result that a test can expect"}',
        '{"error": "KeyError: \'h\'"}',
    ]
    assert ended.errors == b"noise\n"


def test_a_guest_that_is_killed_is_a_failure_and_the_next_run_has_a_new_one() -> None:
    with Sandbox(LADDER["E-warm"], CONFIG) as sandbox:
        assert run(sandbox, "print(1)").well
        assert sandbox._guest is not None
        os.kill(sandbox._guest.pid, signal.SIGKILL)
        with pytest.raises(SandboxFailed):
            run(sandbox, "print(1)")
        assert run(sandbox, "print(2)").output == b"2\n"


def test_a_sandbox_that_cannot_be_started_says_why() -> None:
    beyond = Walls(Level.C, namespaces=0x1, landlock=True)  # no such namespace
    with Sandbox(beyond, CONFIG) as sandbox, pytest.raises(SandboxFailed):
        run(sandbox, "print(1)", seconds=1.0)


def traces() -> dict[str, object]:
    """What runs might leave behind on the host."""
    tasks = [path.name for path in Path("/proc").iterdir() if path.name.isdecimal()]
    ours = 0
    for task in tasks:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()
            ours += int(words[1]) == os.getpid()
    return {
        "children": ours,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mounts": Path("/proc/self/mounts").read_text().count("\n"),
        "files": sorted(path.name for path in Path("/tmp").glob("stretto-fill*")),
        "groups": [  # `os.walk` passes over groups of other processes that vanish meanwhile
            name
            for controller in ("memory", "pids")
            for _, folders, _ in os.walk(f"/sys/fs/cgroup/{controller}")
            for name in folders
            if name.startswith(f"stretto-{os.getpid()}-")
        ],
    }


def test_many_runs_leave_no_zombie_file_mount_or_process() -> None:
    before = traces()
    program = "import os\nif os.fork() == 0: os._exit(0)\nopen('x', 'w').close()\nprint(1)"
    with Sandbox(strongest(), CONFIG) as sandbox:
        run(sandbox, "")
        during = traces()
        for number in range(RUNS):
            ended = run(sandbox, program if number % 10 == 0 else "print(1)")
            assert ended.output == b"1\n", (number, ended)
        assert traces() == during
    assert traces() == before


def test_cold_runs_leave_nothing_either() -> None:
    before = traces()
    with Sandbox(strongest(), CONFIG.model_copy(update={"warm": False})) as sandbox:
        for _ in range(8):
            assert run(sandbox, "print(1)").output == b"1\n"
    assert traces() == before
