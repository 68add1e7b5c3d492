"""Whole runs whose engines are on other machines, while machines are killed, join, leave and are cut off: what is
lost?

    python -m benchmarks.cluster kills --count 20     agents killed in runs of 1 to 4 machines; others join and leave
    python -m benchmarks.cluster partitions           links that break and heal, or do not; slow links

A machine is an agent in a process of its own; for partitions, in a network namespace behind a bridge, which needs root
and `ip`. After each run, checks that no law is broken (`stretto check`), no completion has failed, the balance of
`stretto inspect` adds up, and no process, file or shared memory is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, Table, save
from stretto_report.audit.check import check_run
from stretto_report.reading.inspection import inspect_run
from tests.launch import running
from tests.launch.running import Command, Laboratory, said, steps_done

_BRIDGE, _NETWORK = "stbr0", "10.97.31"
_PATIENCE = 2  # times that of a test
JOINED = "has joined, at version"
_GIVEN = ("cluster.placer=given", "trainer.steps=1000000", "trainer.keep_versions=1", "trainer.checkpoint_every=20")


def wait_until(condition: Callable[[], bool], awaited: str, command: Command) -> None:
    """Wait as in the tests, but longer, because the machine may have other work."""
    for _ in range(_PATIENCE):
        with contextlib.suppress(AssertionError):
            if command.process.poll() is None:
                return running.wait_until(condition, awaited, command)
    return running.wait_until(condition, awaited, command)


@dataclass
class Story:
    """Result of one run. `pauses`: seconds from each fault to the next trained step."""

    name: str
    kills: int = 0
    drains: int = 0
    joins: int = 0
    rejoined: int = 0
    steps: int = 0
    pauses: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class Machines:
    """The machines of a run."""

    laboratory: Laboratory
    run_dir: Path
    command: Command
    story: Story
    stack: ExitStack
    agents: list[Command] = field(default_factory=list)

    def join(self, before: tuple[str, ...] = ()) -> Command:
        """Start another machine; returns when its engine serves."""
        known = said(self.run_dir).count(JOINED)
        agent = self.start(before)
        wait_until(lambda: said(self.run_dir).count(JOINED) > known, "an engine to join", self.command)
        return agent

    def start(self, before: tuple[str, ...] = ()) -> Command:
        joining = json.loads((self.run_dir / "join.json").read_text())
        words = ("engine", "--join", joining["address"], "--token", joining["token"], "--patience", "120")
        agent = self.stack.enter_context(self.laboratory.start(*words, before=before, cold=bool(before)))
        self.agents.append(agent)
        self.story.joins += 1
        return agent

    def kill(self, agent: Command) -> None:
        """Kill an agent by SIGKILL, as when a spot machine is taken away."""
        self.agents.remove(agent)
        agent.process.send_signal(signal.SIGKILL)
        self.story.kills += 1
        self.goes_on()

    def drain(self, agent: Command) -> None:
        """Stop an agent by SIGTERM, so that its engine's completions continue elsewhere."""
        self.agents.remove(agent)
        ended, _ = agent.stop(signal.SIGTERM)
        if ended.code != 0:
            self.story.problems.append(f"a drained agent ended with exit code {ended.code}: {ended.err[-200:]}")
        self.story.drains += 1
        self.goes_on()

    def goes_on(self, steps: int = 1) -> None:
        began, wanted = time.monotonic(), steps_done(self.run_dir) + steps
        wait_until(lambda: steps_done(self.run_dir) >= wanted, f"step {wanted}", self.command)
        self.story.pauses.append(round(time.monotonic() - began, 2))


@contextmanager
def run_of(laboratory: Laboratory, name: str, listen: str, *more: str) -> Iterator[Machines]:
    """Start a run without machines. At the end of the block it is stopped and checked."""
    run_dir, story = laboratory.folder / name, Story(name)
    with laboratory.train(run_dir, *_GIVEN, f"cluster.listen={listen}", *more) as command, ExitStack() as stack:
        machines = Machines(laboratory, run_dir, command, story, stack)
        wait_until((run_dir / "join.json").exists, "the gate", command)
        try:
            yield machines
        except AssertionError as hang:
            story.problems.append(str(hang))
            print(said(run_dir)[-3000:], *(agent.processes() for agent in machines.agents), flush=True)
        ended, seconds = command.stop(signal.SIGINT)
        story.steps = steps_done(run_dir)
        if ended.code != 130 or seconds > 30:
            story.problems.append(f"exit code {ended.code} after {seconds:.0f} s: {ended.err[-300:]}")
        for agent in machines.agents:
            ended, _ = agent.stop(signal.SIGTERM)
            if ended.code != 0:
                story.problems.append(f"an agent ended with exit code {ended.code}: {ended.err[-200:]}")
        story.problems += _left_over([command, *machines.agents]) + broken(run_dir)


