"""Whole runs whose engines are on other machines: processes of their own that meet the run at its gate.

- Machines come, are killed and leave, and the run goes on: no law is broken, no completion fails, nothing is left over.
- A run that was killed and resumed at its address gets its machines back.
- `stretto scale` takes engines out of a run that goes on, and brings others in.
- Who joins with a wrong token, another run's folder or at a wrong address is told so in one sentence."""

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from stretto_report.reading.series import read_spans
from tests.certificates import authority
from tests.faults.test_company import end_well
from tests.launch.running import Command, Laboratory, said, steps_done, wait_for_step, wait_until

PREFIX = "stretto-agent-"
GIVEN = ("cluster.placer=given", "cluster.listen=127.0.0.1:0", "trainer.steps=100000", "trainer.keep_versions=1")


@contextmanager
def machine(
    laboratory: Laboratory,
    run_dir: Path,
    *more: str | Path,
    sees_the_folder: bool = True,
    poor: Sequence[str] = (),
    role: str = "engine",
) -> Iterator[Command]:
    """An agent that joins the run with an engine or a rank, by its folder or by address and token."""
    wait_until(lambda: bool(joining(run_dir)), "the gate")
    token = json.loads((run_dir / "join.json").read_text())["token"]
    where = (run_dir,) if sees_the_folder else (joining(run_dir), "--token", token)
    with laboratory.start(role, "--join", *where, "--patience", "60", *more, poor=poor) as agent:
        yield agent
        agent.kill_all()
        agent.assert_nothing_is_left()


def joining(run_dir: Path) -> str:
    """The address of a run's gate; empty while there is none."""
    try:
        return str(json.loads((run_dir / "join.json").read_text())["address"])
    except FileNotFoundError:
        return ""


def goes_on(command: Command, run_dir: Path, steps: int = 3) -> None:
    wait_for_step(command, steps_done(run_dir) + steps)


def weights_of(agent: Command) -> Path:
    """Where an agent mirrors the weights: it holds a file there open."""
    for pid in agent.processes():
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = Path(os.path.realpath(descriptor))
            if target.parent.name.startswith(PREFIX):
                return target.parent
    raise AssertionError("it mirrors nothing")


def test_machines_come_are_killed_and_leave_and_the_run_goes_on(laboratory: Laboratory, tmp_path: Path) -> None:
    """With TLS: the folder is that of the run's join.json for one machine, and a copy elsewhere for the other."""
    run_dir, ours = tmp_path / "run", authority(tmp_path / "ours")
    theirs = shutil.copytree(ours, tmp_path / "theirs")
    with laboratory.train(run_dir, *GIVEN, f"cluster.tls={ours}") as command:
        with machine(laboratory, run_dir) as first, machine(laboratory, run_dir, "--tls", theirs) as second:
            wait_until(lambda: said(run_dir).count("has joined, at version") == 2, "two engines", command)
            mirrors = [weights_of(first), weights_of(second)]
            wait_until(lambda: {"engine-0", "engine-1"} <= at_work(run_dir), "the work of both", command)
            goes_on(command, run_dir)
            first.process.send_signal(signal.SIGKILL)
            wait_until(lambda: "has left: " in said(run_dir), "the loss of one", command)
            goes_on(command, run_dir)
            (server,) = command.processes("stretto_cluster.weights.server")
            os.kill(server, signal.SIGKILL)
            with machine(laboratory, run_dir) as third:
                wait_until(lambda: said(run_dir).count("has joined, at version") == 3, "a third engine", command)
                wait_until(lambda: "engine-2" in at_work(run_dir), "the work of the third", command)
                ended, _ = second.stop(signal.SIGTERM)
                assert (ended.code, ended.err) == (0, "")
                assert "its agent was asked to end" in said(run_dir)
                goes_on(command, run_dir)
                stranger = ("engine", "--join", joining(run_dir), "--token", "f" * 64)
                laboratory.run(*stranger).refused("--join: ", "speaks TLS", "certificates by --tls")
                wrong = ("refused: the token is wrong", "give the token of the run's join.json")
                laboratory.run(*stranger, "--tls", theirs).refused("--join: ", *wrong)
                end_well(command, laboratory, run_dir)
                ended, _ = third.stop(signal.SIGTERM)
                assert (ended.code, ended.err) == (0, "")
        assert said(run_dir).count("a new one is started") == 1
        assert "the server of weights was killed by SIGKILL (out of memory?): a new one is started" in said(run_dir)
    assert not [folder for folder in mirrors if folder.exists()]
    assert_told(run_dir)


