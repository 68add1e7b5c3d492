"""Cost of the conductor's decisions: admit, finish and batch, with fake engines and trainer on a virtual clock.

    python -m benchmarks.decisions            trajectories per second, in memory and with the ledger on disk
    python -m benchmarks.decisions --profile  where the time of one run goes

Groups of 8 answers of 35 tokens, batches of 32 groups, 64 groups in flight, max_staleness 4. All decisions are made by
`rollout.controller`. Only the answers are made up; they are prepared before the time is measured, which includes making
the trajectory records. Rates are given by wall time, and by CPU time of the one core that is used: the rate on a
machine without other work.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.report import Table, save
from stretto.core.records import (
    Batch,
    Completion,
    Outcome,
    Prompt,
    Segment,
    StopReason,
    Trajectory,
    Verdict,
    trajectory_id,
)
from stretto.core.states import Journal
from stretto.rollout.config import BeyondBound, RolloutConfig
from stretto.rollout.controller import Controller, Ticket
from stretto.rollout.prompts import PromptStream
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto_foresight.simulator.accounts import Accounts
from stretto_foresight.simulator.engines import VirtualClock

GROUP, BATCH, IN_FLIGHT, TOKENS, STALENESS = 8, 32, 64, 35, 4
POLICIES: tuple[BeyondBound, ...] = ("train", "wait", "mask", "expire")
GOAL = 20_000  # trajectories per second


class FakeEngines:
    """Engines whose answers are prepared: one set for each version."""

    def __init__(self, versions: int) -> None:
        self._segments = [
            [(_completion(version, member).segment,) for member in range(GROUP)] for version in range(versions)
        ]
        chance = random.Random(1)
        self._durations = cycle([chance.lognormvariate(0.0, 0.8) for _ in range(997)])
        self._verdicts = [Verdict(outcome=Outcome.WRONG, reward=0.0), Verdict(outcome=Outcome.RIGHT, reward=1.0)]

    def seconds(self) -> float:
        """Draw the time of the next group. The median is that of one training step."""
        return next(self._durations)

    def answers(self, ticket: Ticket) -> list[Trajectory]:
        """Trajectories of the ticket's group, judged."""
        return [
            Trajectory(
                id=trajectory_id(ticket.group_id, member),
                segments=segments,
                verdict=self._verdicts[member % 2],
                text="1+2=3",
            )
            for member, segments in enumerate(self._segments[ticket.admitted_version])
        ]


def _completion(version: int, member: int) -> Completion:
    return Completion(
        "",
        member,
        Segment.of(
            token_ids=tuple(range(TOKENS)),
            behavior_logprobs=tuple(-0.1 * t for t in range(TOKENS)),
            versions=(version,) * TOKENS,
            stop_reason=StopReason.STOP,
        ),
    )


class Loop:
    """The conductor's loop without tasks: admit, finish, take, publish, load."""

    def __init__(self, controller: Controller, engines: FakeEngines, steps: int) -> None:
        self._controller, self._engines, self._steps = controller, engines, steps
        self._clock = VirtualClock()
        self._idle = True

    def run(self) -> None:
        """Run until the last step is published."""
        self._admit()
        while self._controller.published < self._steps:
            if not self._clock.advance():
                raise RuntimeError(f"stuck at version {self._controller.published}")

    def _admit(self) -> None:
        while (ticket := self._controller.admit()) is not None:
            self._clock.call_after(self._engines.seconds(), self._answered(ticket))

    def _answered(self, ticket: Ticket) -> Callable[[], None]:
        def finish() -> None:
            self._controller.finish(ticket, self._engines.answers(ticket))
            self._train()
            self._admit()

        return finish

    def _train(self) -> None:
        if self._idle and (batch := self._controller.take()) is not None:
            self._idle = False
            self._clock.call_after(1.0, lambda: self._publish(batch))

    def _publish(self, batch: Batch) -> None:
        self._idle = True
        self._controller.publish(batch.version + 1)
        self._controller.load(batch.version + 1)
        self._train()
        self._admit()


@contextmanager
def in_memory() -> Iterator[Journal]:
    """A journal that only counts."""
    yield Accounts()


@contextmanager
def on_disk() -> Iterator[Journal]:
    """The ledger of a run in a temporary folder."""
    with (
        tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as folder,
        closing(Ledger(Path(folder) / "ledger.sqlite", StoreConfig())) as ledger,
    ):
        yield ledger


JOURNALS = {"in memory": in_memory, "ledger": on_disk}


def trajectories_per_second(policy: BeyondBound, journal: str, steps: int) -> tuple[float, float]:
    """Run `steps` batches; return trained trajectories per second of wall time, and of CPU time."""
    config = RolloutConfig(
        batch_size=BATCH, group_size=GROUP, max_in_flight=IN_FLIGHT, max_staleness=STALENESS, beyond_bound=policy
    )
    prompts = [Prompt(id=str(i), token_ids=(1, 2, 3, 4), text="1+2=", answer="3") for i in range(1000)]
    engines = FakeEngines(steps + 1)
    with JOURNALS[journal]() as opened:
        controller = Controller(config, PromptStream(prompts, seed=1), opened, seed=1)
        wall, processor = time.perf_counter(), time.process_time()
        Loop(controller, engines, steps).run()
        trained = steps * BATCH * GROUP
        return trained / (time.perf_counter() - wall), trained / (time.process_time() - processor)


def measure(steps: int, runs: int) -> dict[str, Any]:
    """Measure every policy with both journals, interleaved; medians of the runs."""
    combinations = [(policy, journal) for policy in POLICIES for journal in JOURNALS]
    rates: dict[tuple[BeyondBound, str], list[tuple[float, float]]] = {combination: [] for combination in combinations}
    for _ in range(runs):
        for policy, journal in combinations:
            rates[policy, journal].append(trajectories_per_second(policy, journal, steps))
    rows = [
        {
            "beyond_bound": policy,
            "journal": journal,
            "trajectories_per_second": round(statistics.median(wall for wall, _ in found)),
            "by_processor_time": round(statistics.median(processor for _, processor in found)),
            "runs": [round(wall) for wall, _ in found],
        }
        for (policy, journal), found in rates.items()
    ]
    return {
        "goal": GOAL,
        "setting": {"group_size": GROUP, "batch_size": BATCH, "in_flight": IN_FLIGHT, "tokens": TOKENS, "steps": steps},
        "rows": rows,
    }


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    table = Table("beyond_bound", "journal", "trajectories/s", "by processor time", "runs")
    for row in results["rows"]:
        runs = " ".join(f"{rate:,}" for rate in row["runs"])
        by_clock, by_processor = row["trajectories_per_second"], row["by_processor_time"]
        table.add(row["beyond_bound"], row["journal"], f"{by_clock:,}", f"{by_processor:,}", runs)
    table.show()
    print(f"goal: {results['goal']:,}")


def profile(steps: int) -> None:
    """Print where the time of one run with the ledger goes."""
    profiler = cProfile.Profile()
    profiler.runcall(trajectories_per_second, "mask", "ledger", steps)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="batches of each run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    words = parser.parse_args()
    if words.profile:
        profile(words.steps)
        return
    results = measure(words.steps, words.runs)
    show(results)
    save("decisions", results)


if __name__ == "__main__":
    main()
