"""Strong scaling of a simulated run from 512 to 4,096 devices, and a simulation with 100,000 completions in flight.

    python -m benchmarks.scale

Everything is computed, for the paper's run of 7B (`recipes/paper/math_7b.toml`) on the profile `h100`, with the same
batch at every size and a quarter of the devices for training. Completions of at most 32,768 tokens have a log-normal
tail (sigma 1.2, mean 9,700 tokens). The table has the rate and its limits: completions per engine, and the seconds of a
training step that the longest sequences of its minibatches take on one rank. CPU seconds are those of a simulation.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from benchmarks.paper_predictions import PROMPT, at, jobs
from benchmarks.report import Table, save
from stretto_foresight.planner.costs import Costs, Job, Layout
from stretto_foresight.planner.lengths import LogNormalLengths
from stretto_foresight.planner.machine import MachineProfile, machine_of

LONGEST, SIGMA, UNTRUNCATED = 32_768, 1.2, 12_190.0
DEVICES = (512, 1024, 2048, 4096)
STALENESS = 8
IN_FLIGHT = 2048  # groups of a batch in the large simulation


def heavy_tailed(job: Job) -> Job:
    lengths = LogNormalLengths(UNTRUNCATED, SIGMA, LONGEST, PROMPT)
    return replace(job, lengths=lengths, longest=LONGEST + PROMPT)


def strong(job: Job, machine: MachineProfile) -> list[dict[str, Any]]:
    """Simulate the same run on more and more devices."""
    rows: list[dict[str, Any]] = []
    first = 0.0
    table = Table(
        "devices", "tokens/s", "of linear", "step s", "completions an engine", "gen busy", "train busy", "alone s"
    )
    for devices in DEVICES:
        found = at(job, machine, devices, 1, STALENESS)
        layout = Layout(found.engines, found.ranks)
        alone = Costs(job, machine, replace(layout, ranks=1 << 20)).training(
            [LONGEST + PROMPT] * job.trainer.minibatches
        )
        each = found.tokens_per_second / devices
        first = first or each
        row: dict[str, Any] = {
            "devices": devices,
            "tokens_per_second": found.tokens_per_second,
            "step_seconds": found.step_seconds,
            "in_flight_per_engine": found.max_in_flight * job.rollout.group_size / found.engines,
            "busy": {"engines": found.busy["engine-0"], "trainer": found.busy["trainer"]},
            "longest_alone_seconds": sum(alone),
            "staleness": found.staleness.mean,
            "linear": each / first,
            "terms": dict(found.terms),
        }
        rows.append(row)
        cells = (f"{row['tokens_per_second']:,.0f}", f"{row['linear']:.2f}", f"{row['step_seconds']:.1f}")
        busy = (f"{found.busy['engine-0']:.0%}", f"{found.busy['trainer']:.0%}", f"{sum(alone):.1f}")
        table.add(devices, *cells, f"{row['in_flight_per_engine']:.0f}", *busy)
        table.show_last()
    return rows


def large(job: Job, machine: MachineProfile) -> dict[str, Any]:
    """Simulate as many completions in flight as 384 engines have slots."""
    asked = job.with_settings({"batch_size": IN_FLIGHT}, {}, {})
    began, processor = time.perf_counter(), time.process_time()
    found = at(asked, machine, DEVICES[0], 1, STALENESS)
    seconds = time.process_time() - processor
    in_flight = found.max_in_flight * job.rollout.group_size
    print(f"{in_flight:,} completions in flight, 9 steps of {asked.completions:,}: {seconds:.1f} s of one core")
    wall = time.perf_counter() - began
    return {"in_flight": in_flight, "completions": asked.completions, "cpu_seconds": seconds, "wall_seconds": wall}


def main() -> None:
    known, machine = jobs(), machine_of("h100")
    results = {
        "lengths": {"mean": heavy_tailed(known["math_7b"]).lengths.mean, "sigma": SIGMA, "longest": LONGEST},
        "strong": strong(heavy_tailed(known["math_7b"]), machine),
        "large": large(heavy_tailed(known["math_1.5b"]), machine),
    }
    save("scale", results)


if __name__ == "__main__":
    main()
