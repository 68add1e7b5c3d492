"""Whole runs whose only engine is behind a link that delays, loses, repeats and throttles packets, resets connections,
or is cut for a while: what does it cost, and what is lost?

    python -m benchmarks.links [--only "5 % lost"]      needs root and /dev/net/tun

The link is a process that carries IP packets (`tests.cluster.link`); gate, weights, requests and completions all go
over it. Each run is checked afterwards as in `benchmarks.cluster`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cluster import JOINED, Story, run_of
from benchmarks.report import save
from stretto_report.reading.inspection import inspect_run
from tests.cluster.link import Conditions, Counts, link
from tests.launch.running import Laboratory, said

_STEPS = 30


@dataclass(frozen=True)
class Trial:
    """Conditions of a link from the first step on, and for how many seconds it is then cut."""

    conditions: Conditions
    cut: float = 0.0
    lease: float = 15.0


@dataclass
class Crossed:
    """Result of one run: the link's packets, and the effect on the run. `pull`: median seconds to pull a version."""

    story: Story
    counts: Counts
    seconds: float = 0.0
    pull: float = 0.0
    bytes: int = 0
    joined: int = 0


#: Delays are of each way.
TRIALS: Mapping[str, Trial] = {
    "as it is": Trial(Conditions()),
    "50 ms ± 20 ms": Trial(Conditions(delay=0.05, jitter=0.02)),
    "1 % lost": Trial(Conditions(delay=0.005, loss=0.01)),
    "5 % lost": Trial(Conditions(delay=0.005, loss=0.05)),
    "5 % lost, 50 ms ± 20 ms": Trial(Conditions(delay=0.05, jitter=0.02, loss=0.05)),
    "1 Mbit/s": Trial(Conditions(rate=1e6)),
    "2 % come twice": Trial(Conditions(delay=0.005, repeats=0.02)),
    "1 of 300 resets its connection": Trial(Conditions(delay=0.005, resets=1 / 300)),
    "cut for 10 s, lease 15 s": Trial(Conditions(), cut=10.0),
    "cut for 20 s, lease 5 s": Trial(Conditions(), cut=20.0, lease=5.0),
}


def crossed(laboratory: Laboratory, name: str, seed: int = 1) -> Crossed:
    """Play the run of a trial."""
    trial = TRIALS[name]
    with link(seed) as ours:
        listen, lease = f"{ours.address}:0", f"cluster.lease={trial.lease:g}"
        with run_of(laboratory, f"link-{[*TRIALS].index(name)}", listen, lease) as machines:
            found = Crossed(machines.story, Counts())
            machines.join(ours.there)
            machines.goes_on(3)
            ours.become(msgspec.structs.replace(trial.conditions, cut=trial.cut > 0))
            time.sleep(trial.cut)
            ours.become(trial.conditions)
            machines.goes_on()
            began = time.monotonic()
            machines.goes_on(_STEPS)
            found.seconds = round((time.monotonic() - began) / _STEPS, 3)
            found.counts = ours.become(Conditions())
            found.joined = said(machines.run_dir).count(JOINED)
        weights = inspect_run(machines.run_dir).weights
        found.pull, found.bytes = round(weights.seconds_pull_median or 0.0, 3), weights.bytes or 0
    return found


def summary(campaign: Mapping[str, Any]) -> str:
    """Lines of docs/explanation/faults.md."""
    lines = [
        "| link | packets | lost | resets | joins | s per step | s to the first step | s to pull a version | problems |"
    ]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, run in campaign["runs"].items():
        carried = " | ".join(str(run["counts"][key]) for key in ("packets", "lost", "resets"))
        times = f"{run['seconds']:.2f} | {run['story']['pauses'][1]:.1f} | {run['pull']:.2f}"
        lines.append(f"| {name} | {carried} | {run['joined']} | {times} | {len(run['story']['problems'])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(TRIALS))
    words = parser.parse_args()
    runs = {}
    with tempfile.TemporaryDirectory(prefix="stretto-links-") as root:
        laboratory = Laboratory(Path(root), Path(root) / "cache", warm=True)
        for name in [words.only] if words.only else TRIALS:
            runs[name] = asdict(crossed(laboratory, name))
            print(name, runs[name], flush=True)
    load = f"{os.getloadavg()[0]:.1f} processes wanted to run on the {os.cpu_count()} cores in the last minute"
    campaign = {"load": load, "steps": _STEPS, "runs": runs}
    print(summary(campaign))
    if not words.only:
        save("links", campaign)


if __name__ == "__main__":
    main()