def at_work(run_dir: Path) -> set[str]:
    """The roles of which the timeline shows work, and not only what they have fetched."""
    return {span.role for span in read_spans(run_dir / "spans.jsonl") if span.name != "pull"}


def assert_told(run_dir: Path) -> None:
    """Logs of engines elsewhere have come, and spans of engines and of mirrors, in the time of the run's machine."""
    spans = read_spans(run_dir / "spans.jsonl")
    elsewhere = [span for span in spans if span.name == "pull" or span.role.startswith("engine-")]
    assert len({span.role for span in elsewhere if span.name == "pull"}) == 3
    assert {span.role for span in elsewhere if span.name != "pull"} == {"engine-0", "engine-1", "engine-2"}
    trained = [span for span in spans if span.role == "trainer"]
    assert all(span.end > trained[0].start - 100 and span.start < trained[-1].end + 100 for span in elsewhere)
    assert {path.stem for path in (run_dir / "logs").glob("engine-*")} == {"engine-0", "engine-1", "engine-2"}


@pytest.mark.long
def test_a_killed_run_that_goes_on_at_its_address_has_its_machines_back(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, *GIVEN) as command, machine(laboratory, run_dir, sees_the_folder=False) as agent:
        wait_for_step(command, 3)
        address = joining(run_dir)
        laboratory.run("scale", run_dir, "engines=9").refused(
            f"start them on machines: stretto engine --join {address}"
        )
        command.kill_all()
        command.process.wait(30)
        again = laboratory.start("train", "--resume", run_dir, f"cluster.listen={address}", run_dir=run_dir)
        with again as resumed:
            wait_until(
                lambda: "has joined, at version" in said(run_dir).rpartition("continues at version")[2], "it", resumed
            )
            goes_on(resumed, run_dir)
            assert agent.process.poll() is None
            refused = laboratory.run("train", "--resume", run_dir)
            assert refused.code == 2, refused.err  # a second conductor
            end_well(resumed, laboratory, run_dir)


def test_a_run_is_scaled_down_and_up_while_it_goes_on(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with laboratory.train(run_dir, "trainer.steps=100000", "trainer.keep_versions=1", "engine.count=2") as command:
        wait_for_step(command, 2)
        down = laboratory.run("scale", run_dir, "engines=1")
        assert (down.code, down.out) == (0, "1 engine; engine-1 left\n")
        goes_on(command, run_dir)
        laboratory.run("scale", run_dir, "engines=0").refused("a run needs one engine at least")
        up = laboratory.run("scale", run_dir, "engines=2")
        assert (up.code, up.out) == (0, "2 engines; engine-2 is starting\n")
        wait_until(lambda: "engine-2 has joined, at version" in said(run_dir), "the new engine", command)
        (engine,) = [pid for pid in command.processes("stretto.engine.role") if pid in command.processes('"engine-2"')]
        os.kill(engine, signal.SIGKILL)  # it is looked after as the others are
        wait_until(lambda: "engine-2 was killed by SIGKILL" in said(run_dir), "its replacement", command)
        goes_on(command, run_dir)
        end_well(command, laboratory, run_dir)
    laboratory.run("scale", run_dir, "engines=2").refused("is not going on")


def test_who_cannot_join_is_told_why(laboratory: Laboratory, tmp_path: Path) -> None:
    laboratory.run("engine", "--join", "nowhere").refused("give the run's address as host:port, or its folder")
    laboratory.run("engine", "--join", "127.0.0.1:1").refused("--token: is missing", "join.json")
    laboratory.run("engine", "--join", tmp_path).refused(str(tmp_path / "join.json"), "that is going on")
    unreached = laboratory.run("engine", "--join", "127.0.0.1:1", "--token", "t", "--patience", "0")
    unreached.failed("127.0.0.1:1 was not joined in 0 s", "does not answer")
