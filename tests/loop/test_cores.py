"""What the time of the cores went into, as the clock of a run measures it on real processes."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stretto.core.machine import allowed_cores
from stretto.loop.records.totals import RunClock, run_seconds
from stretto.processes.tree import spent_seconds
from stretto.store.totals import ENDING, IDLE, OTHERS, REST, STARTING, Totals

SPINS, SLEEPS = "while True: pass", "import time; time.sleep(99)"
NONE = Totals(max_staleness=None)

pytestmark = pytest.mark.skipif(not run_seconds()[1], reason="this system does not tell what its cores did")


@contextmanager
def process(code: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as found:
        yield found.pid
        found.kill()


class Measured:
    """A clock in the training of a run whose roles have these processes (ids by role)."""

    def __init__(self, earlier: Totals = NONE, **roles: int) -> None:
        self.roles, self.since = roles, time.monotonic()
        self.clock = RunClock(earlier, self.since, run_seconds(), self._spent)
        self.clock.rl_begins()

    def _spent(self) -> dict[str, dict[int, float]]:
        return {role: {pid: spent_seconds(pid)} for role, pid in self.roles.items()}

    def until(self, role: str, seconds: float) -> dict[str, float]:
        """Let the run go on until a role has taken these seconds of the cores; what they did."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.05)
            self.clock.read_cores(0.0)
            self.clock.updated()
            if (cores := self.clock.cores)[role] >= seconds:
                return cores
        raise AssertionError(f"{role} has not taken {seconds:g} s of the cores in 60 s")


def test_a_role_that_spins_counts_and_one_that_sleeps_does_not_and_the_parts_are_the_whole() -> None:
    with process(SPINS) as spins, process(SLEEPS) as sleeps:
        measured = Measured(trainer=spins, rewards=sleeps)
        cores = measured.until("trainer", 0.4)
    wall = time.monotonic() - measured.since
    assert cores.keys() == {"trainer", "rewards", STARTING, ENDING, REST, OTHERS, IDLE}
    assert cores["rewards"] < 0.2 < cores["trainer"] <= wall + 0.05
    assert min(cores.values()) >= 0
    assert sum(cores.values()) == pytest.approx(allowed_cores() * wall, abs=0.3 + allowed_cores() * 0.1 * wall)


def test_processes_that_are_not_of_the_run_have_a_part_of_their_own() -> None:
    orphan = f"timeout 3 {sys.executable} -S -c '{SPINS}' &"  # its parent, the shell, ends at once
    subprocess.run(["sh", "-c", orphan], stdout=subprocess.DEVNULL, check=True)
    with process(SLEEPS) as sleeps:
        measured = Measured(rewards=sleeps)
        for _ in range(40):
            time.sleep(0.05)
            measured.clock.read_cores(0.0)
        cores = measured.clock.cores
    assert cores[OTHERS] > 0.3
    assert cores[REST] + cores["rewards"] < 0.3


def test_a_role_that_is_replaced_keeps_what_it_took_and_its_last_moments_are_the_runs() -> None:
    with process(SPINS) as first:
        measured = Measured(trainer=first)
        before = measured.until("trainer", 0.3)["trainer"]
        while spent_seconds(first) < before + 0.3:
            time.sleep(0.05)
    with process(SLEEPS) as measured.roles["trainer"]:
        after = measured.until("trainer", before)
    assert before <= after["trainer"] < before + 0.2
    assert after[REST] + after["trainer"] + after[ENDING] >= before + 0.25


def test_a_resumed_run_goes_on_from_what_it_took_before() -> None:
    earlier = Totals(max_staleness=None, cores={"trainer": 100.0, IDLE: 50.0})
    assert RunClock(earlier, time.monotonic()).cores == earlier.cores  # not measured from now on
    with process(SPINS) as spins:
        assert Measured(earlier, trainer=spins).until("trainer", 100.1)[IDLE] >= 50.0