def _left_over(commands: list[Command]) -> list[str]:
    problems = []
    for command in commands:
        try:
            command.assert_nothing_is_left()
        except AssertionError as left:
            problems.append(f"left over: {left}")
    return problems


def broken(run_dir: Path) -> list[str]:
    """Sentences about everything that the records of a run show to be wrong."""
    checked, counts = check_run(run_dir), inspect_run(run_dir).trajectories
    states = (counts.trained, counts.buffered, counts.in_flight, counts.filtered, counts.expired, counts.failed)
    problems = [] if checked.kept else [str(checked)]
    if counts.issued != sum(states):
        problems.append(f"{counts.issued} issued, and {sum(states)} accounted for")
    if counts.failed:
        problems.append(f"{counts.failed} completions failed")
    return problems


def kills(laboratory: Laboratory, count: int, seed: int) -> list[Story]:
    """Runs that go from 1 to 4 to 2 machines, with five kills in each; joins and drains at random moments in
    between."""
    stories = []
    for number in range((count + 4) // 5):
        chance = random.Random(f"{seed}/{number}")
        with run_of(laboratory, f"kills-{number}", "127.0.0.1:0", "cluster.lease=6") as machines:
            machines.join()
            for _ in range(3):
                machines.start()
            wait_until(lambda: said(machines.run_dir).count(JOINED) >= 4, "four engines", machines.command)
            for blow in range(min(5, count - 5 * number)):
                time.sleep(chance.random())
                machines.kill(chance.choice(machines.agents))
                if len(machines.agents) < 3 - (blow >= 3):
                    machines.join()
            if len(machines.agents) > 1:
                machines.drain(chance.choice(machines.agents))
            machines.goes_on(5)
        stories.append(_shown(machines.story))
    return stories


# ── partitions ──────────────────────────────────────────────────────────────────────────────────────


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def network() -> Iterator[None]:
    """Create a network bridge with an address of this machine, for the block."""
    ip("link", "add", _BRIDGE, "type", "bridge")
    try:
        ip("address", "add", f"{_NETWORK}.1/24", "dev", _BRIDGE)
        ip("link", "set", _BRIDGE, "up")
        yield
    finally:
        ip("link", "delete", _BRIDGE)


@dataclass(frozen=True)
class Host:
    """A network namespace with a link to the bridge."""

    number: int

    @property
    def name(self) -> str:
        return f"stnode{self.number}"

    @property
    def inside(self) -> tuple[str, ...]:
        """Prefix of a command that runs in the namespace."""
        return ("ip", "netns", "exec", self.name)

    @contextmanager
    def up(self) -> Iterator[Host]:
        ip("netns", "add", self.name)
        try:
            ip("link", "add", f"stv{self.number}", "type", "veth", "peer", "name", "eth0", "netns", self.name)
            ip("link", "set", f"stv{self.number}", "master", _BRIDGE, "up")
            ip("-n", self.name, "address", "add", f"{_NETWORK}.{self.number + 10}/24", "dev", "eth0")
            ip("-n", self.name, "link", "set", "eth0", "up")
            ip("-n", self.name, "link", "set", "lo", "up")
            yield self
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("link", "delete", f"stv{self.number}")  # a namespace outlives its name while a process is in it
            ip("netns", "delete", self.name)

    def cut(self) -> None:
        """Drop every packet; connections are not closed."""
        ip("link", "set", f"stv{self.number}", "nomaster")

    def heal(self) -> None:
        ip("link", "set", f"stv{self.number}", "master", _BRIDGE)

    def slow(self, rate: str) -> None:
        """Limit the rate in both directions, with a queue of at most half a second."""
        shaper = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "500ms")
        subprocess.run(["tc", "qdisc", "add", "dev", f"stv{self.number}", *shaper], check=True)
        inside = ["tc", "-n", self.name, "qdisc", "add", "dev", "eth0", *shaper]
        subprocess.run(inside, check=True)


@contextmanager
def two_hosts(laboratory: Laboratory, name: str, lease: float, *more: str) -> Iterator[tuple[Machines, Host]]:
    """A run with a machine on each of two hosts. The second host is the one to cut off."""
    with Host(1).up() as steady, Host(2).up() as shaky:
        listen = f"{_NETWORK}.1:0"
        with run_of(laboratory, name, listen, f"cluster.lease={lease:g}", *more) as machines:
            machines.join(steady.inside)
            machines.join(shaky.inside)
            machines.goes_on(3)
            yield machines, shaky


