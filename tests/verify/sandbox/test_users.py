"""Sandboxes of one grader beside each other.

Promises: every sandbox of root has a user of its own, given back when it is closed; so what one program takes of
processes is not taken from another one's; an ordinary user's sandboxes stay that user.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.sandbox import ProgramEnd, Sandbox, SandboxFailed, SandboxUser
from stretto_verify.sandbox.walls import Level, Walls
from tests.verify.sandbox.other_users import ORDINARY, as_user

ROOT = os.getuid() == 0
STARTS = """
import os, time
try:
    for _ in range({processes}):
        if not os.fork():
            time.sleep({seconds})
            os._exit(0)
    print("all")
except OSError:
    print("refused")
time.sleep({seconds})
"""


@pytest.mark.skipif(not ROOT, reason="only root may give its guests another user")
def test_every_sandbox_has_a_user_of_its_own_until_it_is_closed() -> None:
    users = [SandboxUser() for _ in range(8)]
    uids = [user.uid for user in users]
    assert len(set(uids)) == 8
    assert all(uid is not None and uid >= 60_000 for uid in uids)
    for user in users:
        user.close()
    again = SandboxUser()
    assert again.uid == uids[0]
    again.close()


def test_an_ordinary_user_stays_who_it_is() -> None:
    assert as_user(ORDINARY if ROOT else None, lambda: str(SandboxUser().uid)) == "None"


@pytest.mark.skipif(not ROOT, reason="an ordinary user's programs are counted in namespaces of their own")
def test_what_one_program_takes_of_processes_is_not_taken_from_another() -> None:
    config = SandboxConfig(processes=12, seconds=5.0, warm=False)
    walls = Walls(Level.B, bwrap=True)  # without namespaces of their own, programs are counted by user

    def ran(sandbox: Sandbox) -> ProgramEnd:
        return sandbox.run({"source": STARTS.format(processes=9, seconds=1.0)}, b"", 5.0)

    with Sandbox(walls, config) as one, Sandbox(walls, config) as other, ThreadPoolExecutor(2) as pool:
        try:
            one.start()
            other.start()
        except SandboxFailed as failure:
            pytest.skip(f"level B is not offered here: {failure}")
        assert [ended.output for ended in pool.map(ran, (one, other))] == [b"all\n", b"all\n"]
        assert one.run({"source": STARTS.format(processes=13, seconds=0.1)}, b"", 5.0).output == b"refused\n"
