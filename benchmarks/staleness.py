"""Cost of a bound on staleness, on a virtual clock: real admission, buffer and batches, invented durations.

    python -m benchmarks.staleness            every setting, five seeds: several minutes
    python -m benchmarks.staleness --steps 50 --seeds 1

One unit of time is one training step. Answers have log-normal lengths; the median answer takes one unit, and a larger
sigma means a heavier tail. 5 % of the groups fail. A batch is 16 groups. Nothing here depends on the speed of the
machine.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean
from typing import Any

import msgspec

from benchmarks.report import Table, save
from stretto.rollout.config import BeyondBound, RolloutConfig
from stretto_foresight.simulator.accounts import SimulationReport
from stretto_foresight.simulator.run import SimulatedRun, Workload

BATCH = 16
IN_FLIGHT = {1: 64, 8: 128}  # groups, by group size: enough that generation alone never limits the trainer
SIGMAS = (0.8, 1.2)
BOUNDS = (0, 1, 2, 4, 8)
POLICIES: tuple[BeyondBound, ...] = ("train", "wait", "mask", "expire")


@dataclass(frozen=True)
class Setting:
    """Settings of one line of the table."""

    group_size: int
    sigma: float
    beyond_bound: BeyondBound
    max_staleness: float

    @property
    def config(self) -> RolloutConfig:
        return RolloutConfig(
            batch_size=BATCH,
            group_size=self.group_size,
            max_in_flight=IN_FLIGHT[self.group_size],
            max_staleness=self.max_staleness,
            beyond_bound=self.beyond_bound,
        )

    @property
    def workload(self) -> Workload:
        return Workload(
            median_tokens=16, sigma=self.sigma, max_tokens=1024, seconds_per_token=1 / 16, failure_rate=0.05
        )


@dataclass(frozen=True)
class Outcome:
    """Results of one setting. Shares are between 0 and 1; "by quartile" goes from short answers to long ones.

    The quartiles are those of the workload's lengths, so they are the same for all policies.
    """

    step_time: float  # units of time; 1.0 is a trainer that never waits
    waiting: float  # share of the time
    mean_staleness: float  # versions, over the tokens that were learned from
    worst_staleness: float  # largest of all seeds
    masked: float  # share of the trained answers' tokens
    masked_by_quartile: tuple[float, ...]
    touched: float  # share of the trained answers
    expired: float  # share of the answers that ended trained or expired
    expired_by_quartile: tuple[float, ...]
    dropped: float  # share of the tokens sampled for those answers


def settings() -> list[Setting]:
    """Every combination. Without a bound nothing ever exceeds it, so the four policies are the same and count once."""
    bounded = [(policy, float(eta)) for policy in POLICIES for eta in BOUNDS]
    unbounded: tuple[BeyondBound, float] = ("train", math.inf)
    return [
        Setting(group_size, sigma, policy, eta)
        for group_size in IN_FLIGHT
        for sigma in SIGMAS
        for policy, eta in [*bounded[: len(BOUNDS)], unbounded, *bounded[len(BOUNDS) :]]
    ]


def measure(setting: Setting, steps: int, seed: int) -> Outcome:
    """Do one simulated run."""
    report = SimulatedRun(setting.config, setting.workload, steps=steps, seed=seed).run()
    return outcome(report, cuts(setting.workload))


def outcome(report: SimulationReport, cuts: Sequence[float]) -> Outcome:
    """Results of one run."""
    tokens = Counter({length: length * count for length, count in report.completions.items()})
    ended = report.completions + report.expired
    return Outcome(
        step_time=report.seconds / report.steps,
        waiting=report.waiting / report.seconds,
        mean_staleness=report.mean_staleness,
        worst_staleness=report.worst_staleness,
        masked=report.masked_share,
        masked_by_quartile=by_quartile(report.masked, tokens, cuts),
        touched=report.touched / report.completions.total(),
        expired=report.expired_share,
        expired_by_quartile=by_quartile(report.expired, ended, cuts),
        dropped=report.dropped_share,
    )


def cuts(workload: Workload) -> tuple[float, float, float]:
    """Lengths below which a quarter, a half and three quarters of the answers lie."""
    normal = NormalDist(math.log(workload.median_tokens), workload.sigma)
    first, second, third = (math.exp(normal.inv_cdf(share)) for share in (0.25, 0.5, 0.75))
    return first, second, third


def by_quartile(part: Counter[int], whole: Counter[int], cuts: Sequence[float]) -> tuple[float, ...]:
    """Share of `part` in `whole` for each quartile of length; both are counts by length.

    >>> by_quartile(Counter({3: 1, 40: 30}), Counter({3: 10, 40: 40}), cuts=(5, 10, 20))
    (0.1, 0.0, 0.0, 0.75)
    """
    parts, wholes = ([0] * (len(cuts) + 1) for _ in range(2))
    for sums, counts in ((parts, part), (wholes, whole)):
        for length, count in counts.items():
            sums[sum(length > cut for cut in cuts)] += count
    return tuple(a / b if b else 0.0 for a, b in zip(parts, wholes, strict=True))


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Mean over seeds; for the worst staleness, the maximum."""
    columns = {name: [getattr(one, name) for one in outcomes] for name in Outcome.__dataclass_fields__}
    worst = max(columns.pop("worst_staleness"))
    means = {
        name: tuple(map(_mean, zip(*values, strict=True))) if isinstance(values[0], tuple) else _mean(values)
        for name, values in columns.items()
    }
    return msgspec.convert(means | {"worst_staleness": worst}, Outcome)


