"""A fork server that is a copy of the process that starts roles: what it keeps of that process, and how it ends.

- It keeps no descriptor and nothing of a terminal, and does nothing of what the original does at its end.
- It collects garbage, and so do its roles, although the original forks it amid imports, for which it does not.
- An error of a role ends the role; a module that cannot be imported is left to the role that needs it.
- It ends with the original, and what was forked from it too.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto_app.forking import server as fork_server

ROOT = Path(__file__).parents[2]
HERE = """
import asyncio, os, sys
from pathlib import Path
from tests.processes import stubborn_role
from stretto_app.forking.role import fork_here
from stretto.processes.role import RoleProcess

held, other = os.pipe()
spawner = fork_here()

async def main() -> None:
    role = RoleProcess("stubborn", "tests.processes.stubborn_role", Path(sys.argv[1]), spawner=spawner)
    await role.start(stubborn_role.StubbornSpec(seconds=0.0, code=7), threads=1)
    print(await role.ended(), flush=True)
    await role.start(stubborn_role.StubbornSpec(), threads=1)
    os.close(other)
    print(os.read(held, 1), spawner.pid, role.pid, flush=True)

asyncio.run(main())
os._exit(0)
"""


def test_a_role_can_fork_others_from_a_copy_of_itself_which_end_with_it(tmp_path: Path) -> None:
    """The copy keeps none of the descriptors of the role."""
    how, last = told(HERE, str(tmp_path / "log.txt"))
    assert how == "ended with exit code 7"
    read, *left = last.split()
    assert read == "b''"
    end = time.monotonic() + 10
    while any(alive(int(pid)) for pid in left):
        assert time.monotonic() < end, left
        time.sleep(0.02)


COMMAND = """
import asyncio, os, sys, time
from pathlib import Path
from stretto_app.forking import role as fork_server_role
from stretto.processes.spawn import Spawn

ROLE = "tests.processes.stubborn_role"
fork_server_role.ROLES = (ROLE,)
before = dict(os.environ)

async def end(spec: str) -> int:
    role = await spawner.start(Spawn(ROLE, spec, sys.argv[1]))
    if "seconds" in spec:
        print(Path(f"/proc/{role.pid}/cmdline").read_text().rstrip(chr(0)).split(chr(0))[1:] == ["-m", ROLE, spec])
    return await role.wait()

with fork_server_role.fork_server(beside=sys.argv[2:] == ["beside"]) as spawner:
    print(asyncio.run(end('{"seconds":0.2,"code":7}' + " " * 999)), asyncio.run(end("no spec")))
    server = f"/proc/{spawner.pid}"
    until = time.monotonic() + 10
    while len(os.listdir(f"{server}/fd")) > 5 and time.monotonic() < until:
        time.sleep(0.01)  # it tells how a role has ended before it closes its wire
    streams = [number for number in map(int, os.listdir(f"{server}/fd"))
               if os.readlink(f"{server}/fd/{number}") == os.devnull]
    print(os.getsid(spawner.pid) == spawner.pid, sorted(streams), len(os.listdir(f"{server}/fd")), before == os.environ)
print(os.path.exists(server), flush=True)
"""
ENDS = """
import asyncio, atexit, sys
from stretto_app.forking import role as fork_server_role
from stretto.processes import event_loop
from stretto.processes.spawn import Spawn

ROLE = "tests.processes.stubborn_role"
fork_server_role.ROLES = (ROLE, "a_module.that_is_not_there")
atexit.register(print, "the end", flush=True)

async def end() -> int:
    roles = [await spawner.start(Spawn(ROLE, '{"seconds":0.5}', sys.argv[1])) for _ in range(4)]
    return sum([await role.wait() for role in roles])

if sys.argv[2:] == ["loop"]:
    event_loop.run(asyncio.sleep(0))
with fork_server_role.fork_server(beside=sys.argv[2:] == ["beside"]) as spawner:
    print(type(spawner).__name__, asyncio.run(end()), flush=True)
"""


COLLECTING = """
import asyncio, gc, sys, types
from stretto_app.forking.role import fork_here
from stretto_app.forking.imports import quick_imports
from stretto.processes.spawn import Spawn

role = sys.modules["collecting"] = types.ModuleType("collecting")
role.main = lambda words: print(gc.isenabled(), flush=True) or 0

async def end() -> int:
    return await (await spawner.start(Spawn("collecting", "", sys.argv[1]))).wait()

with quick_imports():
    spawner = fork_here()
print(asyncio.run(end()), gc.isenabled(), flush=True)
"""


def test_a_role_collects_garbage_though_its_fork_server_was_copied_amid_imports(tmp_path: Path) -> None:
    """Otherwise what a step leaves in cycles would stay, and the memory of a trainer would grow as long as it runs."""
    assert told(COLLECTING, str(tmp_path / "log.txt")) == ["0 True"]
    assert (tmp_path / "log.txt").read_text() == "True\n"


@pytest.mark.parametrize("beside", [(), ("beside",)], ids=["with its imports", "which imports beside it"])
def test_the_fork_server_of_a_command_is_a_copy_of_it_that_keeps_nothing_of_its_terminal(
    tmp_path: Path, beside: tuple[str, ...]
) -> None:
    """It has its wire, and what waits for it. An error of a role ends the role, and does not get to what the command
    does; a role's command line may be longer than that of the command."""
    assert told(COMMAND, str(tmp_path / "log.txt"), *beside) == ["True", "7 1", "True [0, 1, 2] 5 True", "False"]
    assert "DecodeError" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("how", ["", "beside", "loop"], ids=["with its imports", "beside it", "after an event loop"])
def test_what_a_command_does_at_its_end_is_not_done_by_its_fork_server_nor_by_its_roles(
    tmp_path: Path, how: str
) -> None:
    """A module that cannot be imported leaves what is missing to the role that needs it. After a loop of uvloop the
    fork server is no copy: forked processes would lose descriptors whose numbers were uvloop's."""
    assert told(ENDS, str(tmp_path / "log.txt"), how) == ["ForkServer 0", "the end"]
    assert (tmp_path / "log.txt").read_text() == 4 * "up\n"


@pytest.mark.parametrize("ignored", [False, True], ids=["reaped here", "SIGCHLD ignored"])
def test_a_copy_that_has_ended_is_waited_for_and_killed_without_harm(ignored: bool) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        if (pid := os.fork()) == 0:
            os._exit(0)
        copy = fork_server.ForkedHere(pid)
        copy.wait(10)
        copy.wait(10)
        copy.kill()
    finally:
        signal.signal(signal.SIGCHLD, before)


def told(program: str, log: str, *more: str) -> list[str]:
    """What it prints, line by line."""
    done = subprocess.run([sys.executable, "-c", program, log, *more], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
