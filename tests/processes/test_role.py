"""Processes that play roles: started with a spec, watched, stopped even if they do not want to be."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from stretto.core.errors import RoleDied
from stretto.processes.role import RoleProcess
from stretto.processes.spawn import describe_exit, environment
from tests.processes.stubborn_role import StubbornSpec

Work = Callable[[RoleProcess], Coroutine[Any, Any, str]]


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL (out of memory?)"),
        (-11, "was killed by SIGSEGV"),
        (-15, "was killed by SIGTERM"),
    ],
)
def test_how_a_process_ended_is_a_sentence(code: int, sentence: str) -> None:
    assert describe_exit(code) == sentence


def played(folder: Path, spec: StubbornSpec, work: Work, hung: float = math.inf) -> str:
    async def main() -> str:
        role = RoleProcess("stubborn", "tests.processes.stubborn_role", folder / "log.txt", hung)
        await role.start(spec, threads=1)
        assert role.running
        try:
            async with asyncio.timeout(20):
                while not role.log.read_text():
                    await asyncio.sleep(0.01)
                return await work(role)
        finally:
            await role.stop(5)
            assert not role.running

    return asyncio.run(main())


def test_a_role_that_ends_is_heard_of(tmp_path: Path) -> None:
    spec = StubbornSpec(seconds=0.0, code=7)
    assert played(tmp_path, spec, lambda role: role.ended()) == "ended with exit code 7"
    assert (tmp_path / "log.txt").read_text() == "up\n"


def test_a_role_is_asked_to_stop_before_it_is_killed(tmp_path: Path) -> None:
    async def stop(role: RoleProcess) -> str:
        await role.stop(10)
        return await role.ended()

    assert played(tmp_path, StubbornSpec(), stop) == "was killed by SIGTERM"


def test_a_role_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    async def stop(role: RoleProcess) -> str:
        start = time.monotonic()
        await role.stop(0.2)
        assert time.monotonic() - start >= 0.2
        return await role.ended()

    assert played(tmp_path, StubbornSpec(ignores=True), stop) == "was killed by SIGKILL (out of memory?)"


async def what_it_left_is_gone(role: RoleProcess) -> str:
    how, child = await role.ended(), int(role.log.read_text())
    state = Path(f"/proc/{child}/stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX":
        await asyncio.sleep(0.01)
    return how


def test_a_process_that_a_role_leaves_behind_is_killed(tmp_path: Path) -> None:
    spec = StubbornSpec(seconds=0.0, code=7, child=True)
    assert played(tmp_path, spec, what_it_left_is_gone) == "ended with exit code 7"


def test_a_role_in_a_session_of_its_own_hears_no_ctrl_c_of_the_terminal(tmp_path: Path) -> None:
    async def session(role: RoleProcess) -> str:
        assert os.getsid(role.pid) == role.pid != os.getsid(0)
        os.kill(role.pid, signal.SIGKILL)
        return await role.last_words()

    assert played(tmp_path, StubbornSpec(), session) == "was killed by SIGKILL (out of memory?)"


def test_a_role_that_hangs_is_killed_whether_or_not_anybody_waits_for_its_end(tmp_path: Path) -> None:
    async def hang(role: RoleProcess) -> str:
        await asyncio.sleep(0.5)  # its first heartbeat has come
        os.kill(role.pid, signal.SIGSTOP)
        while role.running:
            await asyncio.sleep(0.05)
        return await role.last_words()

    assert played(tmp_path, StubbornSpec(beats=True), hang, hung=1.5) == "sent no heartbeat for 2 s and was killed"


def test_a_role_that_is_stopped_before_its_first_sign_of_life_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.processes.role._IMPORT_SECONDS", 1.0)

    async def main() -> str:
        role = RoleProcess("stubborn", "tests.processes.stubborn_role", tmp_path / "log.txt", hung=1.0)
        await role.start(StubbornSpec(beats=True), threads=1)
        os.kill(role.pid, signal.SIGSTOP)
        return await role.ended()

    assert asyncio.run(main()).startswith("sent no heartbeat for ")


def test_a_pause_of_the_conductor_is_not_held_against_a_role(tmp_path: Path) -> None:
    async def pause_of_all(role: RoleProcess) -> str:
        supervision = asyncio.create_task(role.ended())
        await asyncio.sleep(0.5)
        os.kill(role.pid, signal.SIGSTOP)
        time.sleep(2.5)  # nobody runs, as on a machine that was suspended
        await asyncio.sleep(0.1)  # the conductor is a little earlier again than the role
        os.kill(role.pid, signal.SIGCONT)
        await asyncio.sleep(1.0)
        assert role.running
        supervision.cancel()
        return "well"

    assert played(tmp_path, StubbornSpec(beats=True), pause_of_all, hung=2.0) == "well"


def test_whoever_stops_a_role_that_is_being_started_waits_until_it_can(tmp_path: Path) -> None:
    async def main() -> str:
        role = RoleProcess("stubborn", "tests.processes.stubborn_role", tmp_path / "log.txt")
        starting = asyncio.create_task(role.start(StubbornSpec(), threads=1))
        await asyncio.sleep(0)
        await role.stop(0.1)
        await starting
        assert not role.running
        return await role.ended()

    assert asyncio.run(main()).startswith("was killed by SIG")


def test_a_role_that_cannot_be_started_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")

    async def main() -> None:
        await RoleProcess("stubborn", "tests.processes.stubborn_role", tmp_path / "log.txt").start(StubbornSpec(), 1)

    with pytest.raises(RoleDied, match=r"stubborn cannot be started: /nowhere/python: No such file"):
        asyncio.run(main())


def test_a_role_that_was_never_started_can_be_stopped(tmp_path: Path) -> None:
    role = RoleProcess("never", "tests.processes.stubborn_role", tmp_path / "log.txt")
    asyncio.run(role.stop(1))
    assert not role.running


def test_a_role_gets_its_threads_before_torch_is_imported() -> None:
    assert environment(3)["OMP_NUM_THREADS"] == environment(3)["MKL_NUM_THREADS"] == "3"
    assert environment(1)["HF_HUB_OFFLINE"] == "1"
