"""A whole run on three real nodes of Ray, which are killed one after the other: what is lost, and for how long?

    python -m benchmarks.ray_nodes --count 20 --seconds 900

Each node is a raylet with its own processes, on this machine (`tests.real_clusters.nodes`). The head has no room for
engines; each of the other two has room for one. A kill removes a node with its engine; then a new node is started, and
Ray places an agent there. The two nodes are killed in turns, `--count` times or for `--seconds`. At the end the run
must have broken no law (`stretto check`) and lost no completion, and its balance must add up.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.cluster import broken, wait_until
from benchmarks.report import Table, save
from tests.launch.running import TINY, Command, Laboratory, steps_done, wait_for_step
from tests.real_clusters.nodes import ENDLESS, Cluster, cluster, serving


@dataclass
class Campaign:
    """`pauses`: seconds from each kill to the next trained step; `absences`: seconds until two engines serve again."""

    kills: int = 0
    steps: int = 0
    seconds: float = 0.0
    pauses: list[float] = field(default_factory=list)
    absences: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def kill_nodes(command: Command, nodes: Cluster, run_dir: Path, campaign: Campaign, count: int, seconds: float) -> None:
    """Kill nodes of a running run, `count` times or for `seconds`."""
    began, present = time.monotonic(), ["node-0", "node-1"]
    while campaign.kills < count and time.monotonic() - began < seconds:
        campaign.kills += 1
        present.append(f"node-{1 + campaign.kills}")
        pause, absence = one_kill(command, nodes, run_dir, present.pop(0), present[-1])
        campaign.pauses.append(pause)
        campaign.absences.append(absence)
        print(f"kill {campaign.kills}: a step after {pause} s, two engines after {absence} s", flush=True)
    campaign.seconds = round(time.monotonic() - began, 1)


def one_kill(command: Command, nodes: Cluster, run_dir: Path, old: str, new: str) -> tuple[float, float]:
    """Kill one node and start another. Returns the seconds to the next step, and to two serving engines."""
    before, steps, blow = serving(run_dir), steps_done(run_dir), time.monotonic()

    def recovered() -> bool:
        now = serving(run_dir)
        return len(now) == 2 and now != before

    nodes.kill(old)
    wait_until(lambda: steps_done(run_dir) > steps, f"step {steps + 1}", command)
    pause = time.monotonic() - blow
    nodes.start(new, 1)
    wait_until(recovered, "two engines", command)
    return round(pause, 2), round(time.monotonic() - blow, 2)


def measured(laboratory: Laboratory, run_dir: Path, count: int, seconds: float) -> Campaign:
    """Do one run, and kill its nodes."""
    campaign = Campaign()
    with cluster(**{"head": 0, "node-0": 1, "node-1": 1}) as nodes:
        words = ("train", TINY, *ENDLESS, "engine.count=2", "--ray", nodes.address, "--run-dir", run_dir)
        with laboratory.start(*words, run_dir=run_dir, cold=True) as command:
            wait_for_step(command, 3)
            wait_until(lambda: len(serving(run_dir)) == 2, "two engines", command)
            try:
                kill_nodes(command, nodes, run_dir, campaign, count, seconds)
            except AssertionError as hang:
                campaign.problems.append(str(hang))
            ended, _ = command.stop(signal.SIGINT)
            if ended.code != 130:
                campaign.problems.append(f"exit code {ended.code}: {ended.err[-300:]}")
    campaign.steps = steps_done(run_dir)
    campaign.problems += broken(run_dir)
    return campaign


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="nodes to kill")
    parser.add_argument("--seconds", type=float, default=1800.0, help="no kill begins later")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stretto-ray-") as root:
        laboratory = Laboratory(Path(root), Path(root) / "cache")
        campaign = measured(laboratory, Path(root) / "run", words.count, words.seconds)
    table = Table("kills", "steps", "s to a step, median", "worst", "s to two engines, median", "worst", "problems")
    times = (campaign.pauses, campaign.absences)
    waits = [f"{value:.1f}" for each in times for value in (statistics.median(each), max(each))]
    table.add(campaign.kills, campaign.steps, *waits, len(campaign.problems))
    table.show()
    print(*campaign.problems, sep="\n")
    load = f"{os.getloadavg()[0]:.1f} processes wanted to run on the {os.cpu_count()} cores in the last minute"
    save("ray-nodes", {"load": load, "run": msgspec.to_builtins(campaign)})


if __name__ == "__main__":
    main()
