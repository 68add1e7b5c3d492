"""Promises of whole runs whose engine is a real server, as in `tests/real_engines/test_runs.py`, in cases that other
tests have without one: the bound holds under the other policies of staleness (`tests/launch`); each
process of a server, and the one between it and the conductor, is killed, and nothing is lost or left
(`tests/servers/test_processes.py`); a hundred honest updates are proven; a server that was started to report
log-probabilities without temperature and filters is known from one that follows them."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from stretto_servers.make import reports_raw
from tests.launch.running import Command, Laboratory, exported, said, wait_until
from tests.real_engines.serving import MODEL, Installed, RealServer
from tests.real_engines.test_canary import proven
from tests.real_engines.test_runs import SETTINGS, STEPS, assert_all_is_well, bounded, wait_until_step

#: The main process of a server, in words of its command line.
MAIN = {"vllm": "vllm.entrypoints", "sglang": "sglang.launch_server"}
TRACKER = "resource_tracker"
ADAPTER, GUARD = "stretto_servers.role", "stretto_servers.guard"


@pytest.mark.parametrize("beyond_bound", ["train", "wait", "mask"])
def test_the_bound_holds(server: RealServer, laboratory: Laboratory, tmp_path: Path, beyond_bound: str) -> None:
    bounded(server, laboratory, tmp_path / "run", beyond_bound)


@pytest.mark.timeout(900)
def test_killed_servers_cost_and_leave_nothing(installed: Installed, laboratory: Laboratory, tmp_path: Path) -> None:
    disturbed(installed, laboratory, tmp_path / "run", ["main", "worker", "adapter"])


async def test_a_hundred_honest_updates_are_proven(either_server: RealServer) -> None:
    await proven(either_server, 100)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_server_whose_logprobs_ignore_temperature_and_filters_is_known(
    installed: Installed, policy: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for raw in (False, True):
        mode = "raw_logprobs" if raw else "processed_logprobs"
        monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "true" if raw else "false")
        arguments = ("--logprobs-mode", mode) if installed.kind == "vllm" else ()
        with contextlib.closing(RealServer(installed, policy, dtype=dtype, arguments=arguments)) as server:
            server.until_up()
            asked = reports_raw(wire := server.wire(), len(MODEL.vocabulary), MODEL.context_length)
            assert server.run(asked) == raw
            server.run(wire.close())


def disturbed(installed: Installed, laboratory: Laboratory, run_dir: Path, kills: list[str]) -> None:
    """A run whose engine's processes are killed one after the other, each while completions are in flight."""
    steps = STEPS * (len(kills) + 1)
    engine = (f"engine.kind={installed.kind}", f"engine.python={installed.python}")
    main = MAIN[installed.kind]
    sessions: set[int] = set()
    settings = (*SETTINGS, *engine, f"trainer.steps={steps}", "trainer.checkpoint_every=10", "deadlines.batch=300")
    with laboratory.train(run_dir, *settings) as command:
        for number, kill in enumerate(kills):
            wait_until_step(command, run_dir, (number + 1) * STEPS - STEPS // 2)
            sessions |= (session := sessions_of_servers(command))
            of_server = [pid for pid in of_sessions(session) if TRACKER not in command_line(pid)]
            victims = {
                "main": [pid for pid in of_server if main in command_line(pid)],
                "worker": sorted(pid for pid in of_server if main not in command_line(pid))[
                    :1
                ],  # the first one started
                "adapter": command.processes(ADAPTER),
            }[kill]
            assert victims, f"{kill}: none of {[command_line(pid) for pid in of_server]}"
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            wait_for_engines(command, run_dir, number + 1)
        command.end(300).well()
        command.assert_nothing_is_left()
    assert of_sessions(sessions) == []
    assert_all_is_well(run_dir, steps)
    trajectories = exported(laboratory, run_dir)
    assert all(trajectory["group"].endswith(".0") for trajectory in trajectories), "no prompt was asked twice"
    assert said(run_dir).count("a new one is started") == len(kills)


def sessions_of_servers(command: Command) -> set[int]:
    """A guard starts its server in a session of its own."""
    found = set()
    for guard in command.processes(GUARD):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            children = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
            found |= {os.getsid(int(child)) for child in children}
    return found


def of_sessions(sessions: set[int]) -> list[int]:
    """Living processes of these sessions. Workers of a server overwrite the environment that marks other processes."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError):
            if folder.name.isdecimal() and os.getsid(int(folder.name)) in sessions:
                found.append(int(folder.name))
    return found


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def wait_for_engines(command: Command, run_dir: Path, count: int) -> None:
    wait_until(lambda: said(run_dir).count("a new one is started") >= count, f"{count} new engines", command)
