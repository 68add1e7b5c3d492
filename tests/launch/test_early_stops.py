"""Ctrl-C in the first seconds of a command: exit code 130, one line, and nothing is left behind, nothing half-done in
the cache either. A second signal ends a run at once.
"""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.running import (
    MODULES,
    TINY,
    Command,
    Laboratory,
    assert_the_law,
    logs,
    said,
    wait_for_step,
    wait_until,
)

STOPPED = "stretto: stopped by Ctrl-C\n"


def has_mapped(library: str) -> Callable[[Command], bool]:
    """Whether the command is importing the library, or has imported it."""
    return lambda command: library in Path(f"/proc/{command.process.pid}/maps").read_text()


MOMENTS: dict[str, Callable[[Command], bool]] = {
    "at its first line": lambda command: True,
    "when its fork server begins": lambda command: bool(command.processes(MODULES["fork server"])),
    "while it imports pydantic": has_mapped("_pydantic_core"),
    "while it imports torch": has_mapped("libtorch_cpu"),
}


#: A command that is started cold costs four seconds of a processor and more.
RARE = ("when its fork server begins", "while it imports pydantic")


@pytest.mark.parametrize(
    "moment", [pytest.param(moment, marks=pytest.mark.long if moment in RARE else ()) for moment in MOMENTS]
)
def test_ctrl_c_before_a_run_is_there_ends_with_one_line(laboratory: Laboratory, tmp_path: Path, moment: str) -> None:
    with laboratory.train(tmp_path / "run", cold=True) as command:
        wait_until(lambda: "\n" in command.process.said()[0], "its first line", command)
        wait_until(lambda: MOMENTS[moment](command), moment, command)
        ended = command.stopped(signal.SIGINT)
        assert (ended.err, ended.out.count("\n")) == (STOPPED, 1)
        assert ended.out.startswith("checking ")
    assert not (tmp_path / "run").exists()


REWARD = """
from pathlib import Path
import time
Path("imported").touch()
time.sleep(60)
def judge(prompt, completion, answer): return 1.0
"""


def test_ctrl_c_while_the_reward_is_tried_ends_its_worker(laboratory: Laboratory, tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text(REWARD)
    (laboratory.folder / "imported").unlink(missing_ok=True)
    settings = ("rewards.function=sleepy:judge", f"rewards.path={tmp_path}")
    with laboratory.train(tmp_path / "run", *settings) as command:
        wait_until((laboratory.folder / "imported").exists, "the import of the reward", command)
        assert command.stopped(signal.SIGINT).err == STOPPED


def test_ctrl_c_before_and_while_roles_start_leaves_a_run_to_resume(laboratory: Laboratory, tmp_path: Path) -> None:
    """The third start comes to steps, and is ended by two signals."""
    run_dir, endless = tmp_path / "run", "trainer.steps=100000"
    moments: list[Callable[[Command], object]] = [
        lambda command: wait_until((run_dir / "machine.json").exists, "the folder", command),
        lambda command: wait_until(lambda: bool(command.processes(MODULES["engine"])), "an engine", command),
        lambda command: wait_for_step(command, 1),
    ]
    for start, moment in enumerate(moments):
        with laboratory.train(run_dir, endless, *["--resume"] * (start > 0)) as command:
            moment(command)
            if start == 2:
                command.process.send_signal(signal.SIGTERM)  # of one kind they would be one: `processes.stopping.ONCE`
            command.stopped(signal.SIGINT)
    assert assert_the_law(run_dir).steps >= 1


def test_a_stop_during_the_warm_start_leaves_nothing_half_done(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir, long = tmp_path / "run", tmp_path / "long.toml"
    long.write_text(TINY.read_text() + "\n[warm_start]\nsteps = 100000\n")
    with laboratory.train(run_dir, recipe=long) as command:
        wait_until(lambda: "warm start" in said(run_dir), "the warm start", command)
        command.stopped(signal.SIGTERM)
    assert list((laboratory.cache / "warm-starts").glob("*")) == []
    assert list((run_dir / "policy").iterdir()) == []
    assert "Traceback" not in logs(run_dir)
