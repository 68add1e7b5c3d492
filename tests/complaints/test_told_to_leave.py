"""What users suffered: one machine that goes ends the run, and the notice of a spot machine is not heard (verl#7910,
AReaL#1101, NeMo-RL#3841, ray#63968).

Promise: told to end by SIGTERM, one machine after the other, and the conductor's between them, each ends within the
thirty seconds of such a notice; others go on behind the tokens that its completions have, also behind a resume; none
fails, and no prompt is asked again. A rank of the trainer begins anew on another machine."""

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.test_whole_runs import GIVEN, goes_on, joining, machine
from tests.launch.running import Command, Laboratory, assert_the_law, exported, said, wait_until

NOTICE = 30.0  # seconds


def told_to_end(one: Command, code: int = 0) -> None:
    """A spot machine's notice."""
    ended, seconds = one.stop(signal.SIGTERM)
    assert ended.code == code, ended.err
    assert seconds < NOTICE


@pytest.mark.long
def test_each_machine_in_turn_is_told_to_end_and_no_completion_is_lost(laboratory: Laboratory, tmp_path: Path) -> None:
    """One with a rank of the trainer, one with an engine, the conductor's, and behind its resume another engine's."""
    run_dir, ended = tmp_path / "run", "its agent was asked to end"
    settings = (*GIVEN, "trainer.ranks=2", "trainer.remote_ranks=1", "cluster.trusted_network=true")
    with ExitStack() as machines:
        command = machines.enter_context(laboratory.train(run_dir, *settings, "deadlines.start=200"))
        rank, _ = (machines.enter_context(machine(laboratory, run_dir, role="rank")) for _ in range(2))
        first, second = (machines.enter_context(machine(laboratory, run_dir)) for _ in range(2))
        wait_until(lambda: said(run_dir).count("has joined, at version") == 2, "two engines", command)
        for number, (told, what) in enumerate(
            [(rank, "with its rank(s) of the trainer"), (first, "has left")], start=1
        ):
            goes_on(command, run_dir)
            told_to_end(told)
            assert what in said(run_dir)
            assert said(run_dir).count(ended) == number
        goes_on(command, run_dir)
        address = joining(run_dir)
        told_to_end(command, 128 + signal.SIGTERM)
        again = ("train", "--resume", run_dir, f"cluster.listen={address}")
        resumed = machines.enter_context(laboratory.start(*again, run_dir=run_dir))
        goes_on(resumed, run_dir)
        told_to_end(second)
        assert said(run_dir).count(ended) == 3
        told_to_end(resumed, 128 + signal.SIGTERM)  # without an engine
    laboratory.run("check", run_dir).well()
    found = assert_the_law(run_dir).trajectories
    assert found.failed == found.expired == 0
    trajectories = exported(laboratory, run_dir)
    assert all(one["group"].endswith(".0") for one in trajectories), "no prompt was asked again"
    assert {engine for one in trajectories for engine in one["engines"]} == {"engine-0", "engine-1"}