def heals_within_the_lease(laboratory: Laboratory) -> Story:
    with two_hosts(laboratory, "heals after 10 s, lease 15 s", 15) as (machines, shaky):
        before = said(machines.run_dir)
        shaky.cut()
        time.sleep(10)
        shaky.heal()
        machines.goes_on(10)
        time.sleep(6)  # a lost machine would be noticed
        if "has left" in said(machines.run_dir)[len(before) :]:
            machines.story.problems.append("a machine was given up within its lease")
    return machines.story


def heals_after_the_lease(laboratory: Laboratory) -> Story:
    with two_hosts(laboratory, "heals after 20 s, lease 5 s", 5) as (machines, shaky):
        joined = said(machines.run_dir).count(JOINED)
        shaky.cut()
        machines.goes_on(3)
        wait_until(lambda: "sent no heartbeat for 5 s" in said(machines.run_dir), "the loss", machines.command)
        time.sleep(15)
        machines.goes_on()
        shaky.heal()
        wait_until(lambda: said(machines.run_dir).count(JOINED) > joined, "its return", machines.command)
        machines.story.rejoined += 1
        machines.goes_on(3)
    return machines.story


def never_heals(laboratory: Laboratory) -> Story:
    with two_hosts(laboratory, "never heals, lease 5 s", 5) as (machines, shaky):
        shaky.cut()
        machines.goes_on(3)
        wait_until(lambda: "sent no heartbeat for 5 s" in said(machines.run_dir), "the loss", machines.command)
        machines.goes_on(3)
        lost = machines.agents.pop()
        lost.kill_all()
    return machines.story


def slow_road(laboratory: Laboratory) -> Story:
    """A run in which a version takes longer to pull than the next one to train."""
    with two_hosts(laboratory, "256 kbit/s, cluster.lag 5 s", 15, "cluster.lag=5") as (machines, shaky):
        shaky.slow("256kbit")
        wait_until(lambda: "no groups until it has caught up" in said(machines.run_dir), "a lag", machines.command)
        machines.goes_on(20)
    return machines.story


PARTITIONS: dict[str, Callable[[Laboratory], Story]] = {
    "within": heals_within_the_lease,
    "after": heals_after_the_lease,
    "never": never_heals,
    "slow": slow_road,
}


def summary(campaign: Mapping[str, Any]) -> str:
    """Lines of docs/explanation/faults.md for a campaign of `kills` or `partitions`."""
    lines = ["| run | joins | kills | drains | steps | s to the next step, median | longest | problems |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for run in campaign["runs"]:
        median, longest = statistics.median(run["pauses"]), max(run["pauses"])
        counts = " | ".join(str(run[key]) for key in ("joins", "kills", "drains", "steps"))
        lines.append(f"| {run['name']} | {counts} | {median:.1f} | {longest:.1f} | {len(run['problems'])} |")
    return "\n".join(lines)


def _shown(story: Story) -> Story:
    print(story, flush=True)
    return story


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", choices=["kills", "partitions"])
    parser.add_argument("--count", type=int, default=20, help="agents to kill")
    parser.add_argument("--only", choices=list(PARTITIONS), help="one of the partitions")
    parser.add_argument("--seed", type=int, default=1)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stretto-cluster-") as root:
        laboratory = Laboratory(Path(root), Path(root) / "cache", warm=True)
        if words.campaign == "kills":
            stories = kills(laboratory, words.count, words.seed)
        else:
            chosen = [words.only] if words.only else list(PARTITIONS)
            with network():
                stories = [_shown(PARTITIONS[name](laboratory)) for name in chosen]
    table = Table("run", "joins", "kills", "drains", "steps", "s to the next step, median", "worst", "problems")
    for story in stories:
        median, worst = f"{statistics.median(story.pauses):.1f}", f"{max(story.pauses):.1f}"
        found = len(story.problems)
        table.add(story.name, story.joins, story.kills, story.drains, story.steps, median, worst, found)
    table.show()
    load = f"{os.getloadavg()[0]:.1f} processes wanted to run on the {os.cpu_count()} cores in the last minute"
    earlier: dict[str, object] = {}
    with contextlib.suppress(FileNotFoundError):
        earlier = json.loads((RESULTS / "cluster.json").read_text())["results"]
    save("cluster", earlier | {words.campaign: {"load": load, "runs": [asdict(story) for story in stories]}})


if __name__ == "__main__":
    main()
