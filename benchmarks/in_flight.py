"""Groups in flight: too few, too many, and the number that follows from the engines' pressure.

    python -m benchmarks.in_flight

A simulation on a virtual clock: the paper's run of 7B (`recipes/paper/math_7b.toml`) on twelve devices as `h100`
has them, six engines and six ranks, batches of 64 groups of 16, eta 8. With 256 slots the KV cache of an engine is full
first, with 64 its slots are. Numbers are those of 30 steps after the first 15, in the mean of two seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.paper_predictions import jobs
from benchmarks.report import Table, save
from stretto_foresight.planner.costs import Costs, Job, Layout
from stretto_foresight.planner.machine import MachineProfile, machine_of
from stretto_foresight.planner.predict import Grained
from stretto_foresight.simulator.engines import EngineLimits
from stretto_foresight.simulator.run import SimulatedRun

SETTINGS = {"the cache is full first": 256, "the slots are full first": 64}
NUMBERS: tuple[int | str, ...] = (8, 32, 96, 512, "auto")
LAYOUT = Layout(engines=6, ranks=6)
STALENESS, BATCH, GROUP = 8, 64, 16
STEPS, WARM, SEEDS, GRAINS = 45, 15, (1, 2), 16


def run(base: Job, machine: MachineProfile, slots: int, number: int | str, seed: int) -> dict[str, Any]:
    """One simulated run."""
    rollout = {"batch_size": BATCH, "group_size": GROUP, "max_staleness": STALENESS, "max_in_flight": number}
    engines, ranks = {"count": LAYOUT.engines, "slots": slots}, {"ranks": LAYOUT.ranks}
    job = base.with_settings(rollout | {"max_in_flight_max": 1024}, engines, ranks)
    costs, grain = Costs(job, machine, LAYOUT), round(job.lengths.mean / GRAINS)
    limits = EngineLimits(count=LAYOUT.engines, slots=slots, cache_tokens=costs.cache_tokens(), grain=grain)
    simulated = SimulatedRun(
        job.rollout, Grained(job.lengths, grain), STEPS, seed, durations=costs, limits=limits, warm=WARM
    )
    report = simulated.run()
    return {
        "step_seconds": report.seconds / report.steps,
        "preempted": report.preempted / report.completions.total(),
        "recomputed": report.recomputed / report.sampled,
        "staleness": report.mean_staleness,
        "in_force": report.max_in_flight,
        "changes": [[change.step, change.after] for change in simulated.accounts.changes],
    }


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Table of docs/explanation/staleness.md."""
    lines = [
        "| limit | `max_in_flight` | seconds of a step | preemptions of a completion | recomputed of a sampled token | "
        "mean staleness |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        number = row["max_in_flight"]
        shown = f'`"auto"`, {" and ".join(str(one["in_force"]) for one in row["runs"])} at the end'
        cells = (f"{row['step_seconds']:.0f}", *(f"{row[key]:.2f}" for key in ("preempted", "recomputed", "staleness")))
        lines.append(f"| {row['limit']} | {shown if number == 'auto' else number} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    job, machine = jobs()["math_7b"], machine_of("h100")
    rows: list[dict[str, Any]] = []
    table = Table("limit", "max_in_flight", "step s", "preempted", "recomputed", "staleness", "in force", "changes")
    for name, slots in SETTINGS.items():
        for number in NUMBERS:
            runs = [run(job, machine, slots, number, seed) for seed in SEEDS]
            means = {
                key: fmean(one[key] for one in runs) for key in ("step_seconds", "preempted", "recomputed", "staleness")
            }
            rows.append({"limit": name, "slots": slots, "max_in_flight": number, **means, "runs": runs})
            cells = (f"{means['step_seconds']:.0f}", f"{means['preempted']:.2f}", f"{means['recomputed']:.2f}")
            last = [one["in_force"] for one in runs], fmean(len(one["changes"]) for one in runs)
            table.add(name, number, *cells, f"{means['staleness']:.2f}", f"{last[0]}", f"{last[1]:.0f}")
            table.show_last()
    save("in-flight", {"steps": STEPS - WARM, "seeds": list(SEEDS), "rows": rows})


if __name__ == "__main__":
    main()
