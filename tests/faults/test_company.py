"""Engines as bad company, in real runs: the run goes on, and no law is broken.

- One of two engines is a hundred times slower than the other: the other goes on, and the slow one is not given up.
- Engines are killed in turn, again and again: work goes on at the rate that is left.
- A completion that another engine goes on with, after a kill, names both; the roster tells of the kill.
- Replies of an engine are lost on their way: what they answered is asked for again, and counts once.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from stretto.store.ledger.reading import read_unfinished
from stretto_report.audit.check import check_run
from stretto_report.reading.export import read_trajectories
from stretto_report.reading.inspection import inspect_run
from tests.launch.running import Command, Laboratory, assert_the_law, said, steps_done, wait_for_step, wait_until

ENDLESS = ("trainer.steps=100000", "trainer.keep_versions=1", "trainer.checkpoint_every=50")
_BYTES = 1 << 16


def engine(command: Command, name: str) -> int | None:
    """Its process, if it has one at the moment."""
    found = [pid for pid in command.processes("stretto.engine.role") if pid in command.processes(f'"{name}"')]
    return found[0] if found else None


@contextmanager
def going_on(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Do it in a thread until the block ends."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def end_well(command: Command, laboratory: Laboratory, run_dir: Path) -> None:
    """Stopped by Ctrl-C it leaves a run that kept every law, and in which nothing failed."""
    command.stopped(signal.SIGINT)
    found = check_run(run_dir)
    assert found.kept, found
    assert found.balance["failed"] == 0
    assert_the_law(run_dir)


def slowing_down(pid: int, pause: float = 0.5) -> Callable[[threading.Event], None]:
    """Let a process run for 5 ms after each pause, as long as it lives."""

    def slow_down(over: threading.Event) -> None:
        with suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                over.wait(pause)
                os.kill(pid, signal.SIGCONT)
                over.wait(0.005)

    return slow_down


@pytest.mark.long
def test_a_run_goes_on_beside_an_engine_that_is_a_hundred_times_slower(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, *ENDLESS, "engine.count=2") as command:
        wait_for_step(command, 2)
        slow = engine(command, "engine-1")
        assert slow is not None
        with going_on(slowing_down(slow)):
            wait_for_step(command, steps_done(run_dir) + 8)
            assert engine(command, "engine-1") == slow
        assert "a new one is started" not in said(run_dir)
        end_well(command, laboratory, run_dir)


@pytest.mark.long
def test_a_run_goes_on_while_its_engines_come_and_go(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, *ENDLESS, "engine.count=2", "deadlines.engine_restarts=1000") as command:
        wait_for_step(command, 2)

        def kill_in_turn(over: threading.Event) -> None:
            """Each when the run has gone on since the last: no completion is so unlucky that it is given up."""
            turn, step = 0, 0
            while not over.wait(0.05):
                victim = engine(command, f"engine-{turn % 2}")
                if victim is not None and steps_done(run_dir) >= step:
                    turn, step = turn + 1, steps_done(run_dir) + 3
                    with suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)

        with going_on(kill_in_turn):
            done = steps_done(run_dir)
            wait_until(lambda: said(run_dir).count("a new one is started") >= 4, "four new engines", command)
            assert steps_done(run_dir) > done
            wait_for_step(command, done + 6)
        wait_until(lambda: engine(command, "engine-0") is not None, "an engine", command)
        end_well(command, laboratory, run_dir)


@pytest.mark.long
def test_a_completion_that_moves_after_a_kill_names_both_engines(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ledger = run_dir / "ledger.sqlite"
    with laboratory.train(run_dir, *ENDLESS, "engine.count=2", "rollout.beyond_bound=train") as command:
        wait_for_step(command, 2)
        slow = engine(command, "engine-0")
        assert slow is not None
        with going_on(slowing_down(slow, 0.1)):
            wait_until(lambda: "engine-0" in writers_in_flight(ledger), "tokens of engine-0 in the journal", command)
            os.kill(slow, signal.SIGKILL)
        wait_until(
            lambda: any(line.engines == ("engine-0", "engine-1") for line in read_trajectories(run_dir)),
            "a completion of both engines",
            command,
        )
        wait_until(lambda: inspect_run(run_dir).engines[0].left_step is None, "engine-0 to serve again", command)
        end_well(command, laboratory, run_dir)
    found = inspect_run(run_dir)
    killed, other = found.engines
    assert (killed.name, killed.joined_step, killed.left_step) == ("engine-0", 0, None)
    assert killed.reason.startswith("was killed by SIGKILL")
    assert (other.name, other.reason) == ("engine-1", "")
    assert killed.generated + other.generated == found.tokens.generated


def writers_in_flight(ledger: Path) -> set[str]:
    """The engines that wrote what is journaled of unfinished completions."""
    members = (member for group in read_unfinished(ledger) for member in group.members.values())
    pieces = (piece for member in members for piece in member.segments if piece.stop_reason is None)
    return {name for piece in pieces for name, _ in piece.engines}


class LosingProxy:
    """Stands where an engine's socket was, and hands on what is said. The reply to every fifth request for completions
    is lost, with its connection."""

    def __init__(self, address: Path) -> None:
        self.asked = self.lost = 0
        self._real = address.with_suffix(".real")
        address.rename(self._real)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(address))
        self._listening.listen(64)
        self._listening.settimeout(0.1)

    def serve(self, over: threading.Event) -> None:
        while not over.is_set():
            with suppress(TimeoutError):
                near, _ = self._listening.accept()
                threading.Thread(target=self._hand_on, args=(near,), daemon=True).start()
        self._listening.close()

    def _hand_on(self, near: socket.socket) -> None:
        far, doomed = socket.socket(socket.AF_UNIX), threading.Event()
        with near, far, suppress(OSError):
            far.connect(str(self._real))
            threading.Thread(target=self._ask, args=(near, far, doomed), daemon=True).start()
            while data := far.recv(_BYTES):
                if doomed.is_set():
                    self.lost += 1
                    near.shutdown(socket.SHUT_RDWR)
                    return
                near.sendall(data)

    def _ask(self, near: socket.socket, far: socket.socket, doomed: threading.Event) -> None:
        with suppress(OSError):
            while data := near.recv(_BYTES):
                if data.startswith(b"POST /generate "):
                    self.asked += 1
                    if self.asked % 5 == 0:
                        doomed.set()
                far.sendall(data)
            far.shutdown(socket.SHUT_WR)


def test_answers_with_lost_replies_are_asked_for_again_and_count_once(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, *ENDLESS, "rollout.max_in_flight=24", "engine.slots=96") as command:
        meeting = run_dir / ".sockets"
        wait_until(lambda: meeting.exists() and bool(list(sockets(meeting))), "the engine's socket", command)
        proxy = LosingProxy(next(sockets(meeting)))
        with going_on(proxy.serve):
            wait_until(lambda: proxy.lost >= 3, "lost replies", command)
            wait_for_step(command, steps_done(run_dir) + 3)
            ended, _ = command.stop(signal.SIGINT)
        assert ended.code == 130, ended.err
    found = check_run(run_dir)
    assert found.kept, found
    assert found.balance["failed"] == 0


def sockets(meeting: Path) -> Iterator[Path]:
    return Path(meeting.read_text().strip()).glob("engine-0.sock")
