"""Processes that play roles: started with a spec, watched, stopped even if they do not want to be."""

import asyncio
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from stretto.core.errors import RoleDied
from stretto.processes.role import RoleProcess
from stretto.processes.spawn import FRESH, FreshSpawner, RunningProcess, Spawn, cause_in, describe_exit, environment
from stretto.processes.tree import cpu_ticks
from stretto_app.forking.server import ForkServer
from tests.asynchronous import Test, run_by, until
from tests.processes.conftest import ROLE
from tests.processes.stubborn_role import StubbornSpec


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL (out of memory?)"),
        (-11, "was killed by SIGSEGV"),
        (-15, "was killed by SIGTERM"),
        (-40, "was killed by signal 40"),
    ],
)
def test_how_a_process_ended_is_a_sentence(code: int, sentence: str) -> None:
    assert describe_exit(code) == sentence


def played(spec: StubbornSpec, *, fresh: bool = False, hung: float = math.inf) -> Callable[[Test], Callable[..., None]]:
    """For a test with a role that is up: one that is forked, or with an interpreter of its own."""

    def run(work: Callable[[RoleProcess], Awaitable[None]], tmp_path: Path, shared: ForkServer) -> None:
        async def main() -> None:
            role = RoleProcess("stubborn", ROLE, tmp_path / "log.txt", hung, FRESH if fresh else shared)
            await role.start(spec, threads=1)
            assert role.running
            try:
                async with asyncio.timeout(20):
                    await until(lambda: role.log.read_text())
                    await work(role)
            finally:
                await role.stop(5)
                assert not role.running

        asyncio.run(main())

    return run_by(run)


@played(StubbornSpec(seconds=0.0, code=7), fresh=True)
async def test_a_role_that_ends_is_heard_of(role: RoleProcess) -> None:
    assert await role.ended() == "ended with exit code 7"
    assert role.log.read_text() == "up\n"


@played(StubbornSpec(seconds=0.0, code=-signal.SIGABRT))
async def test_a_role_that_aborts_is_heard_of_with_its_last_words(role: RoleProcess) -> None:
    assert await role.ended() == "was killed by SIGABRT (its log ends: up)"


@played(StubbornSpec())
async def test_a_role_is_asked_to_stop_before_it_is_killed(role: RoleProcess) -> None:
    await role.stop(10)
    assert await role.ended() == "was killed by SIGTERM"


@played(StubbornSpec(ignores=True))
async def test_a_role_that_ignores_sigterm_is_killed_after_its_grace(role: RoleProcess) -> None:
    start = time.monotonic()
    await role.stop(0.2)
    assert time.monotonic() - start >= 0.2
    assert await role.ended() == "was killed by SIGKILL"  # by whom is known: no memory is missing


@played(StubbornSpec(seconds=0.0, code=7, child=True))
async def test_a_process_that_a_role_leaves_behind_is_killed(role: RoleProcess) -> None:
    assert await role.ended() == "ended with exit code 7"
    state = Path(f"/proc/{int(role.log.read_text())}/stat")
    await until(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX")


@played(StubbornSpec(), fresh=True)
async def test_a_role_in_a_session_of_its_own_hears_no_ctrl_c_of_the_terminal(role: RoleProcess) -> None:
    assert os.getsid(role.pid) == role.pid != os.getsid(0)
    os.kill(role.pid, signal.SIGKILL)
    assert await role.last_words() == "was killed by SIGKILL (out of memory?)"


@pytest.mark.parametrize("fresh", [True, False])
async def test_an_error_that_nobody_catches_is_in_how_its_role_ended(
    tmp_path: Path, shared: ForkServer, fresh: bool
) -> None:
    role = RoleProcess("stubborn", ROLE, tmp_path / "log.txt", spawner=FRESH if fresh else shared)
    found = r" \(.*ValidationError: Expected `object`, got `int`\)"
    for spec, error in ((msgspec.Raw(b"3"), found), (StubbornSpec(seconds=0.0, code=1), "")):
        await role.start(spec, 1)
        async with asyncio.timeout(20):
            assert re.fullmatch(f"ended with exit code 1{error}", await role.last_words())


ABORT = "import os; (lambda words: (os.write(2, words), os.abort()))"  #: a program that ends with these words

CAUGHT = "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\nraise SystemExit("


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (
            "class A:\n def __del__(self): raise OSError('late')\na = A()\nraise ValueError('cause\\n  more')",
            "ValueError: cause",
        ),
        (f"{CAUGHT}'text')", ""),
        (f"{CAUGHT}'log: lacks it')", "lacks it"),
        ("raise RuntimeError('CUDA error: lost\\nmay come late\\nset this')", "RuntimeError: CUDA error: lost"),
        ("raise ExceptionGroup('all', [OSError('one')])", "ExceptionGroup: all (1 sub-exception)"),
        (
            "try: 1 / 0\nexcept Exception as one: raise ExceptionGroup('all', [one])",
            "ZeroDivisionError: division by zero",
        ),
        ("import ctypes; ctypes.pythonapi.Py_FatalError(b'no GIL')", "its log ends: Fatal Python error: no GIL"),
        (f"{ABORT}(b'terminate called\\n  what():  no thread\\nframe #0\\n')", "its log ends: what():  no thread"),
        (f"{ABORT}(b'up\\nfree(): invalid pointer\\n\\n')", "its log ends: free(): invalid pointer"),
        (f"{ABORT}(b'')", ""),
        ("import os, signal; print('up'); os.kill(os.getpid(), signal.SIGTERM)", ""),
    ],
)
@pytest.mark.parametrize("start", [0, 1 << 20])  # the latter: the log has been cut since
def test_of_a_log_the_error_that_ended_its_process_is_told_and_no_other(
    tmp_path: Path, program: str, told: str, start: int
) -> None:
    log = tmp_path / "log.txt"
    with log.open("w") as output:
        code = subprocess.run([sys.executable, "-c", program], stdout=output, stderr=output, check=False).returncode
    assert cause_in(log, code, start) == told