def _mean(values: Sequence[float]) -> float:
    return round(fmean(values), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run")
    parser.add_argument("--seeds", type=int, default=5)
    words = parser.parse_args()
    lines = settings()
    jobs = [(setting, words.steps, seed) for setting in lines for seed in range(words.seeds)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        runs = list(pool.map(measure, *zip(*jobs, strict=True), chunksize=words.seeds))
    outcomes = [merged(runs[at : at + words.seeds]) for at in range(0, len(runs), words.seeds)]
    show(lines, outcomes)
    rows: list[dict[str, Any]] = [
        asdict(setting) | {"max_staleness": _json(setting.max_staleness)} | asdict(one)
        for setting, one in zip(lines, outcomes, strict=True)
    ]
    print(f"\nfor docs/explanation/staleness.md:\n\n{summary(rows, 1, 1.2)}\n\n{summary(rows, 8, 1.2)}\n")
    save("staleness", {"steps": words.steps, "seeds": words.seeds, "batch_size": BATCH, "rows": rows})


def summary(rows: Sequence[dict[str, Any]], group_size: int, sigma: float) -> str:
    """Table of docs/explanation/staleness.md for one group size and tail, as Markdown; `rows` come from the JSON
    file."""
    found = {(row["beyond_bound"], row["max_staleness"]): row for row in rows if _is_of(row, group_size, sigma)}
    lines = [
        "| η | train, mask: step time | train: worst staleness | mask: tokens masked "
        "| wait: step time | expire: step time | completions expired | tokens dropped |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for eta in BOUNDS:
        train, wait, mask, expire = (found[policy, eta] for policy in POLICIES)
        cells = (
            f"{train['step_time']:.2f}",  # mask takes the very same batches
            f"{train['worst_staleness']:g}",
            f"{mask['masked']:.0%}",
            f"{wait['step_time']:.2f}",
            f"{expire['step_time']:.2f}",
            f"{expire['expired']:.0%}",
            f"{expire['dropped']:.0%}",
        )
        lines.append(f"| {eta} | {' | '.join(cells)} |")
    unbounded = found["train", "inf"]
    lines.append(f"| ∞ | {unbounded['step_time']:.2f} | {unbounded['worst_staleness']:g} | | | | | |")
    return "\n".join(lines)


def _is_of(row: dict[str, Any], group_size: int, sigma: float) -> bool:
    return bool(row["group_size"] == group_size and row["sigma"] == sigma)


def _json(bound: float) -> float | str:
    return "inf" if math.isinf(bound) else int(bound)


def show(lines: Sequence[Setting], outcomes: Sequence[Outcome]) -> None:
    """Print the table, with shares in percent."""
    head = ("group", "sigma", "policy", "eta", "step time", "waits", "staleness", "worst", "masked", "by quartile")
    table = Table(*head, "touched", "expired", "by quartile", "dropped")
    for setting, one in zip(lines, outcomes, strict=True):
        table.add(
            setting.group_size,
            setting.sigma,
            setting.beyond_bound,
            f"{setting.max_staleness:g}",
            f"{one.step_time:.2f}",
            f"{one.waiting:.0%}",
            f"{one.mean_staleness:.2f}",
            f"{one.worst_staleness:g}",
            f"{one.masked:.1%}",
            _shares(one.masked_by_quartile),
            f"{one.touched:.1%}",
            f"{one.expired:.1%}",
            _shares(one.expired_by_quartile),
            f"{one.dropped:.1%}",
        )
    table.show()


def _shares(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.0%}" for share in shares) if any(shares) else ""


if __name__ == "__main__":
    main()