def test_the_cpu_time_of_a_process_with_any_name_is_read(tmp_path: Path) -> None:
    program = shutil.copy("/bin/sleep", tmp_path / os.fsdecode(b"half a \xc3) ("))
    with subprocess.Popen([program, "5"]) as process:
        found = cpu_ticks(process.pid)
        process.kill()
    assert 0 <= found < 100


async def test_a_kill_that_comes_before_the_process_is_there_ends_it(tmp_path: Path) -> None:
    """A fork server that still imports starts it seconds later."""

    class Later(FreshSpawner):
        async def start(self, spawn: Spawn) -> RunningProcess:
            await asyncio.sleep(0.1)
            return await super().start(spawn)

    role = RoleProcess("stubborn", ROLE, tmp_path / "log.txt", spawner=Later())
    starting = asyncio.create_task(role.start(StubbornSpec(), 1))
    await asyncio.sleep(0)
    role.kill()
    await starting
    async with asyncio.timeout(5):
        assert await role.ended() == "was killed by SIGKILL"


BEATING = StubbornSpec(beats=True, pause=0.1)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats are listened for twenty times a second, and the longest pause between two looks counts a fifth."""
    monkeypatch.setattr("stretto.processes.role._LISTEN_SECONDS", 0.05)
    monkeypatch.setattr("stretto.processes.role._LONGEST_POLL", 0.2)


@played(BEATING, hung=0.9)
async def test_a_role_that_hangs_is_killed_if_anybody_waits_for_its_end_or_not(role: RoleProcess, often: None) -> None:
    await asyncio.sleep(0.2)  # its first heartbeat has come
    os.kill(role.pid, signal.SIGSTOP)
    await until(lambda: not role.running, 0.05)
    assert await role.last_words() == "sent no heartbeat for 1 s and was killed"


async def test_a_role_that_is_stopped_before_its_first_sign_of_life_is_killed(
    tmp_path: Path, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.processes.role._IMPORT_SECONDS", 0.5)

    role = RoleProcess("stubborn", ROLE, tmp_path / "log.txt", hung=0.5)
    await role.start(StubbornSpec(beats=True), threads=1)
    os.kill(role.pid, signal.SIGSTOP)
    assert (await role.ended()).startswith("sent no heartbeat for ")


@played(BEATING, hung=0.9)
async def test_a_pause_of_the_conductor_is_not_held_against_a_role(role: RoleProcess, often: None) -> None:
    await asyncio.sleep(0.2)
    os.kill(role.pid, signal.SIGSTOP)
    time.sleep(1.2)  # nobody runs, as on a machine that was suspended
    await asyncio.sleep(0.05)  # the conductor is a little earlier again than the role
    os.kill(role.pid, signal.SIGCONT)
    await asyncio.sleep(0.3)
    assert role.running


async def test_whoever_stops_a_role_that_is_being_started_waits_until_it_can(tmp_path: Path) -> None:
    role = RoleProcess("stubborn", ROLE, tmp_path / "log.txt")
    starting = asyncio.create_task(role.start(StubbornSpec(), threads=1))
    await asyncio.sleep(0)
    await role.stop(0.1)
    await starting
    assert not role.running
    assert (await role.ended()).startswith("was killed by SIG")


async def test_a_role_that_cannot_be_started_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")

    with pytest.raises(RoleDied, match=r"stubborn cannot be started: /nowhere/python: No such file"):
        await RoleProcess("stubborn", ROLE, tmp_path / "log.txt").start(StubbornSpec(), 1)


def test_a_role_that_was_never_started_can_be_stopped(tmp_path: Path) -> None:
    role = RoleProcess("never", ROLE, tmp_path / "log.txt")
    asyncio.run(role.stop(1))
    assert not role.running


def test_a_role_gets_its_threads_before_torch_is_imported() -> None:
    assert environment(3)["OMP_NUM_THREADS"] == environment(3)["MKL_NUM_THREADS"] == "3"
    assert environment(1)["HF_HUB_OFFLINE"] == "1"
